//! The exchange of one node: how pages join and leave, and which diffs precede each message.
//!
//! ```text
//!  any node              the page's manager                       all others
//!  Propose ────────────► takes the page for itself (engine)
//!                        collects, then Offer, with the page ───► twin taken, not open yet
//!                                         ◄────────── Accept or Refuse
//!                        all accepted: Begin ───────────────────► open
//!
//!  finds it detached
//!  Leave ──────────────► Drop ──────────────────────────────────► closed, collected, forgotten
//!  (sends nothing else)                   ◄────────── Dropped, and Settled when all it waits for has left
//!  resumes  ◄── Left ─── has the only copy; gives it back to the engine when all have settled
//! ```
//!
//! The manager holds a merged page in its engine as a page that was granted and not *used* yet, so requests
//! for it are deferred. A page joins if every node finds a merged table that points to it, or if it is a root
//! that some vCPU has loaded. A *pinned* root stays merged while no vCPU has it loaded. Each message carries
//! the round of the page, as links need not keep order.

mod leaving;
mod manager;

use std::ops::Range;

use super::twins::{Accessed, Batch, Diff, Merges, Twins};
use super::{AtomicPageWords, Level, VectorTime, entry};
use crate::{Layout, NodeId, Nodes, Page};
use leaving::Leaving;
use manager::Managed;

/// Actions of the driver, performed in the order of the calls, each before it returns.
pub trait Hooks: AtomicPageWords {
    /// Sends a message to a node.
    fn send(&mut self, to: NodeId, message: MergeMessage);
    /// Sends diffs to all other nodes.
    fn broadcast(&mut self, batch: Batch<'_>);
    /// Acquires a page for this node alone through the engine ([`crate::Engine::fault`], for writing), closed
    /// to its CPUs. The driver then calls [`Merger::taken`], and [`crate::Engine::used`] only after
    /// [`Hooks::give_back`].
    fn take(&mut self, page: Page);
    /// Returns the page to the engine, with the bytes that it has here: opens it to this node's CPUs and
    /// calls [`crate::Engine::used`].
    fn give_back(&mut self, page: Page);
    /// Stores the bytes of an offer, with the page closed to this node's CPUs. From then on nothing else may
    /// write there: the bytes are valid, though this node has no right to the page.
    fn store(&mut self, page: Page);
    /// Opens a page to this node's CPUs for reading and writing.
    fn open(&mut self, page: Page);
    /// Closes a page. On return no CPU of this node can use it, and all its writes have reached the bytes.
    fn close(&mut self, page: Page);
}

/// A page that is to be merged.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Proposal {
    /// Page number.
    pub page: Page,
    /// Level of the table; the guest's top level for a root.
    pub level: Level,
}

/// A message about one merged page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct MergeMessage {
    /// Vector time at which the message may be handled ([`Merger::is_ready`]).
    pub stamp: VectorTime,
    /// Page number.
    pub page: Page,
    /// Round of the page: how often its manager has merged it. 0 before there is a round.
    pub round: u64,
    /// Operation on the page.
    pub op: MergeOp,
}

/// Operation on one merged page; the module has the exchange.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum MergeOp {
    /// To the manager: the page is hot, and a table of this level.
    Propose(Level),
    /// To all others, with the page's bytes: take a twin.
    Offer(Level),
    /// To the manager: the sender has a twin.
    Accept {
        /// See [`MergeOp::Loaded`].
        is_loaded: bool,
        /// See [`MergeOp::Loaded`].
        sequence: u64,
    },
    /// To the manager: the page is not a table here, or the sender has no room.
    Refuse,
    /// To all others: open the page.
    Begin,
    /// To all others: drop the twin, the page is not merged.
    Withdraw,
    /// To the manager: the page may no longer be a table.
    Leave,
    /// To a root's manager: whether a vCPU of the sender has the root in CR3. The highest sequence of each
    /// node counts.
    Loaded {
        /// Whether a vCPU has it.
        is_loaded: bool,
        /// Sequence number of the sender's reports.
        sequence: u64,
    },
    /// From a root's manager: a vCPU of another node has it.
    Kept,
    /// To all others: close the page and send its diffs.
    Drop,
    /// To the manager: the page is closed and its diffs are sent.
    Dropped,
    /// To the manager: all pages have left that had to leave before the sender's next message.
    Settled,
    /// To all others: the page is merged nowhere.
    Left,
}

impl MergeOp {
    /// Returns whether the page's bytes are attached.
    pub fn carries_page(&self) -> bool {
        matches!(self, Self::Offer(_))
    }
}

/// Names the pages that must leave before a message may be sent.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(u64);

/// Merged pages of one node. It allocates nothing after [`Merger::new`].
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
    /// Last pinned root that a vCPU of this node had loaded.
    last_pinned: Option<Page>,
}

impl<const WORDS: usize> Merger<WORDS> {
    /// Creates a merger for at most `limit` pages and `vcpus` vCPUs, all of which may come to this node. The
    /// layout has at most [`super::MAX_SHARERS`] nodes; only its managers matter, not its stripe.
    ///
    /// `pinned` is a range of pages: roots that stay merged while no vCPU has them loaded, because the guest
    /// never reuses such a page. It is the same on all nodes, and may be empty.
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

    /// Returns whether the page is a pinned root.
    fn is_pinned(&self, page: Page) -> bool {
        self.pinned.contains(&page.0)
    }

    /// Returns the vector time of a message sent now.
    pub fn stamp(&self) -> VectorTime {
        self.stamp
    }

    /// Returns whether a message with this vector time may be handled.
    pub fn is_ready(&self, stamp: &VectorTime) -> bool {
        self.stamp.covers(stamp)
    }

    /// Returns whether a batch may be applied.
    pub fn awaits(&self, from: NodeId, stamp: &VectorTime) -> bool {
        self.stamp.awaits(from, stamp)
    }

    /// Returns whether this node's CPUs may use the page as merged.
    pub fn is_merged(&self, page: Page) -> bool {
        self.twins.is_open(page)
    }

    /// Returns whether this node has a twin of the page: the page is merged, or was offered and is not open
    /// yet. Its bytes here are valid, though this node may have no right to it.
    pub fn has_twin(&self, page: Page) -> bool {
        self.twins.round(page).is_some()
    }

    /// Returns the counters.
    pub fn merges(&self) -> Merges {
        self.twins.merges
    }

    /// Returns what may be merged because the page is hot, by the merged tables and CR3s known here. That is
    /// the page itself, or else the pinned root that was loaded here last: the hot page may be below it. That
    /// root may never be hot itself, as CPUs reach its tables through their own roots.
    pub fn suspect(&self, page: Page) -> Option<Proposal> {
        if self.twins.round(page).is_some() {
            return None;
        }
        let pinned = || {
            let page = self
                .last_pinned
                .filter(|root| self.twins.round(*root).is_none())?;
            let level = self.top;
            Some(Proposal { page, level })
        };
        self.as_table(page).or_else(pinned)
    }

    fn as_table(&self, page: Page) -> Option<Proposal> {
        let below = self.twins.level_below(page);
        let level = match self.roots.contains(&Some(page)) {
            // A root that is also below a root maps itself: it is not merged.
            true if below.is_none() => Some(self.top),
            true => None,
            false => below,
        };
        level.map(|level| Proposal { page, level })
    }

    /// Proposes a page to its manager. If a node refuses, nothing happens; the caller proposes again when the
    /// page has been hot as often again.
    pub fn propose(&mut self, proposal: Proposal, hooks: &mut impl Hooks) {
        let Proposal { page, level } = proposal;
        self.send_op(self.layout.manager(page), page, 0, MergeOp::Propose(level), hooks);
    }

    /// Sends this node's diffs to all other nodes. They include every write that the caller has proven
    /// finished. The caller revokes the rights that its next message transfers before this call.
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

    /// Returns whether the message of a collection may be sent.
    pub fn may_send(&self, ticket: Ticket) -> bool {
        self.leaving.is_over(ticket)
    }

    /// Applies another node's diffs. The batch must be one that this node [awaits](Merger::awaits).
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

    /// Records the last CR3 of a vCPU of this node that named a pinned root. Other CR3s are ignored.
    pub fn last_pinned(&mut self, cr3: u64) {
        self.last_pinned = entry::root(cr3)
            .filter(|root| self.is_pinned(*root))
            .or(self.last_pinned);
    }

    /// Records a vCPU's CR3, or that the vCPU left this node (`None`). The caller does so before each
    /// collection for all vCPUs whose CR3 may have changed: then a root has left before the guest reuses its
    /// page. Pinned roots are not reported.
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

    /// Handles a message for which this node [is ready](Merger::is_ready).
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

    /// Sends a message to another node, or handles it here if this node is the manager.
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

    /// Returns whether the page is a table by this node's records, and this node has room.
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

    /// Drops the twin. A message that waits for the page to leave also waits for the pages that only it
    /// pointed to.
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

    /// Requests that detached pages leave, and those that only they point to. Messages that wait for `since`
    /// also waits for these.
    fn request_leave(&mut self, since: Option<u64>, hooks: &mut impl Hooks) {
        while let Some((page, round)) = self.twins.next_detached() {
            self.leaving.add_unconditional(page, round, since);
            self.send_op(self.layout.manager(page), page, round, MergeOp::Leave, hooks);
        }
    }

    /// Sends the Settled messages that are due, and offers the pages that waited for the same.
    fn settle(&mut self, hooks: &mut impl Hooks) {
        while let Some((page, round)) = self.leaving.next_settled() {
            self.send_op(self.layout.manager(page), page, round, MergeOp::Settled, hooks);
        }
        self.offer(hooks);
    }
}
