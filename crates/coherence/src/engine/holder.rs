//! Transitions of a node that requests a page, or has a copy of one.

use super::{Effect, Transition};
use crate::state::{NextOwner, OptionalNode, Stage};
use crate::{Body, Data, NodeId, Nodes, Payload, Right, Want};

impl Transition<'_> {
    /// Handles a copy.
    pub(super) fn copy(&mut self, bytes: Payload) -> Option<()> {
        let state = &self.state;
        // A node that is to own the page is not sent a copy.
        let is_to_own =
            !state.readers.is_empty() || state.next_owner != NextOwner::NONE || self.me == self.manager;
        if state.stage.is_prefetching() {
            return self.prefetched_copy(bytes);
        }
        if state.stage != Stage::Asked(Want::Read) || is_to_own {
            return None;
        }
        let contents = self.contents(bytes)?;
        self.state.stage = Stage::NotOwner;
        self.grant(Right::Read, contents);
        Some(())
    }

    /// Returns the source of received bytes. `None` if they contradict the node's right.
    pub(super) fn contents(&mut self, bytes: Payload) -> Option<Data> {
        let is_kept = bytes == Payload::None;
        if is_kept != (self.state.right == Right::Read) {
            return None;
        }
        let counters = &mut self.counters;
        match bytes {
            Payload::Attached => counters.fetched_with_bytes += 1,
            Payload::None | Payload::Zero => counters.fetched_without_bytes += 1,
        }
        Some(match bytes {
            Payload::None => Data::Local,
            Payload::Attached => Data::Received,
            Payload::Zero => Data::Zero,
        })
    }

    /// Handles the ownership.
    pub(super) fn ownership(&mut self, want: Want, bytes: Payload, copyset: Nodes) -> Option<()> {
        let Stage::Asked(asked) = self.state.stage else {
            return None;
        };
        let is_answer = match want {
            Want::Read => asked == Want::Read && self.me == self.manager,
            Want::Write => asked != Want::Discard,
            // The node keeps a prefetched copy until the discard completes.
            Want::Discard => asked == Want::Discard && bytes != Payload::Attached,
        };
        let is_waited_for = self.state.invalidator != OptionalNode::NONE;
        let is_set = copyset.is_within(self.nodes.without(self.me));
        if !is_answer || is_waited_for || !is_set {
            return None;
        }
        let contents = self.contents(bytes)?;
        self.state.stage = Stage::Owner;
        self.state.copyset = copyset;
        self.state.is_fresh = bytes == Payload::Zero;
        match want {
            Want::Read => self.grant(Right::Read, contents),
            Want::Write => {
                if contents == Data::Received && !copyset.is_empty() {
                    let page = self.page;
                    self.effects.push(Effect::Store { page });
                }
                self.collect(contents);
            }
            Want::Discard => self.discard(),
        }
        Some(())
    }

    /// Handles an invalidation.
    pub(super) fn invalidate(&mut self, by: NodeId) -> Option<()> {
        let state = &mut self.state;
        let has_copy = !state.is_owner() && state.right == Right::Read;
        // The invalidation overtook the copy that it is for. A manager is sent the ownership instead, except
        // for a prefetch.
        let is_sent_one = match state.stage {
            Stage::Asked(Want::Read) => state.right == Right::None && self.me != self.manager,
            stage => stage.is_prefetching(),
        };
        if state.invalidator != OptionalNode::NONE || !has_copy && !is_sent_one {
            return None;
        }
        state.invalidator = OptionalNode::some(by);
        // An acknowledgement before the copy has arrived and been used would let another processor of this
        // node see the writer's next write, and afterwards the old contents here.
        if is_sent_one || state.is_held {
            self.counters.deferred += 1;
            return Some(());
        }
        self.invalidate_if_pending();
        Some(())
    }

    /// Gives up a copy that has arrived and is not held, if an invalidation is pending.
    pub(super) fn invalidate_if_pending(&mut self) {
        let Some(by) = self.state.invalidator.get() else {
            return;
        };
        self.state.invalidator = OptionalNode::NONE;
        self.restrict(Right::None);
        self.counters.invalidated += 1;
        self.send(by, Body::Acknowledge);
    }
}
