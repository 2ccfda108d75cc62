//! Nodes with engines, memory and processors, without a network: messages wait in `outbox`.
//!
//! Contents are numbers, a different one for each write. `broken` keeps the first violation that a processor
//! or an effect shows.

use crate::engine::{DiscardOutcome, EFFECTS_MAX, Effect, Engine, FaultOutcome};
use crate::state::Stage;
use crate::{
    Access, Body, Counters, Data, Layout, MESSAGE_BYTES, Message, NodeId, Nodes, Page, ProtocolError, Right,
    Want,
};

/// Contents of a page that a node does not have.
const POISON: u32 = u32::MAX;

/// An encoded message in flight, with the page's contents if they are attached.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Packet {
    pub from: u16,
    pub to: u16,
    pub written: [u8; MESSAGE_BYTES],
    pub contents: Option<u32>,
}

impl Packet {
    pub fn message(&self) -> Message {
        Message::decode(&self.written).expect("an engine wrote it")
    }
}

impl Engine {
    /// Returns the right of this node's processors to a page.
    pub fn right(&self, page: Page) -> Right {
        self.states[self.own_place(page)].right
    }

    /// Returns whether a page was granted and not used since.
    pub fn is_held(&self, page: Page) -> bool {
        self.states[self.own_place(page)].is_held
    }
}

/// One step of a processor.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Op {
    /// Only processors of the page's manager discard.
    pub want: Want,
    pub page: Page,
}

/// State of a processor except its program.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Processor {
    /// Number of steps that the processor has completed.
    pub done: usize,
    /// Page that the processor waits for.
    pub waits: Option<u32>,
    /// The processor waits for a discard, which completes its step.
    pub discards: bool,
    /// Page that was granted while the processor waited, until its next step.
    pub woken: Option<u32>,
    /// Values that the processor has read.
    pub seen: Vec<u32>,
}

/// A request that a manager has ordered.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct QueuedRequest {
    node: NodeId,
    /// The reply is the page's ownership.
    owns: bool,
    /// Number of times that others were granted the page for writing since.
    passed: usize,
}

impl QueuedRequest {
    fn new(node: NodeId, owns: bool) -> Self {
        let passed = 0;
        Self { node, owns, passed }
    }
}

/// The world except the engines.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Environment {
    /// Rights that each node's driver set up; the engines' own state is not trusted.
    pub rights: Vec<Vec<Right>>,
    pub memory: Vec<Vec<u32>>,
    stored: Vec<Vec<bool>>,
    pub processors: Vec<Vec<Processor>>,
    pub latest: Vec<u32>,
    /// For each page, the requests that were ordered and not answered.
    pub queues: Vec<Vec<QueuedRequest>>,
    /// For each page, the nodes with a pending prefetch.
    pub ahead: Vec<Nodes>,
    pub outbox: Vec<Packet>,
    pub broken: Option<&'static str>,
}

/// Driver of one node.
struct NodeDriver<'a> {
    me: NodeId,
    arriving: Option<u32>,
    environment: &'a mut Environment,
}

/// Index of a node or page.
pub fn at(number: impl Into<u32>) -> usize {
    usize::try_from(number.into()).expect("32 bits fit")
}

impl NodeDriver<'_> {
    fn right(&mut self, page: Page) -> &mut Right {
        &mut self.environment.rights[at(self.me.0)][at(page.0)]
    }

    fn memory(&mut self, page: Page) -> &mut u32 {
        &mut self.environment.memory[at(self.me.0)][at(page.0)]
    }

    fn stored(&mut self, page: Page) -> &mut bool {
        &mut self.environment.stored[at(self.me.0)][at(page.0)]
    }
}

impl Environment {
    fn breaks(&mut self, what: &'static str) {
        self.broken = self.broken.or(Some(what));
    }

    /// Checks the order of a reply: all earlier requests have been answered. Reads of one owner have no
    /// order.
    fn answered(&mut self, page: Page, requester: NodeId, owns: bool) {
        let queue = &mut self.queues[at(page.0)];
        let place = queue.iter().position(|waiting| waiting.node == requester);
        let Some(place) = place else {
            return self.breaks("an answer to nobody who asked");
        };
        let is_passed = queue[..place].iter().any(|earlier| owns || earlier.owns);
        let is_to_own = queue.remove(place).owns;
        if is_passed {
            self.breaks("an answer before an earlier request's");
        }
        if is_to_own != owns {
            self.breaks("an answer of the wrong kind");
        }
    }
}

impl Environment {
    /// Checks fairness: each other node passes a waiting writer at most once, by an earlier request or by the
    /// owner's own write after it sent a copy to an earlier reader.
    fn passed(&mut self, page: Page, by: NodeId) {
        let others = self.rights.len() - 1;
        let mut is_too_often = false;
        for waiting in self.queues[at(page.0)]
            .iter_mut()
            .filter(|waiting| waiting.node != by)
        {
            waiting.passed += 1;
            is_too_often |= waiting.owns && waiting.passed > others;
        }
        if is_too_often {
            self.breaks("passed too often");
        }
    }
}

impl NodeDriver<'_> {
    /// Performs one effect.
    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Send { to, message } => self.send(to, message),
            Effect::Restrict { page, to } => self.restrict(page, to),
            Effect::Store { page } => self.store(page),
            Effect::Grant {
                page,
                right,
                contents,
            } => self.grant(page, right, contents),
            Effect::Forget { page } => self.forget(page),
            Effect::MapPrefetched { page } => self.map_prefetched(page),
        }
    }

    fn send(&mut self, to: NodeId, message: Message) {
        let page = message.page;
        let right = *self.right(page);
        let most = match message.body {
            Body::Copy { .. } => Right::Read,
            Body::Ownership { want: Want::Read, .. } => Right::Read,
            Body::Ownership { .. } | Body::Acknowledge => Right::None,
            _ => Right::Write,
        };
        if right > most {
            self.environment.breaks("said to be given up, and is not");
        }
        let asks = match message.body {
            Body::Request { .. } | Body::Prefetch => true,
            Body::Forward { requester, .. } | Body::ForwardPrefetch { requester } => requester == self.me,
            _ => false,
        };
        if asks && self.environment.ahead[at(page.0)].has(self.me) {
            self.environment.breaks("asked again before the answer");
        }
        let prefetches_sent = self.environment.ahead[at(page.0)];
        match message.body {
            Body::Prefetch => self.environment.ahead[at(page.0)] = prefetches_sent.with(self.me),
            Body::ForwardPrefetch { requester } => {
                self.environment.ahead[at(page.0)] = prefetches_sent.with(requester)
            }
            Body::Nack if !prefetches_sent.has(to) => self.environment.breaks("a Nack without a request"),
            Body::Copy { .. } if prefetches_sent.has(to) => {}
            Body::Copy { .. } => self.environment.answered(page, to, false),
            Body::Ownership { .. } => self.environment.answered(page, to, true),
            _ => {}
        }
        let is_to_go = matches!(
            message.body,
            Body::Ownership {
                want: Want::Discard,
                ..
            }
        );
        if is_to_go && message.carries_page() {
            self.environment.breaks("bytes that nobody wants");
        }
        let contents = message.carries_page().then(|| *self.memory(page));
        self.environment.outbox.push(Packet {
            from: self.me.0,
            to: to.0,
            written: message.encode(),
            contents,
        });
    }

    fn restrict(&mut self, page: Page, to: Right) {
        if *self.right(page) <= to {
            self.environment.breaks("nothing to take");
        }
        *self.right(page) = to;
    }

    fn store(&mut self, page: Page) {
        *self.stored(page) = true;
        *self.memory(page) = self.arriving.expect("a page came with the message");
    }

    fn grant(&mut self, page: Page, right: Right, contents: Data) {
        match contents {
            Data::Local => {}
            Data::Received => *self.memory(page) = self.arriving.expect("a page came with the message"),
            Data::Zero => *self.memory(page) = 0,
        }
        *self.stored(page) = false;
        if *self.right(page) >= right {
            self.environment.breaks("granted what was there");
        }
        *self.right(page) = right;
        if right == Right::Write {
            self.environment.passed(page, self.me);
        }
        for processor in &mut self.environment.processors[at(self.me.0)] {
            if processor.waits == Some(page.0) && !processor.discards {
                processor.waits = None;
                processor.woken = Some(page.0);
            }
        }
    }

    fn forget(&mut self, page: Page) {
        if self
            .environment
            .rights
            .iter()
            .any(|rights| rights[at(page.0)] > Right::None)
        {
            self.environment.breaks("forgotten while a node can use it");
        }
        *self.stored(page) = false;
        self.environment.latest[at(page.0)] = 0;
        for processor in &mut self.environment.processors[at(self.me.0)] {
            if processor.waits == Some(page.0) {
                processor.waits = None;
                // A thread that waited to use the page faults again.
                match std::mem::take(&mut processor.discards) {
                    true => processor.done += 1,
                    false => processor.woken = Some(page.0),
                }
            }
        }
    }

    fn map_prefetched(&mut self, page: Page) {
        if *self.right(page) != Right::None {
            self.environment.breaks("granted what was there");
        }
        let mut processors = self.environment.processors[at(self.me.0)].iter();
        if processors.any(|processor| processor.waits == Some(page.0)) {
            self.environment
                .breaks("a processor that waits for the page is not woken");
        }
        *self.memory(page) = self.arriving.expect("a page came with the message");
        *self.right(page) = Right::Read;
    }
}

/// All nodes of a test.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    pub engines: Vec<Engine>,
    pub environment: Environment,
}

impl World {
    /// Creates the initial world with a number of processors for each node. The layout's `me` is ignored.
    pub fn new(layout: &Layout, processors: &[usize]) -> Self {
        let engine = |me| {
            let layout = Layout {
                me: NodeId(me),
                ..layout.clone()
            };
            Engine::new(layout).expect("a layout")
        };
        let (nodes, pages) = (at(layout.nodes), at(layout.pages));
        let processors = processors.iter().map(|count| vec![Processor::default(); *count]);
        Self {
            engines: (0..layout.nodes).map(engine).collect(),
            environment: Environment {
                rights: vec![vec![Right::None; pages]; nodes],
                memory: vec![vec![POISON; pages]; nodes],
                stored: vec![vec![false; pages]; nodes],
                processors: processors.collect(),
                latest: vec![0; pages],
                queues: vec![Vec::new(); pages],
                ahead: vec![Nodes::NONE; pages],
                outbox: Vec::new(),
                broken: None,
            },
        }
    }

    /// Passes an event to a node's engine, and performs its effects.
    fn turn<T>(
        &mut self,
        node: u16,
        page: Page,
        arriving: Option<u32>,
        event: impl FnOnce(&mut Engine, &mut Vec<Effect>) -> T,
    ) -> T {
        let mut effects = Vec::new();
        let result = event(&mut self.engines[at(node)], &mut effects);
        let environment = &mut self.environment;
        let me = NodeId(node);
        let mut driver = NodeDriver {
            me,
            arriving,
            environment,
        };
        if effects.len() > EFFECTS_MAX {
            driver.environment.breaks("more effects than one event may have");
        }
        for effect in effects {
            driver.perform(effect);
        }
        let is_absent = self.engines[at(node)].is_absent(page);
        if is_absent && (*driver.stored(page) || *driver.right(page) > Right::None) {
            driver.environment.breaks("said to have nothing of it, and has");
        }
        // The contents of a page without a right are poisoned.
        if *driver.right(page) == Right::None && !*driver.stored(page) {
            *driver.memory(page) = POISON;
        }
        if self.engines[at(node)].right(page) != self.environment.rights[at(node)][at(page.0)] {
            self.environment.breaks("rights differ from the engine's");
        }
        result
    }

    /// Runs a processor's next step, or its fault.
    pub fn go(&mut self, node: u16, processor: usize, op: Op, value: u32) {
        let page = op.page;
        let access = match op.want {
            Want::Read => Access::Read,
            Want::Write => Access::Write,
            Want::Discard => return self.discard(node, processor, page),
        };
        let right = self.environment.rights[at(node)][at(page.0)];
        let environment = &mut self.environment;
        environment.processors[at(node)][processor].woken = None;
        if right.allows(access) {
            let memory = &mut environment.memory[at(node)][at(page.0)];
            let read = *memory;
            let latest = &mut environment.latest[at(page.0)];
            let is_old = read != *latest;
            // A write also reads, as an atomic instruction does.
            if access == Access::Write {
                *memory = value;
                *latest = value;
            }
            if is_old {
                environment.breaks("a processor sees something old");
            }
            let processor = &mut environment.processors[at(node)][processor];
            processor.done += 1;
            processor.seen.push(read);
            return;
        }
        environment.processors[at(node)][processor].waits = Some(page.0);
        let engine = &self.engines[at(node)];
        let place = engine.layout.place(page).expect("there");
        let was_not_owner = engine.states[place].stage == Stage::NotOwner;
        let faulted = self.turn(node, page, None, |engine, effects| {
            engine.fault(page, access, effects)
        });
        let processor = &self.environment.processors[at(node)][processor];
        let is_answered = processor.waits.is_none();
        match faulted {
            FaultOutcome::Allowed => self.environment.breaks("allowed, and it faults"),
            FaultOutcome::Granted if is_answered => {}
            FaultOutcome::Pending if !is_answered => {}
            FaultOutcome::Granted | FaultOutcome::Pending => {
                self.environment.breaks("another answer than the grant")
            }
        }
        let is_manager = self.engines[at(node)].layout.manager(page).0 == node;
        if was_not_owner && is_manager {
            self.environment.queues[at(page.0)].push(QueuedRequest::new(NodeId(node), true));
        }
    }

    /// A processor of the manager discards a page. If it is in use, nothing happens and the step is not done.
    fn discard(&mut self, node: u16, processor: usize, page: Page) {
        self.environment.processors[at(node)][processor].woken = None;
        let engine = &self.engines[at(node)];
        let was_not_owner = engine.states[at(page.0)].stage == Stage::NotOwner;
        let was_alone = engine.is_alone(page);
        let (discarded, forgot) = self.turn(node, page, None, |engine, effects| {
            let discarded = engine.discard(page, effects);
            (discarded, effects.contains(&Effect::Forget { page }))
        });
        if forgot != (discarded == DiscardOutcome::Done) || was_alone != forgot {
            self.environment.breaks("the answer differs from the action");
        }
        let processor = &mut self.environment.processors[at(node)][processor];
        match discarded {
            DiscardOutcome::Done => processor.done += 1,
            DiscardOutcome::Pending => (processor.waits, processor.discards) = (Some(page.0), true),
            DiscardOutcome::InUse => {}
        }
        if was_not_owner && discarded == DiscardOutcome::Pending {
            self.environment.queues[at(page.0)].push(QueuedRequest::new(NodeId(node), true));
        }
    }

    /// Prefetches a copy. Returns whether a request was sent.
    pub fn prefetch(&mut self, node: u16, page: Page) -> bool {
        self.turn(node, page, None, |engine, effects| engine.prefetch(page, effects))
    }

    /// Returns whether a prefetch of the page is pending, or its manager has a prefetched copy.
    pub fn has_ahead(&self, node: u16, page: Page) -> bool {
        let state = &self.engines[at(node)].states[at(page.0)];
        let has_copy = state.stage == Stage::NotOwner && state.right == Right::Read;
        has_copy || self.environment.ahead[at(page.0)] != Nodes::NONE
    }

    /// Delivers a message that the caller removed from its queue.
    pub fn deliver(&mut self, packet: Packet) -> Result<(), ProtocolError> {
        let message = packet.message();
        let page = message.page;
        let from = NodeId(packet.from);
        if let Body::Request { access } = message.body {
            let managed = *self.engines[at(packet.to)]
                .managed(at(page.0))
                .expect("its manager");
            let is_policy_on = self.engines[at(packet.to)].layout.migratory;
            if let Some((order, _)) = managed.order(NodeId(packet.to), from, access.into(), is_policy_on) {
                let is_to_own = order.want == Want::Write;
                self.environment.queues[at(page.0)].push(QueuedRequest::new(from, is_to_own));
            }
        }
        let to = NodeId(packet.to);
        let is_answer = matches!(message.body, Body::Copy { .. } | Body::Nack);
        if is_answer && self.environment.ahead[at(page.0)].has(to) {
            self.environment.ahead[at(page.0)] = self.environment.ahead[at(page.0)].without(to);
            let engine = &self.engines[at(packet.to)];
            let joined = engine.states[at(page.0)].stage.joined();
            // The node sends a new request; a manager's own is ordered at once.
            if message.body == Body::Nack && joined.is_some() && engine.layout.manager(page) == to {
                self.environment.queues[at(page.0)].push(QueuedRequest::new(to, true));
            }
        }
        let right = |world: &Self| world.environment.rights[at(packet.to)][at(page.0)];
        let (had, was_held) = (right(self), self.engines[at(packet.to)].is_held(page));
        let result = self.turn(packet.to, page, packet.contents, |engine, effects| {
            engine.receive(from, message, effects)
        });
        if was_held && right(self) < had {
            self.environment.breaks("taken away before it was used");
        }
        result
    }

    /// Ends the hold of a page.
    pub fn used(&mut self, node: u16, page: Page) {
        self.turn(node, page, None, |engine, effects| engine.used(page, effects));
    }

    /// Returns whether a processor that waited for the page has not run since it arrived.
    pub fn is_awaited(&self, node: u16, page: Page) -> bool {
        let mut processors = self.environment.processors[at(node)].iter();
        processors.any(|processor| processor.woken == Some(page.0))
    }

    /// Resets the engines' counters, which are not part of the state.
    pub fn forget_counters(&mut self) {
        for engine in &mut self.engines {
            engine.counters = Counters::default();
        }
    }
}
