//! The manager's part of the exchanges of its pages.

use super::{Hooks, MergeOp, Merger, Ticket};
use crate::merged::{Level, MAX_SHARERS};
use crate::{NodeId, Nodes, Page};

/// A page that is, or may become, merged.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Managed {
    page: Page,
    level: Level,
    round: u64,
    stage: Stage,
    /// Whose answer is awaited.
    awaited: Nodes,
    /// Who has not settled yet.
    unsettled: Nodes,
    accepted: Nodes,
    /// Somebody refused, or wants it to leave.
    must_leave: bool,
    /// Who has it in a CR3, and the sequence of each node's last word on that.
    loaded: Nodes,
    sequences: [u64; MAX_SHARERS as usize],
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Stage {
    /// The engine fetches it.
    Taking,
    /// It is offered when what this collection found has left.
    Taken(Ticket),
    Offered,
    Merged,
    Dropping,
    /// It has left, but others' messages may come after what has not yet.
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

    /// The page is here, nobody else has any right to it, and this node's CPUs don't use it: see [`Hooks::take`].
    pub fn taken(&mut self, page: Page, hooks: &mut impl Hooks) {
        // The page is a message to all, of what this node did before.
        let ticket = self.collect(hooks);
        let taking = |one: &&mut Managed| one.page == page && one.stage == Stage::Taking;
        if let Some(one) = self.managed.iter_mut().find(taking) {
            one.stage = Stage::Taken(ticket);
        }
        self.offer(hooks);
    }

    /// Offers what was taken and waits for nothing any more.
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

    /// A message to this node as the page's manager.
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
            // It has left already, and who asks has not heard of it yet.
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
            // Proposals are handled above, and the rest is for others than the manager.
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

    /// All have voted?
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

    /// It leaves, unless a root is still loaded somewhere.
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
                // This node's own part; its twin stays until the others' last changes are in the page.
                hooks.close(page);
                self.collect(hooks);
                self.leaving.owe_settled(page, round);
                self.send_op(me, page, round, MergeOp::Dropped, hooks);
                self.settle(hooks);
            }
            // It begins only if somebody has it loaded.
            Stage::Offered if !one.must_leave => self.send_op(from, page, round, MergeOp::Kept, hooks),
            // Whoever asks hears of it with all others.
            Stage::Dropping | Stage::Offered | Stage::Taking | Stage::Taken(_) => {}
            Stage::Settling => self.send_op(from, page, round, MergeOp::Left, hooks),
        }
    }

    /// All have dropped it?
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
