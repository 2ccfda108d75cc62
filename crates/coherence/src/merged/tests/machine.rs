//! Nodes with a copy of memory and a real [`Merger`] each, links without order, and a simple model of the
//! engine.

mod cpu;
mod engine;
mod node;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::guest::{At, Cpu, Op, Va, WORDS};
use crate::merged::{Accessed, Diff, Level, MergeMessage, Merger, Ticket, VectorTime};
use crate::{Layout, NodeId, Page, Right};
use engine::Request;
use node::{Node, NodeDriver};

/// Rules that the driver breaks, to show that the checker finds it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Broken {
    Nothing,
    /// Pages are sent before the diffs that precede them.
    Transfers,
    /// Acknowledgements of invalidations are sent before the diffs that precede them.
    Acknowledgements,
    /// Interrupts are sent before the diffs that precede them.
    Interrupts,
    /// Diffs are collected before the right is revoked, not after.
    Early,
    /// Tables are collected from the leaves up.
    Upwards,
    /// Diffs are applied from the roots down.
    Downwards,
    /// Messages don't wait for the batches that they come after.
    Unordered,
    /// Messages don't wait until detached pages have left.
    Hasty,
    /// The driver does not report CR3s.
    Blind,
    /// A page is opened before all nodes have its twin.
    Open,
}

/// Constants of a world.
#[derive(Clone, Debug)]
pub struct Plan {
    pub nodes: usize,
    pub pages: u32,
    pub top: u8,
    /// Pages merged at the start, with their levels.
    pub merged: Vec<(u32, u8)>,
    pub memory: Vec<(At, u64)>,
    /// Pages that all nodes may read at first; the others are node 0's.
    pub shared: Vec<u32>,
    pub cpus: Vec<(usize, Option<u32>)>,
    pub programs: Vec<Vec<Op>>,
    pub handler: Vec<Op>,
    /// Translations that the hardware may walk at any time.
    pub guesses: Vec<Va>,
    /// Pages proposed at any time, once.
    pub proposals: Vec<u32>,
    pub accessed: Accessed,
    pub pinned: Range<u32>,
    /// Pages that must stay merged.
    pub stay: Vec<u32>,
    pub broken: Broken,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Payload {
    Batch(Vec<Diff>),
    MergeMessage(MergeMessage, [u64; WORDS]),
    /// A page, or the acknowledgement of an invalidation.
    Right(u32, Option<[u64; WORDS]>),
    Interrupt(usize),
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Packet {
    pub from: usize,
    pub to: usize,
    pub stamp: VectorTime,
    pub payload: Payload,
}

/// A message that a node is about to send.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Task {
    pub to: usize,
    pub what: PendingSend,
    pub collected: usize,
    pub ticket: Option<Ticket>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum PendingSend {
    Page(u32, Right, bool),
    Interrupt(usize, usize),
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    pub nodes: Vec<Node>,
    pub cpus: Vec<Cpu>,
    pub packets: Vec<Packet>,
    pub requests: Vec<Request>,
    /// Pages that their managers acquire for merging.
    pub takes: Vec<(usize, u32)>,
    /// Pages that their manager holds for merging.
    pub held: Vec<u32>,
    pub proposed: usize,
    freed: Vec<u64>,
    news: Vec<u64>,
    inside: usize,
    wins: usize,
    pub wrong: Option<&'static str>,
}

fn id(node: usize) -> NodeId {
    NodeId(u16::try_from(node).expect("few"))
}

impl World {
    pub fn new(plan: &Plan) -> Self {
        let mut copy = vec![[0; WORDS]; plan.pages as usize];
        for ((page, word), value) in &plan.memory {
            copy[*page as usize][*word] = *value;
        }
        let node = |me: usize| {
            let layout = Layout::even(id(me), u16::try_from(plan.nodes).expect("few"), plan.pages);
            let right = |page: u32| match plan.shared.contains(&page) {
                true => Right::Read,
                false if me == 0 => Right::Write,
                false => Right::None,
            };
            Node {
                merger: Merger::new(
                    layout,
                    Level(plan.top),
                    4,
                    plan.cpus.len(),
                    plan.accessed,
                    plan.pinned.clone(),
                ),
                driver: NodeDriver {
                    me,
                    nodes: plan.nodes,
                    copy: copy.clone(),
                    rights: (0..plan.pages).map(right).collect(),
                    open: vec![false; plan.pages as usize],
                    arrived: [0; WORDS],
                    sent: Vec::new(),
                    takes: Vec::new(),
                    given_back: Vec::new(),
                    is_upwards: plan.broken == Broken::Downwards,
                    is_early: plan.broken == Broken::Open,
                },
                task: None,
                applying: None,
            }
        };
        let mut world = Self {
            nodes: (0..plan.nodes).map(node).collect(),
            cpus: plan
                .cpus
                .iter()
                .map(|(node, cr3)| Cpu::new(*node, *cr3))
                .collect(),
            packets: Vec::new(),
            requests: Vec::new(),
            takes: Vec::new(),
            held: Vec::new(),
            proposed: 0,
            freed: Vec::new(),
            news: Vec::new(),
            inside: 0,
            wins: 0,
            wrong: None,
        };
        // Pages merged at the start join like any other.
        for node in 0..plan.nodes {
            world.look_at_cr3s(node);
        }
        for (page, _) in &plan.merged {
            world.propose(*page);
            world.rest_awhile(plan, *page);
        }
        world
    }

    /// Delivers all messages until a page is merged.
    fn rest_awhile(&mut self, plan: &Plan, page: u32) {
        while !self.nodes.iter().all(|node| node.driver.open[page as usize]) || !self.packets.is_empty() {
            let request = self
                .requests
                .iter()
                .find_map(|one| Some((one.page, *one.unasked.first()?)));
            if let Some((page, node)) = request {
                self.answer(plan, page, node);
            } else if let Some(node) = (0..plan.nodes).find(|node| self.nodes[*node].task.is_some()) {
                self.go_on(plan, node);
            } else if let Some(node) = (0..plan.nodes).find(|node| self.nodes[*node].applying.is_some()) {
                self.apply(node);
            } else {
                let ready = |at: &usize| self.is_ready(plan, &self.packets[*at]);
                let at = (0..self.packets.len()).find(ready).expect("the page joins");
                self.deliver(at);
            }
        }
    }

    fn merge(&mut self, node: usize, act: impl FnOnce(&mut Merger<WORDS>, &mut NodeDriver)) {
        let Node { merger, driver, .. } = &mut self.nodes[node];
        act(merger, driver);
        for page in std::mem::take(&mut self.nodes[node].driver.takes) {
            self.takes.push((node, page));
        }
        self.take();
        for page in std::mem::take(&mut self.nodes[node].driver.given_back) {
            self.held.retain(|held| *held != page);
        }
        let sent = std::mem::take(&mut self.nodes[node].driver.sent);
        self.packets.extend(sent);
        // A sorted list: links keep no order.
        self.packets.sort_by_cached_key(|packet| {
            let mut hasher = DefaultHasher::new();
            packet.hash(&mut hasher);
            hasher.finish()
        });
    }

    pub fn propose(&mut self, page: u32) {
        let proposer = self
            .nodes
            .iter()
            .position(|node| node.merger.suspect(Page(page)).is_some());
        if let Some(node) = proposer {
            let proposal = self.nodes[node].merger.suspect(Page(page)).expect("just found");
            self.merge(node, |merger, driver| merger.propose(proposal, driver));
        }
    }

    /// Continues a node's message: collects diffs page by page, then sends.
    pub fn go_on(&mut self, plan: &Plan, node: usize) {
        let mut task = self.nodes[node].task.take().expect("there is one");
        let leaves_out = match &task.what {
            PendingSend::Page(_, _, true) => plan.broken == Broken::Transfers,
            PendingSend::Page(_, _, false) => plan.broken == Broken::Acknowledgements,
            PendingSend::Interrupt(..) => plan.broken == Broken::Interrupts,
        };
        let count = self.nodes[node].merger.twins.len();
        if let Some(ticket) = task.ticket {
            assert!(self.nodes[node].merger.may_send(ticket) || plan.broken == Broken::Hasty);
            if let (PendingSend::Page(page, right, _), Broken::Early) = (&task.what, plan.broken) {
                self.restrict(node, *page, *right);
            }
            let Node { merger, driver, .. } = &mut self.nodes[node];
            let payload = match task.what {
                PendingSend::Page(page, _, brings) => {
                    Payload::Right(page, brings.then_some(driver.copy[page as usize]))
                }
                PendingSend::Interrupt(cpu, sender) => {
                    self.cpus[sender].is_out = false;
                    Payload::Interrupt(cpu)
                }
            };
            let stamp = merger.stamp();
            self.merge(node, |_, driver| driver.post(task.to, stamp, payload));
            return;
        }
        if task.collected == 0 && plan.broken != Broken::Blind {
            self.look_at_cr3s(node);
        }
        if !leaves_out && task.collected < count {
            let at = if plan.broken == Broken::Upwards {
                count - 1 - task.collected
            } else {
                task.collected
            };
            let Node { merger, driver, .. } = &mut self.nodes[node];
            let Merger { twins, diffs, .. } = merger;
            twins.collect(at, driver, diffs);
            task.collected += 1;
        }
        if leaves_out || task.collected >= count {
            let mut ticket = None;
            self.merge(node, |merger, driver| ticket = Some(merger.send_diffs(driver)));
            task.ticket = ticket;
        }
        self.nodes[node].task = Some(task);
    }

    fn look_at_cr3s(&mut self, node: usize) {
        for cpu in 0..self.cpus.len() {
            let cr3 = self.cpus[cpu].cr3.filter(|_| self.cpus[cpu].node == node);
            let cr3 = cr3.map(|page| u64::from(page) << 12);
            self.merge(node, |merger, driver| merger.loaded(cpu, cr3, driver));
        }
    }

    pub fn may_go_on(&self, plan: &Plan, node: usize) -> bool {
        let node = &self.nodes[node];
        node.task.as_ref().is_some_and(|task| {
            let is_over = task.ticket.is_none_or(|ticket| node.merger.may_send(ticket));
            is_over || plan.broken == Broken::Hasty
        })
    }

    pub fn is_ready(&self, plan: &Plan, packet: &Packet) -> bool {
        let node = &self.nodes[packet.to];
        // A node handles one message at a time, and none during a collection.
        let collects = node
            .task
            .as_ref()
            .is_some_and(|task| task.collected > 0 && task.ticket.is_none());
        if node.applying.is_some() || collects {
            return false;
        }
        match &packet.payload {
            Payload::Batch(_) => node.merger.awaits(id(packet.from), &packet.stamp),
            // The merger checks this itself.
            Payload::MergeMessage(..) => node.merger.is_ready(&packet.stamp),
            _ => plan.broken == Broken::Unordered || node.merger.is_ready(&packet.stamp),
        }
    }

    pub fn deliver(&mut self, at: usize) {
        let packet = self.packets.remove(at);
        let (from, to) = (packet.from, packet.to);
        match packet.payload {
            Payload::Batch(diffs) => self.nodes[to].applying = Some((from, diffs)),
            Payload::MergeMessage(message, bytes) => {
                self.nodes[to].driver.arrived = bytes;
                self.merge(to, |merger, driver| merger.receive(id(from), message, driver));
                self.nodes[to].driver.arrived = [0; WORDS];
            }
            Payload::Right(page, bytes) => {
                if let Some(bytes) = bytes {
                    self.nodes[to].driver.copy[page as usize] = bytes;
                }
                let request = self
                    .requests
                    .iter_mut()
                    .find(|one| one.page == page)
                    .expect("a request is pending");
                request.awaited.retain(|other| *other != from);
                self.complete(page);
            }
            Payload::Interrupt(cpu) => self.cpus[cpu].is_interrupted = true,
        }
    }

    /// Applies one word of a batch, or ends the batch.
    pub fn apply(&mut self, node: usize) {
        let (from, mut diffs) = self.nodes[node].applying.take().expect("there is one");
        let Node { merger, driver, .. } = &mut self.nodes[node];
        let first = diffs.remove(0);
        merger.twins.apply(&first, driver);
        if diffs.is_empty() {
            self.merge(node, |merger, driver| merger.applied(id(from), driver));
        } else {
            self.nodes[node].applying = Some((from, diffs));
        }
    }

    /// Returns whether all programs have ended and nothing is in flight.
    pub fn is_over(&self, plan: &Plan) -> bool {
        let ended = |cpu: usize| {
            let one = &self.cpus[cpu];
            one.at >= plan.programs[cpu].len() && one.handler.is_none() && !one.is_interrupted
        };
        let rests = |node: &Node| node.task.is_none() && node.applying.is_none();
        (0..self.cpus.len()).all(ended)
            && self.nodes.iter().all(rests)
            && self.packets.is_empty()
            && self.requests.is_empty()
            && self.takes.is_empty()
    }
}
