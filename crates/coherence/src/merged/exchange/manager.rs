//! The manager's part of an exchange.

use super::{Hooks, MergeOp, Merger, Ticket};
use crate::merged::{Level, MAX_SHARERS};
use crate::{NodeId, Nodes, Page};

/// A page that is merged or is joining.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Managed {
    page: Page,
    level: Level,
    round: u64,
    stage: Stage,
    /// Nodes whose answer is pending.
    awaited: Nodes,
    /// Nodes that have not sent Settled yet.
    unsettled: Nodes,
    accepted: Nodes,
    /// A node refused the page, or requested that it leave.
    must_leave: bool,
    /// Nodes that have the root in a CR3, and the sequence of each node's last report.
    loaded: Nodes,
    sequences: [u64; MAX_SHARERS as usize],
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Stage {
    /// The engine acquires the page.
    Taking,
    /// The page is offered when the pages of this collection have left.
    Taken(Ticket),
    Offered,
    Merged,
    Dropping,
    /// The page has left. Messages of other nodes may still depend on pages that have not.
    Settling,
}

impl Managed {
    fn update_loaded(&mut self, from: NodeId, is_loaded: bool, sequence: u64) {
        let last = &mut self.sequences[usize::from(from.0)];
        if sequence > *last {
            *last = sequence;
            let loaded = self.loaded.without(from);
            self.loaded = if is_loaded { loaded.with(from) } else { loaded };
        }
    }
}

impl<const WORDS: usize> Merger<WORDS> {
    fn managed(&self, page: Page, round: u64) -> Option<usize> {
        self.managed
            .iter()
            .position(|one| (one.page, one.round) == (page, round))
    }

    /// Handles a page that [`Hooks::take`] acquired: no other node has a right to it, and this node's CPUs
    /// don't use it.
    pub fn taken(&mut self, page: Page, hooks: &mut impl Hooks) {
        // All nodes receive by the offer what this node did before.
        let ticket = self.collect(hooks);
        let taking = |one: &&mut Managed| one.page == page && one.stage == Stage::Taking;
        if let Some(one) = self.managed.iter_mut().find(taking) {
            one.stage = Stage::Taken(ticket);
        }
        self.offer(hooks);
    }

    /// Offers the pages that were acquired and wait for nothing.
    pub(super) fn offer(&mut self, hooks: &mut impl Hooks) {
        let is_due = |one: &Managed| matches!(one.stage, Stage::Taken(ticket) if self.may_send(ticket));
        let Some(at) = self.managed.iter().position(is_due) else {
            return;
        };
        let (page, level, round) = (
            self.managed[at].page,
            self.managed[at].level,
            self.managed[at].round,
        );
        if !self.agrees(page, level) {
            self.managed.swap_remove(at);
            hooks.give_back(page);
            return self.offer(hooks);
        }
        self.twins.insert(page, level, round, hooks);
        let others = self.others();
        self.managed[at].stage = Stage::Offered;
        self.managed[at].awaited = others.with(self.me());
        for node in others.iter() {
            self.send_op(node, page, round, MergeOp::Offer(level), hooks);
        }
        let accept = self.accept(page);
        self.send_op(self.me(), page, round, accept, hooks);
        self.offer(hooks);
    }

    /// Handles a message to this node as the page's manager.
    pub(super) fn manage(
        &mut self,
        from: NodeId,
        page: Page,
        round: u64,
        op: MergeOp,
        hooks: &mut impl Hooks,
    ) {
        if let MergeOp::Propose(level) = op {
            return self.proposed(page, level, hooks);
        }
        let Some(at) = self.managed(page, round) else {
            // The page has left already, and the sender has not received Left yet.
            if matches!(op, MergeOp::Leave | MergeOp::Loaded { is_loaded: false, .. }) {
                self.send_op(from, page, round, MergeOp::Left, hooks);
            }
            return;
        };
        let one = &mut self.managed[at];
        match op {
            MergeOp::Accept { is_loaded, sequence } => {
                one.update_loaded(from, is_loaded, sequence);
                one.accepted = one.accepted.with(from);
                one.awaited = one.awaited.without(from);
                self.vote(at, hooks);
            }
            MergeOp::Refuse => {
                one.must_leave = true;
                one.awaited = one.awaited.without(from);
                self.vote(at, hooks);
            }
            MergeOp::Leave => {
                one.must_leave = true;
                self.leave(at, from, hooks);
            }
            MergeOp::Loaded { is_loaded, sequence } => {
                one.update_loaded(from, is_loaded, sequence);
                if !is_loaded {
                    self.leave(at, from, hooks);
                }
            }
            MergeOp::Dropped => {
                one.awaited = one.awaited.without(from);
                self.drop_last(at, hooks);
            }
            MergeOp::Settled => {
                one.unsettled = one.unsettled.without(from);
                self.give_back(page, round, hooks);
            }
            // Proposals are handled above; the other operations are not for the manager.
            MergeOp::Propose(_)
            | MergeOp::Offer(_)
            | MergeOp::Begin
            | MergeOp::Withdraw
            | MergeOp::Kept
            | MergeOp::Drop
            | MergeOp::Left => {}
        }
    }

    fn proposed(&mut self, page: Page, level: Level, hooks: &mut impl Hooks) {
        let is_known = self.managed.iter().any(|one| one.page == page);
        if is_known || !hooks.is_ram(page) || self.managed.len() == self.limit || !self.agrees(page, level) {
            return;
        }
        self.round += 1;
        self.managed.push(Managed {
            page,
            level,
            round: self.round,
            stage: Stage::Taking,
            awaited: Nodes::NONE,
            unsettled: Nodes::NONE,
            accepted: Nodes::NONE,
            must_leave: false,
            loaded: Nodes::NONE,
            sequences: [0; MAX_SHARERS as usize],
        });
        hooks.take(page);
    }

    /// Begins or withdraws the page once all nodes have answered the offer.
    fn vote(&mut self, at: usize, hooks: &mut impl Hooks) {
        let one = &self.managed[at];
        if one.stage != Stage::Offered || !one.awaited.is_empty() {
            return;
        }
        let (page, round) = (one.page, one.round);
        let is_detached = one.level == self.top && one.loaded.is_empty() && !self.is_pinned(page);
        if one.must_leave || is_detached {
            let told = one.accepted.without(self.me());
            self.managed.swap_remove(at);
            for node in told.iter() {
                self.send_op(node, page, round, MergeOp::Withdraw, hooks);
            }
            self.forget(page, round, hooks);
            hooks.give_back(page);
            return self.left(page, round, hooks);
        }
        self.managed[at].stage = Stage::Merged;
        for node in self.others().with(self.me()).iter() {
            self.send_op(node, page, round, MergeOp::Begin, hooks);
        }
    }

    /// Makes the page leave, unless a root is still loaded on some node.
    fn leave(&mut self, at: usize, from: NodeId, hooks: &mut impl Hooks) {
        let (me, others) = (self.me(), self.others());
        let one = &mut self.managed[at];
        let (page, round) = (one.page, one.round);
        match one.stage {
            Stage::Merged if !one.must_leave && !one.loaded.is_empty() => {
                self.send_op(from, page, round, MergeOp::Kept, hooks);
            }
            Stage::Merged => {
                one.stage = Stage::Dropping;
                one.awaited = others.with(me);
                one.unsettled = one.awaited;
                for node in others.iter() {
                    self.send_op(node, page, round, MergeOp::Drop, hooks);
                }
                // The twin of this node stays until the last diffs of the others are applied.
                hooks.close(page);
                self.collect(hooks);
                self.leaving.owe_settled(page, round);
                self.send_op(me, page, round, MergeOp::Dropped, hooks);
                self.settle(hooks);
            }
            // A root begins only if some node has it loaded.
            Stage::Offered if !one.must_leave => self.send_op(from, page, round, MergeOp::Kept, hooks),
            // The sender receives Left with all others.
            Stage::Dropping | Stage::Offered | Stage::Taking | Stage::Taken(_) => {}
            Stage::Settling => self.send_op(from, page, round, MergeOp::Left, hooks),
        }
    }

    /// Ends the round once all nodes have dropped the page.
    fn drop_last(&mut self, at: usize, hooks: &mut impl Hooks) {
        let one = &mut self.managed[at];
        if one.stage != Stage::Dropping || !one.awaited.is_empty() {
            return;
        }
        let (page, round) = (one.page, one.round);
        one.stage = Stage::Settling;
        self.forget(page, round, hooks);
        for node in self.others().iter() {
            self.send_op(node, page, round, MergeOp::Left, hooks);
        }
        self.left(page, round, hooks);
        self.give_back(page, round, hooks);
    }

    fn give_back(&mut self, page: Page, round: u64, hooks: &mut impl Hooks) {
        let Some(at) = self.managed(page, round) else {
            return;
        };
        let one = &self.managed[at];
        if one.stage == Stage::Settling && one.unsettled.is_empty() {
            self.managed.swap_remove(at);
            hooks.give_back(page);
        }
    }
}
