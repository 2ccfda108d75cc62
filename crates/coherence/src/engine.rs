//! The protocol of one node for one stripe of pages. Each event appends effects to a list; [`Effect`] states
//! their order.

mod effect;
mod holder;
mod owner;
mod prefetch;
#[cfg(test)]
mod tests;

use crate::manager::Managed;
use crate::state::{Stage, State};
pub use effect::{EFFECTS_MAX, Effect};

use crate::{
    Access, Body, Counters, Data, Layout, LayoutError, Message, NodeId, Nodes, Page, ProtocolError, Right,
    Want,
};

/// Immediate result of a fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FaultOutcome {
    /// The node has the right already. The driver wakes the thread.
    Allowed,
    /// The fault was granted. [`Effect::Grant`] is among the effects.
    Granted,
    /// A later event grants the fault.
    Pending,
}

/// Immediate result of a discard.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DiscardOutcome {
    /// The page is zero. [`Effect::Forget`] is among the effects.
    Done,
    /// A later event appends [`Effect::Forget`].
    Pending,
    /// The page stays. A processor of this node waits for it or has not used it yet, or a prefetch is
    /// pending.
    InUse,
}

/// State machine of one node for one stripe of pages. It allocates nothing after [`Engine::new`].
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Engine {
    layout: Layout,
    states: Vec<State>,
    /// Runs of pages that this node manages: first place, place after the last, offset in `managed`.
    runs: Vec<(usize, usize, usize)>,
    managed: Vec<Managed>,
    counters: Counters,
}

/// One event's access to the state of one page.
struct Transition<'a> {
    me: NodeId,
    manager: NodeId,
    nodes: Nodes,
    page: Page,
    state: &'a mut State,
    counters: &'a mut Counters,
    effects: &'a mut Vec<Effect>,
}

impl Transition<'_> {
    fn send(&mut self, to: NodeId, body: Body) {
        let page = self.page;
        let message = Message { page, body };
        self.counters.messages_sent += 1;
        self.counters.pages_sent += u64::from(message.carries_page());
        self.effects.push(Effect::Send { to, message });
    }

    /// Reduces the right of this node's processors to `to`.
    fn restrict(&mut self, to: Right) {
        if self.state.right > to {
            self.state.right = to;
            let page = self.page;
            self.effects.push(Effect::Restrict { page, to });
        }
    }

    fn grant(&mut self, right: Right, contents: Data) {
        self.state.right = right;
        self.state.is_held = true;
        let page = self.page;
        self.effects.push(Effect::Grant {
            page,
            right,
            contents,
        });
    }

    /// Counts a fault that sends a request or is answered at once.
    fn count(&mut self, access: Access) {
        match access {
            Access::Read => self.counters.read_faults += 1,
            Access::Write => self.counters.write_faults += 1,
        }
        self.counters.upgrades += u64::from(self.state.right == Right::Read);
    }

    fn unexpected(&self, from: NodeId, body: Body) -> ProtocolError {
        let page = self.page;
        ProtocolError::Unexpected { from, page, body }
    }
}

impl Engine {
    /// Creates the engine of a node. No page has been used.
    ///
    /// # Errors
    /// If [`Layout::check`] fails.
    pub fn new(layout: Layout) -> Result<Self, LayoutError> {
        layout.check()?;
        let (mut states, mut runs, mut managed) = (Vec::new(), Vec::new(), Vec::new());
        states.reserve_exact(layout.count());
        for place in 0..layout.count() {
            let is_manager = layout.manager(layout.page(place)) == layout.me;
            states.push(State::new(is_manager));
            if !is_manager {
                continue;
            }
            match runs.last_mut() {
                Some((_, end, _)) if *end == place => *end += 1,
                _ => runs.push((place, place + 1, managed.len())),
            }
            managed.push(Managed::new(layout.me));
        }
        Ok(Self {
            layout,
            states,
            runs,
            managed,
            counters: Counters::default(),
        })
    }

    /// Handles a fault of a processor of this node. Repeated faults on a page join one pending request.
    ///
    /// A grant may give less than the last fault needs. The thread then faults again.
    ///
    /// # Panics
    /// If the page is not of this stripe.
    pub fn fault(&mut self, page: Page, access: Access, effects: &mut Vec<Effect>) -> FaultOutcome {
        let place = self.own_place(page);
        let mut transition = self.transition(page, place, effects);
        let was_owner = transition.state.is_owner();
        if transition.state.right.allows(access) {
            return FaultOutcome::Allowed;
        }
        if matches!(
            transition.state.stage,
            Stage::Asked(_) | Stage::Collecting | Stage::Discarding
        ) {
            return FaultOutcome::Pending;
        }
        if transition.state.stage.is_prefetching() {
            transition.join(access);
            return FaultOutcome::Pending;
        }
        transition.count(access);
        if was_owner {
            transition.upgrade_owned(access);
            let is_granted = transition.state.right.allows(access);
            let me = self.layout.me;
            if access == Access::Write
                && let Some(managed) = self.managed(place)
            {
                managed.record_write(me);
            }
            return if is_granted {
                FaultOutcome::Granted
            } else {
                FaultOutcome::Pending
            };
        }
        self.request(page, place, access, effects);
        FaultOutcome::Pending
    }

    /// Requests a page that this node neither owns nor has requested.
    fn request(&mut self, page: Page, place: usize, access: Access, effects: &mut Vec<Effect>) {
        let mut transition = self.transition(page, place, effects);
        transition.state.stage = Stage::Asked(access.into());
        let (me, manager) = (transition.me, transition.manager);
        if manager == me {
            self.order(me, page, place, access.into(), effects)
                .expect("a node that has not asked is not on the way to own the page");
        } else {
            transition.send(manager, Body::Request { access });
        }
    }

    /// Takes a page for writing that no node has used and that this node manages. The effect is that of a
    /// write fault whose page has been used. Returns whether the page was unused. The driver then maps it,
    /// all zeroes.
    ///
    /// # Panics
    /// If the page is not of this stripe.
    pub fn claim(&mut self, page: Page) -> bool {
        let place = self.own_place(page);
        let state = &mut self.states[place];
        // Reads may have been answered before the page was discarded.
        let is_unused = State { reads: 0, ..*state } == State::new(true);
        if is_unused {
            state.right = Right::Write;
            state.is_fresh = false;
        }
        is_unused
    }

    /// Discards the contents of a page that this node manages. Afterwards the page is zero, this node owns
    /// it, and no node has a copy.
    ///
    /// A write before [`Effect::Forget`] may be lost; a later write is kept. Repeated discards of a page join
    /// the pending one.
    ///
    /// # Panics
    /// If the page is not of this stripe, or another node manages it.
    pub fn discard(&mut self, page: Page, effects: &mut Vec<Effect>) -> DiscardOutcome {
        let place = self.own_place(page);
        let me = self.layout.me;
        assert!(
            self.manager(page) == me,
            "page {page} is not node {me}'s to discard"
        );
        let mut transition = self.transition(page, place, effects);
        match transition.state.stage {
            Stage::Asked(Want::Discard) | Stage::Discarding => return DiscardOutcome::Pending,
            Stage::Asked(_) | Stage::Collecting => return DiscardOutcome::InUse,
            // A node that is not the owner holds a page after a fault joined its prefetch.
            Stage::Owner | Stage::NotOwner if transition.state.is_held => return DiscardOutcome::InUse,
            Stage::Owner => {
                transition.discard();
                let is_done = transition.state.stage != Stage::Discarding;
                self.managed(place).expect("it manages it").record_discard(me);
                return if is_done {
                    DiscardOutcome::Done
                } else {
                    DiscardOutcome::Pending
                };
            }
            // A prefetch is pending. Its reply could not be distinguished from that of the discard.
            Stage::Prefetching | Stage::PrefetchingRead | Stage::PrefetchingWrite => {
                return DiscardOutcome::InUse;
            }
            Stage::NotOwner => {}
        }
        transition.state.stage = Stage::Asked(Want::Discard);
        self.order(me, page, place, Want::Discard, effects)
            .expect("a node that has not asked is not on the way to own the page");
        DiscardOutcome::Pending
    }

    /// Returns the manager of a page.
    pub fn manager(&self, page: Page) -> NodeId {
        self.layout.manager(page)
    }

    /// Returns whether a discard would complete at once: this node owns the page, no other node has a copy,
    /// and it is not held.
    ///
    /// # Panics
    /// If the page is not of this stripe.
    pub fn is_alone(&self, page: Page) -> bool {
        let state = &self.states[self.own_place(page)];
        state.stage == Stage::Owner && state.copyset.is_empty() && !state.is_held
    }

    /// Returns whether this node has no copy of a page and no pending request for it. The bytes in its place
    /// are then invalid.
    ///
    /// # Panics
    /// If the page is not of this stripe.
    pub fn is_absent(&self, page: Page) -> bool {
        let state = &self.states[self.own_place(page)];
        state.stage == Stage::NotOwner && state.right == Right::None
    }

    /// Handles a message of another node.
    ///
    /// # Errors
    /// [`ProtocolError`] if the message violates the protocol: its sender is broken or hostile. The engine's
    /// state is unchanged.
    pub fn receive(
        &mut self,
        from: NodeId,
        message: Message,
        effects: &mut Vec<Effect>,
    ) -> Result<(), ProtocolError> {
        let Message { page, body } = message;
        if from == self.layout.me || from.0 >= self.layout.nodes {
            return Err(ProtocolError::UnknownSender(from));
        }
        let elsewhere = ProtocolError::WrongStripe { from, page };
        let place = self.layout.place(page).ok_or(elsewhere)?;
        if let Body::Request { access } = body {
            let is_ordered = self.order(from, page, place, access.into(), effects);
            return is_ordered.ok_or(ProtocolError::Unexpected { from, page, body });
        }
        if body == Body::Prefetch {
            let is_ordered = self.order_prefetch(from, page, place, effects);
            return is_ordered.ok_or(ProtocolError::Unexpected { from, page, body });
        }
        let mut transition = self.transition(page, place, effects);
        let refusal = transition.unexpected(from, body);
        let is_taken = match body {
            Body::Request { .. } | Body::Prefetch => unreachable!("handled above"),
            Body::Forward {
                requester,
                want,
                reads,
            } if from == transition.manager => transition.accept_forward(requester, want, reads),
            Body::ForwardPrefetch { requester } if from == transition.manager => {
                transition.accept_prefetch(requester)
            }
            Body::Forward { .. } | Body::ForwardPrefetch { .. } => None,
            Body::Copy { bytes } => transition.copy(bytes),
            Body::Ownership { want, bytes, copyset } => transition.ownership(want, bytes, copyset),
            Body::Invalidate => transition.invalidate(from),
            Body::Acknowledge => transition.acknowledge(from),
            Body::Nack => {
                let joined = transition.nacked().ok_or(refusal)?;
                if let Some(access) = joined {
                    transition.count(access);
                    self.request(page, place, access, effects);
                }
                return Ok(());
            }
        };
        is_taken.ok_or(refusal)
    }

    /// Ends the hold of a page: the faulting thread has used it, or its minimum residency is over. Serves
    /// deferred requests. Does nothing if the page is not held.
    ///
    /// # Panics
    /// If the page is not of this stripe.
    pub fn used(&mut self, page: Page, effects: &mut Vec<Effect>) {
        let place = self.own_place(page);
        let mut transition = self.transition(page, place, effects);
        if !transition.state.is_held {
            return;
        }
        transition.state.is_held = false;
        transition.invalidate_if_pending();
        transition.serve();
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    fn own_place(&self, page: Page) -> usize {
        let place = self.layout.place(page);
        place.unwrap_or_else(|| panic!("page {page} is not of stripe {}", self.layout.stripe))
    }

    fn transition<'a>(
        &'a mut self,
        page: Page,
        place: usize,
        effects: &'a mut Vec<Effect>,
    ) -> Transition<'a> {
        Transition {
            me: self.layout.me,
            manager: self.layout.manager(page),
            nodes: Nodes::first(self.layout.nodes),
            page,
            state: &mut self.states[place],
            counters: &mut self.counters,
            effects,
        }
    }

    fn managed(&mut self, place: usize) -> Option<&mut Managed> {
        let mut runs = self.runs.iter();
        let (start, _, offset) = runs.find(|(start, end, _)| (*start..*end).contains(&place))?;
        Some(&mut self.managed[place - start + offset])
    }

    /// Orders a request as the page's manager and forwards it to the owner. `None` if the request violates
    /// the protocol.
    fn order(
        &mut self,
        requester: NodeId,
        page: Page,
        place: usize,
        want: Want,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        let (me, is_policy_on) = (self.layout.me, self.layout.migratory);
        let managed = *self.managed(place)?;
        let (order, after) = managed.order(me, requester, want, is_policy_on)?;
        let (owner, reads) = (order.owner, order.reads);
        let mut transition = self.transition(page, place, effects);
        if owner == me {
            transition.accept_forward(requester, order.want, reads)?;
        } else {
            let want = order.want;
            transition.send(
                owner,
                Body::Forward {
                    requester,
                    want,
                    reads,
                },
            );
        }
        let is_given_for_writing = order.want != want;
        self.counters.migratory_reads += u64::from(is_given_for_writing);
        *self.managed(place)? = after;
        Some(())
    }
}
