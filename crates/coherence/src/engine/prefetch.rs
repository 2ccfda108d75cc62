//! Prefetched copies: reads that no thread waits for.
//!
//! A prefetch never blocks and changes only the copyset. The owner sends a copy if that delays no other node,
//! or replies with a Nack. It sends a Nack for a page that is zero, because there are no bytes whose transfer
//! could be hidden, and the first writer would have to invalidate the copy. It also sends one for a page that
//! is held, being collected, or requested by a node. The manager sends a Nack for a migratory page. A
//! prefetch never transfers the ownership: a manager that prefetches is a reader like any other.

use super::{Effect, Engine, Transition};
use crate::state::{NextOwner, OptionalNode, Stage};
use crate::{Access, Body, NodeId, Page, Payload, Right};

impl Engine {
    /// Prefetches a copy if this node has none, has no pending request, and does not own the page. Returns
    /// whether it did. A later fault joins the prefetch and is answered even if the reply is a Nack.
    ///
    /// # Panics
    /// If the page is not of this stripe.
    pub fn prefetch(&mut self, page: Page, effects: &mut Vec<Effect>) -> bool {
        let place = self.own_place(page);
        let mut transition = self.transition(page, place, effects);
        if transition.state.stage != Stage::NotOwner || transition.state.right != Right::None {
            return false;
        }
        let (me, manager) = (transition.me, transition.manager);
        if manager == me {
            let is_policy_on = self.layout.migratory;
            let managed = *self.managed(place).expect("its manager");
            let Some(Some((owner, after))) = managed.order_prefetch(me, is_policy_on) else {
                return false;
            };
            *self.managed(place).expect("its manager") = after;
            self.transition(page, place, effects)
                .send(owner, Body::ForwardPrefetch { requester: me });
        } else {
            transition.send(manager, Body::Prefetch);
        }
        self.states[place].stage = Stage::Prefetching;
        self.counters.prefetches_sent += 1;
        true
    }

    /// Orders a prefetch as the page's manager and forwards it. `None` if it violates the protocol.
    pub(super) fn order_prefetch(
        &mut self,
        requester: NodeId,
        page: Page,
        place: usize,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        let (me, is_policy_on) = (self.layout.me, self.layout.migratory);
        let order = self.managed(place)?.order_prefetch(requester, is_policy_on)?;
        let mut transition = self.transition(page, place, effects);
        let Some((owner, after)) = order else {
            transition.nack(requester);
            return Some(());
        };
        if owner == me {
            transition.accept_prefetch(requester)?;
        } else {
            transition.send(owner, Body::ForwardPrefetch { requester });
        }
        *self.managed(place)? = after;
        Some(())
    }
}

impl Transition<'_> {
    /// Joins a fault to the pending prefetch.
    pub(super) fn join(&mut self, access: Access) {
        self.counters.joined += u64::from(self.state.stage == Stage::Prefetching);
        self.state.stage = match (self.state.stage, access) {
            (Stage::PrefetchingWrite, _) | (_, Access::Write) => Stage::PrefetchingWrite,
            _ => Stage::PrefetchingRead,
        };
    }

    /// Accepts a prefetch of another node and replies at once.
    pub(super) fn accept_prefetch(&mut self, requester: NodeId) -> Option<()> {
        let state = &mut self.state;
        let is_to_own = state.stage != Stage::NotOwner && !state.stage.is_prefetching();
        let is_other = requester != self.me && self.nodes.has(requester);
        let has_copy = state.stage == Stage::Owner && state.copyset.has(requester);
        if !is_to_own || !is_other || has_copy || state.readers.has(requester) {
            return None;
        }
        state.reads = state.reads.wrapping_add(1);
        let is_idle = state.stage == Stage::Owner && !state.is_held && state.next_owner == NextOwner::NONE;
        if is_idle && !state.is_fresh {
            state.copyset = state.copyset.with(requester);
            self.restrict(Right::Read);
            let bytes = Payload::Attached;
            self.send(requester, Body::Copy { bytes });
        } else {
            self.nack(requester);
        }
        // The transfer to the next owner may have waited for this read.
        self.serve();
        Some(())
    }

    fn nack(&mut self, requester: NodeId) {
        self.counters.nacked += 1;
        self.send(requester, Body::Nack);
    }

    /// Handles a prefetched copy.
    pub(super) fn prefetched_copy(&mut self, bytes: Payload) -> Option<()> {
        if bytes != Payload::Attached {
            return None;
        }
        let contents = self.contents(bytes)?;
        self.counters.prefetched += 1;
        let joined = self.state.stage.joined();
        self.state.stage = Stage::NotOwner;
        if joined.is_some() {
            self.grant(Right::Read, contents);
        } else if self.state.invalidator == OptionalNode::NONE {
            self.state.right = Right::Read;
            let page = self.page;
            self.effects.push(Effect::MapPrefetched { page });
        } else {
            // An invalidation overtook the copy and no fault joined: the copy is dropped.
            self.invalidate_if_pending();
        }
        Some(())
    }

    /// Handles a Nack. Returns the access of the faults that joined, if any did.
    pub(super) fn nacked(&mut self) -> Option<Option<Access>> {
        if !self.state.stage.is_prefetching() || self.state.invalidator != OptionalNode::NONE {
            return None;
        }
        let joined = self.state.stage.joined();
        self.state.stage = Stage::NotOwner;
        Some(joined)
    }
}
