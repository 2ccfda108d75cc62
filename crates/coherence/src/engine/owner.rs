//! Transitions of the owner of a page, or of a future owner.

use super::{Effect, Transition};
use crate::manager::takes_ownership;
use crate::state::{NextOwner, Stage};
use crate::{Access, Body, Data, NodeId, Nodes, Payload, Right, Want};

impl Transition<'_> {
    /// Grants an owner's processor more than its right.
    pub(super) fn upgrade_owned(&mut self, access: Access) {
        let contents = match self.state.right {
            Right::None => Data::Zero,
            Right::Read | Right::Write => Data::Local,
        };
        self.counters.local += u64::from(access == Access::Read || self.state.copyset.is_empty());
        match access {
            Access::Read => self.grant(Right::Read, contents),
            Access::Write => self.collect(contents),
        }
    }

    /// Invalidates all copies, then grants the write.
    pub(super) fn collect(&mut self, contents: Data) {
        if self.state.copyset.is_empty() {
            self.state.stage = Stage::Owner;
            self.state.is_fresh = false;
            self.grant(Right::Write, contents);
            return;
        }
        self.state.stage = Stage::Collecting;
        // Source of the bytes of the later grant.
        self.state.is_fresh = contents == Data::Zero;
        self.invalidate_copies();
    }

    /// Invalidates all copies, then discards the contents.
    pub(super) fn discard(&mut self) {
        if !self.state.copyset.is_empty() {
            self.state.stage = Stage::Discarding;
            self.invalidate_copies();
            return;
        }
        self.restrict(Right::None);
        self.state.stage = Stage::Owner;
        self.state.is_fresh = true;
        self.counters.discarded += 1;
        let page = self.page;
        self.effects.push(Effect::Forget { page });
        self.serve();
    }

    fn invalidate_copies(&mut self) {
        for node in self.state.copyset.iter() {
            self.counters.invalidations_sent += 1;
            self.send(node, Body::Invalidate);
        }
    }

    /// Handles an acknowledgement.
    pub(super) fn acknowledge(&mut self, from: NodeId) -> Option<()> {
        let is_collecting = matches!(self.state.stage, Stage::Collecting | Stage::Discarding);
        if !is_collecting || !self.state.copyset.has(from) {
            return None;
        }
        self.state.copyset = self.state.copyset.without(from);
        if !self.state.copyset.is_empty() {
            return Some(());
        }
        if self.state.stage == Stage::Discarding {
            self.discard();
        } else {
            let is_fresh = self.state.is_fresh;
            self.collect(if is_fresh { Data::Zero } else { Data::Local });
        }
        Some(())
    }

    /// Accepts a forwarded request: serves it, or defers it until this node has the page and has used it.
    pub(super) fn accept_forward(&mut self, requester: NodeId, want: Want, reads: u8) -> Option<()> {
        let state = &mut self.state;
        let is_to_own = state.stage != Stage::NotOwner && !state.stage.is_prefetching();
        let is_other = requester != self.me && self.nodes.has(requester);
        // Only a page's manager discards it.
        let is_possible = want != Want::Discard || requester == self.manager;
        if !is_to_own || !is_other || !is_possible {
            return None;
        }
        if takes_ownership(self.manager, requester, want) {
            if state.next_owner != NextOwner::NONE {
                return None;
            }
            state.next_owner = NextOwner::some(requester, want);
            state.reads_before_transfer = reads;
        } else {
            // The requester's acknowledgement may still be in flight, so while collecting it may seem to have
            // a copy.
            let has_copy = state.stage == Stage::Owner && state.copyset.has(requester);
            if state.readers.has(requester) || has_copy {
                return None;
            }
            state.readers = state.readers.with(requester);
            state.reads = state.reads.wrapping_add(1);
        }
        if state.stage != Stage::Owner || state.is_held {
            self.counters.deferred += 1;
        }
        self.serve();
        Some(())
    }

    /// Serves the deferred requests, unless the page is held or this node does not own it.
    pub(super) fn serve(&mut self) {
        if self.state.stage != Stage::Owner || self.state.is_held {
            return;
        }
        if !self.state.readers.is_empty() {
            self.restrict(Right::Read);
        }
        let bytes = if self.state.is_fresh {
            Payload::Zero
        } else {
            Payload::Attached
        };
        for reader in self.state.readers.iter() {
            self.state.copyset = self.state.copyset.with(reader);
            self.send(reader, Body::Copy { bytes });
        }
        self.state.readers = Nodes::NONE;
        // Messages may overtake one another: a read that was forwarded before the next owner's request may be
        // in flight.
        if let Some((next_owner, want)) = self.state.next_owner.get()
            && self.state.reads == self.state.reads_before_transfer
        {
            self.transfer_ownership(next_owner, want);
        }
    }

    fn transfer_ownership(&mut self, next_owner: NodeId, want: Want) {
        let state = &self.state;
        let is_fresh = state.is_fresh || want == Want::Discard;
        let bytes = match (state.copyset.has(next_owner), is_fresh) {
            (true, _) => Payload::None,
            (false, true) => Payload::Zero,
            (false, false) => Payload::Attached,
        };
        let mut copyset = state.copyset.without(next_owner);
        match want {
            Want::Write | Want::Discard => self.restrict(Right::None),
            Want::Read => {
                self.restrict(Right::Read);
                if self.state.right == Right::Read {
                    copyset = copyset.with(self.me);
                }
            }
        }
        self.state.stage = Stage::NotOwner;
        self.state.copyset = Nodes::NONE;
        self.state.is_fresh = false;
        self.state.next_owner = NextOwner::NONE;
        self.state.reads_before_transfer = 0;
        self.state.reads = 0;
        self.send(next_owner, Body::Ownership { want, bytes, copyset });
    }
}
