//! One node's part in merging: how pages join and leave, and what goes before each message between the nodes.
//!
//! ```text
//!  any node              the page's manager                       all others
//!  Propose ────────────► takes the page for itself (engine)
//!                        collects, then Offer, with the page ───► twin taken, not open yet
//!                                         ◄────────── Accept or Refuse
//!                        all accepted: Begin ───────────────────► open
//!
//!  finds it loose
//!  Leave ──────────────► Drop ──────────────────────────────────► closed, collected, forgotten
//!  (sends nothing else)                   ◄────────── Dropped, and Settled when all it waits for has left
//!  goes on  ◄── Left ─── has the only copy; gives it back to the engine when all have settled
//! ```
//!
//! The manager holds the page in its engine, as one that has been granted and is not *used* yet, all the time that it is
//! merged: requests for it wait there. A page joins if every node finds a merged table that leads to it, or it is a root that
//! some vCPU has loaded; a *pinned* root then stays when none has. Messages of one page's exchange carry its round, as links need not keep order.

mod leaving;
mod manager;

use std::ops::Range;

use super::twins::{Accessed, Batch, Diff, Merges, Twins};
use super::{AtomicPageWords, Level, VectorTime, entry};
use crate::{Layout, NodeId, Nodes, Page};
use leaving::Leaving;
use manager::Managed;

/// What the driver does, in the order of the calls, each before it returns.
pub trait Hooks: AtomicPageWords {
    /// Send a message to a node.
    fn send(&mut self, to: NodeId, message: MergeMessage);
    /// Send changes to all other nodes.
    fn broadcast(&mut self, batch: Batch<'_>);
    /// Get a page for this node alone through the engine ([`crate::Engine::fault`], for writing), closed to its CPUs; then call
    /// [`Merger::taken`], and [`crate::Engine::used`] no sooner than after [`Hooks::give_back`].
    fn take(&mut self, page: Page);
    /// The page is the engine's again, with the bytes it has here: open it to this node's CPUs and call [`crate::Engine::used`].
    fn give_back(&mut self, page: Page);
    /// Put the bytes that came with the offer in the page's place, closed to this node's CPUs. From now on nothing else may write there,
    /// though this node has no right to the page: what is there counts.
    fn store(&mut self, page: Page);
    /// Open a page to this node's CPUs, for reading and writing.
    fn open(&mut self, page: Page);
    /// Close it. On return no CPU of this node can use it, nor has anything it wrote there still to reach its bytes.
    fn close(&mut self, page: Page);
}

/// A page that should be merged.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Proposal {
    /// Which.
    pub page: Page,
    /// As what. The guest's top level for roots.
    pub level: Level,
}

/// What nodes say to one another about one page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct MergeMessage {
    /// Acted on when [`Merger::is_ready`] for it.
    pub stamp: VectorTime,
    /// Which.
    pub page: Page,
    /// Which time that it is merged; numbered by its manager. 0 before there is one.
    pub round: u64,
    /// What.
    pub op: MergeOp,
}

/// See the module.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum MergeOp {
    /// To the manager: it is hot, and a table of this level.
    Propose(Level),
    /// To all others, with the page's bytes.
    Offer(Level),
    /// To the manager. `is_loaded`: a vCPU here has it in CR3.
    Accept {
        /// See [`MergeOp::Loaded`].
        is_loaded: bool,
        /// See [`MergeOp::Loaded`].
        sequence: u64,
    },
    /// To the manager: not a table as far as this node knows, or no room.
    Refuse,
    /// To all others: open it.
    Begin,
    /// To all others: it is not merged after all.
    Withdraw,
    /// To the manager: it may be no table any more.
    Leave,
    /// To a root's manager: whether a vCPU here has it in CR3. The highest sequence of a node counts.
    Loaded {
        /// There is one.
        is_loaded: bool,
        /// Counts this node's words on the matter.
        sequence: u64,
    },
    /// Back: another node's vCPU has it.
    Kept,
    /// To all others: give it up.
    Drop,
    /// To the manager: given up, and everything changed in it sent.
    Dropped,
    /// To the manager: what had to leave before this node's next message has left.
    Settled,
    /// To all others: nobody has it as merged any more.
    Left,
}

impl MergeOp {
    /// Whether the page's bytes go beside it.
    pub fn carries_page(&self) -> bool {
        matches!(self, Self::Offer(_))
    }
}

/// What a collection found has to leave before the message that it was made for is sent.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(u64);

/// One node's merged pages. It allocates nothing once it is made.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Merger<const WORDS: usize = 512> {
    layout: Layout,
    top: Level,
    pub(super) twins: Twins<WORDS>,
    stamp: VectorTime,
    pub(super) diffs: Vec<Diff>,
    leaving: Leaving,
    managed: Vec<Managed>,
    limit: usize,
    round: u64,
    sequence: u64,
    roots: Vec<Option<Page>>,
    pinned: Range<u32>,
    /// The last of these that a vCPU here had loaded.
    last_pinned: Option<Page>,
}

impl<const WORDS: usize> Merger<WORDS> {
    /// For at most `limit` pages and so many vCPUs, which may all come here. The layout has at most
    /// [`super::MAX_SHARERS`] nodes; it is of one stripe or any, only its managers count.
    ///
    /// `standing`, numbers of pages: roots that stay merged when no vCPU has them loaded, as the guest never uses such a page for
    /// anything else. All nodes have the same; empty if there are none.
    pub fn new(
        layout: Layout,
        top: Level,
        limit: usize,
        vcpus: usize,
        accessed: Accessed,
        pinned: Range<u32>,
    ) -> Self {
        assert!(layout.nodes <= super::MAX_SHARERS, "more nodes can't merge pages");
        Self {
            layout,
            top,
            twins: Twins::new(limit, top, accessed),
            stamp: VectorTime::default(),
            diffs: Vec::with_capacity(limit * WORDS),
            leaving: Leaving::new(limit),
            managed: Vec::with_capacity(limit),
            limit,
            round: 0,
            sequence: 0,
            roots: vec![None; vcpus],
            pinned,
            last_pinned: None,
        }
    }

    fn me(&self) -> NodeId {
        self.layout.me
    }

    fn others(&self) -> Nodes {
        Nodes::first(self.layout.nodes).without(self.me())
    }

    /// Whether the page, as a root, stays while no vCPU has it loaded.
    fn is_pinned(&self, page: Page) -> bool {
        self.pinned.contains(&page.0)
    }

    /// What a message sent now comes after.
    pub fn stamp(&self) -> VectorTime {
        self.stamp
    }

    /// Whether a message, or one of [`MergeMessage`], may be acted on.
    pub fn is_ready(&self, stamp: &VectorTime) -> bool {
        self.stamp.covers(stamp)
    }

    /// Whether a batch may be applied.
    pub fn awaits(&self, from: NodeId, stamp: &VectorTime) -> bool {
        self.stamp.awaits(from, stamp)
    }

    /// Whether CPUs of this node use it as merged.
    pub fn is_merged(&self, page: Page) -> bool {
        self.twins.is_open(page)
    }

    /// Whether this node has a twin of it: it is merged, or was offered and is not open yet. The page's bytes here count, though this
    /// node may have no right to it.
    pub fn has_twin(&self, page: Page) -> bool {
        self.twins.round(page).is_some()
    }

    /// What happened so far.
    pub fn merges(&self) -> Merges {
        self.twins.merges
    }

    /// What can be merged since this page is hot: by a look at the merged tables and the CR3s that are known here. The page itself,
    /// or else the pinned root that was loaded here last, for what is hot may be below that; by itself it may never be, as CPUs
    /// use its tables through roots of their own.
    pub fn suspect(&self, page: Page) -> Option<Proposal> {
        if self.twins.round(page).is_some() {
            return None;
        }
        let pinned = || {
            let page = self.last_pinned.filter(|root| self.twins.round(*root).is_none())?;
            let level = self.top;
            Some(Proposal { page, level })
        };
        self.as_table(page).or_else(pinned)
    }

    fn as_table(&self, page: Page) -> Option<Proposal> {
        let below = self.twins.level_below(page);
        let level = match self.roots.contains(&Some(page)) {
            // A root that is also below one maps itself: it stays as it is.
            true if below.is_none() => Some(self.top),
            true => None,
            false => below,
        };
        level.map(|level| Proposal { page, level })
    }

    /// Proposes a page to its manager. Nothing comes of it if a node refuses; propose again when it has been hot for as long again.
    pub fn propose(&mut self, proposal: Proposal, hooks: &mut impl Hooks) {
        let Proposal { page, level } = proposal;
        self.send_op(self.layout.manager(page), page, 0, MergeOp::Propose(level), hooks);
    }

    /// Sends what changed here to all other nodes. What was proven not to be used any more before the call is in it; the rights that
    /// the next message gives away are taken away before.
    pub fn collect(&mut self, hooks: &mut impl Hooks) -> Ticket {
        // Roots first, while CPUs write: see the module `twins`.
        for at in 0..self.twins.len() {
            self.twins.collect(at, hooks, &mut self.diffs);
        }
        self.send_diffs(hooks)
    }

    pub(super) fn send_diffs(&mut self, hooks: &mut impl Hooks) -> Ticket {
        if !self.diffs.is_empty() {
            self.diffs.reverse();
            self.stamp.add_one(self.me());
            hooks.broadcast(Batch {
                from: self.me(),
                stamp: self.stamp,
                diffs: &self.diffs,
            });
            self.diffs.clear();
        }
        self.request_leave(None, hooks);
        self.leaving.ticket()
    }

    /// Whether the message that something was collected for may be sent.
    pub fn may_send(&self, ticket: Ticket) -> bool {
        self.leaving.is_over(ticket)
    }

    /// Takes over another node's changes. Call it only for a batch that it [awaits](Merger::awaits).
    pub fn apply(&mut self, batch: Batch<'_>, hooks: &mut impl Hooks) {
        assert!(self.awaits(batch.from, &batch.stamp), "a batch out of order");
        for diff in batch.diffs {
            self.twins.apply(diff, hooks);
        }
        self.applied(batch.from, hooks);
    }

    pub(super) fn applied(&mut self, from: NodeId, hooks: &mut impl Hooks) {
        self.stamp.add_one(from);
        self.request_leave(None, hooks);
    }

    /// A vCPU of this node had this CR3 loaded, the last of those that name a pinned root. Others count for nothing.
    pub fn last_pinned(&mut self, cr3: u64) {
        self.last_pinned = entry::root(cr3).filter(|root| self.is_pinned(*root)).or(self.last_pinned);
    }

    /// A vCPU of this node has this CR3, or has gone (`None`). Say it before each collection, of all vCPUs that may have changed theirs:
    /// then a root has left before its page is used for anything else. Of a pinned root nobody asks who has it.
    pub fn loaded(&mut self, vcpu: usize, cr3: Option<u64>, hooks: &mut impl Hooks) {
        let root = cr3.and_then(entry::root);
        let before = std::mem::replace(&mut self.roots[vcpu], root);
        if before == root {
            return;
        }
        for page in [root, before].into_iter().flatten() {
            let is_loaded = self.roots.contains(&Some(page));
            let is_news = if is_loaded {
                Some(page) == root
            } else {
                Some(page) == before
            };
            let matters = is_news && !self.is_pinned(page);
            let Some(round) = self.twins.round(page).filter(|_| matters) else {
                continue;
            };
            if !is_loaded {
                self.leaving.add_unloaded(page, round);
            }
            self.sequence += 1;
            let sequence = self.sequence;
            self.send_op(
                self.layout.manager(page),
                page,
                round,
                MergeOp::Loaded { is_loaded, sequence },
                hooks,
            );
        }
    }

    /// A message from a node, for which this one [is ready](Merger::is_ready).
    pub fn receive(&mut self, from: NodeId, message: MergeMessage, hooks: &mut impl Hooks) {
        assert!(
            self.is_ready(&message.stamp),
            "a message before what it comes after"
        );
        let MergeMessage { page, round, op, .. } = message;
        match op {
            MergeOp::Offer(level) => self.offered(from, page, level, round, hooks),
            MergeOp::Begin if self.twins.round(page) == Some(round) => {
                self.twins.set_open(page);
                hooks.open(page);
            }
            MergeOp::Begin => {}
            MergeOp::Withdraw => {
                self.forget(page, round, hooks);
                self.left(page, round, hooks);
            }
            MergeOp::Drop => self.dropped(from, page, round, hooks),
            MergeOp::Left => self.left(page, round, hooks),
            MergeOp::Kept => {
                self.leaving.kept(page, round);
                self.settle(hooks);
            }
            MergeOp::Propose(_)
            | MergeOp::Accept { .. }
            | MergeOp::Refuse
            | MergeOp::Leave
            | MergeOp::Loaded { .. }
            | MergeOp::Dropped
            | MergeOp::Settled => self.manage(from, page, round, op, hooks),
        }
    }

    /// To another node, or to this one as the manager.
    fn send_op(&mut self, to: NodeId, page: Page, round: u64, op: MergeOp, hooks: &mut impl Hooks) {
        let message = MergeMessage {
            stamp: self.stamp,
            page,
            round,
            op,
        };
        if to == self.me() {
            self.receive(to, message, hooks);
        } else {
            hooks.send(to, message);
        }
    }

    /// Whether this page is a table as far as this node knows.
    fn agrees(&self, page: Page, level: Level) -> bool {
        let is_linked = level == self.top || self.twins.links(page, level) > 0;
        is_linked && self.twins.round(page).is_none() && self.twins.has_room()
    }

    fn accept(&mut self, page: Page) -> MergeOp {
        self.sequence += 1;
        MergeOp::Accept {
            is_loaded: self.roots.contains(&Some(page)),
            sequence: self.sequence,
        }
    }

    fn offered(&mut self, from: NodeId, page: Page, level: Level, round: u64, hooks: &mut impl Hooks) {
        if !hooks.is_ram(page) || !self.agrees(page, level) {
            return self.send_op(from, page, round, MergeOp::Refuse, hooks);
        }
        hooks.store(page);
        self.twins.insert(page, level, round, hooks);
        let accept = self.accept(page);
        self.send_op(from, page, round, accept, hooks);
    }

    fn dropped(&mut self, from: NodeId, page: Page, round: u64, hooks: &mut impl Hooks) {
        if self.twins.round(page) != Some(round) {
            return;
        }
        hooks.close(page);
        self.collect(hooks);
        self.forget(page, round, hooks);
        self.send_op(from, page, round, MergeOp::Dropped, hooks);
        self.leaving.owe_settled(page, round);
        self.settle(hooks);
    }

    /// The page has no twin here any more. Who waits until it has left waits for what only it led to as well.
    fn forget(&mut self, page: Page, round: u64, hooks: &mut impl Hooks) {
        if self.twins.round(page) == Some(round) {
            self.twins.remove(page);
            self.request_leave(self.leaving.since(page, round), hooks);
        }
    }

    fn left(&mut self, page: Page, round: u64, hooks: &mut impl Hooks) {
        self.leaving.left(page, round);
        self.settle(hooks);
    }

    /// Asks for what is loose here, and for what only that leads to. Whoever waits for `since` waits for these too.
    fn request_leave(&mut self, since: Option<u64>, hooks: &mut impl Hooks) {
        while let Some((page, round)) = self.twins.next_detached() {
            self.leaving.add_unconditional(page, round, since);
            self.send_op(self.layout.manager(page), page, round, MergeOp::Leave, hooks);
        }
    }

    /// Says what was owed until something had left, and offers what waited for the same.
    fn settle(&mut self, hooks: &mut impl Hooks) {
        while let Some((page, round)) = self.leaving.next_settled() {
            self.send_op(self.layout.manager(page), page, round, MergeOp::Settled, hooks);
        }
        self.offer(hooks);
    }
}
