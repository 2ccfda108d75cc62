//! Driver of [`coherence::merged`]: merged page tables of a guest, in a memory of few nodes with one page
//! server each.
//!
//! All of it runs on the page server. Batches and messages about merged pages are sent on the control stream,
//! in fragments of a frame ([`fragments`]). Messages of the engine carry their vector time
//! ([`stamp_tracker`]), since those with a page use another stream and another node's diffs use another link.
//! A message that arrives before its predecessors waits in a buffer ([`causal_buffer`]).

mod causal_buffer;
mod fragments;
mod hooks;
mod stamp_tracker;

#[cfg(fuzzing)]
pub(crate) use fragments::{batch, message};

use std::collections::VecDeque;
use std::sync::Arc;

use coherence::merged::{Accessed, Batch, Level, MergeMessage, MergeOp, Merger, Merges, Ticket, VectorTime};
use coherence::{Layout, Message, NodeId, Page};

use crate::PAGE_LEN;
use crate::batches::{AHEAD_MAX, Batches, ahead};
use crate::causal::Causal;
use crate::clock::now_ns;
use crate::driver::EngineDriver;
use crate::frame::{Frame, OrderedFrame, page_of};
use causal_buffer::{BufferedMessage, CausalBuffer};
pub(crate) use fragments::{MergePayload, Reassembly};
pub(crate) use stamp_tracker::StampTracker;
use stamp_tracker::{Frames, is_too_far};

/// Offset of the number of the sender's last batch in a message of the engine. Copysets of 32 nodes don't
/// reach there.
const NUMBER_AT: usize = 12;
const _: () = assert!(crate::SHARERS_MAX <= 32);
/// Largest number of merged tables.
const LIMIT: usize = 64;
/// Arrivals of a page after which it is suspected to be a table, and between suspicions.
pub const HOT: u32 = 4;

/// Work that waits until the merger or the engine returns.
#[derive(Clone, Copy, Debug)]
pub enum DeferredWork {
    /// Acquire a page for this node alone.
    Take(u32),
    /// The page is acquired.
    Taken(u32),
    /// The page returns to the engine.
    GiveBack(u32),
    /// The page moves too often and may be a table.
    Suspect(u32),
}

/// A message that is sent when the pages of its ticket have left.
#[derive(Debug)]
struct DelayedMessage {
    to: usize,
    frame: Frame,
    page: Option<Box<[u8; PAGE_LEN]>>,
    ticket: Ticket,
}

/// State of the exchange with another node.
#[derive(Debug)]
struct Peer {
    fragments: Reassembly,
    /// Batches received, applied or buffered.
    batches: u64,
    /// Vector times that the peer announced to this node, and that this node announced to it.
    received_stamps: StampTracker,
    sent_stamps: StampTracker,
}

/// Merged pages of a page server.
#[derive(Debug)]
pub struct Merging {
    pub merger: Merger,
    pub causal: Arc<Causal>,
    /// Pages that the engine must not grant, merged or about to be. Only at their manager.
    pub taken: Vec<u32>,
    /// Messages for the engine that wait until such a page returns to it.
    pub parked: Vec<(usize, Frame)>,
    layout: Layout,
    /// All nodes; the entry of this one is not used.
    peers: Vec<Peer>,
    buffer: CausalBuffer,
    /// Batches were applied since the buffer was last searched for messages.
    has_applied: bool,
    delayed: VecDeque<DelayedMessage>,
    requests: VecDeque<(u64, Ticket)>,
    handled_requests: u64,
}

impl Merging {
    /// Creates the state of a node of at most [`crate::SHARERS_MAX`].
    pub fn new(layout: Layout, causal: Arc<Causal>, processors: usize) -> Self {
        let pinned = causal.pinned();
        const TOP: Level = Level(4);
        let (me, nodes) = (usize::from(layout.me.0), usize::from(layout.nodes));
        let peer = |node| Peer {
            fragments: Reassembly::new(),
            batches: 0,
            received_stamps: StampTracker::new([node, me], nodes),
            sent_stamps: StampTracker::new([me, node], nodes),
        };
        Self {
            merger: Merger::new(layout.clone(), TOP, LIMIT, processors, Accessed::Sent, pinned),
            layout,
            causal,
            taken: Vec::with_capacity(LIMIT),
            parked: Vec::new(),
            peers: (0..nodes).map(peer).collect(),
            buffer: CausalBuffer::default(),
            has_applied: false,
            delayed: VecDeque::new(),
            requests: VecDeque::new(),
            handled_requests: 0,
        }
    }

    /// Returns the merger's counters.
    pub fn merges(&self) -> Merges {
        self.merger.merges()
    }

    /// Passes the processors' roots to the merger.
    fn update_roots(&mut self, driver: &mut EngineDriver) {
        for (processor, cr3) in self.causal.clone().roots() {
            self.merger.loaded(processor, cr3, driver);
        }
        self.merger.last_pinned(self.causal.last_pinned());
    }

    fn collect(&mut self, driver: &mut EngineDriver) -> Ticket {
        self.update_roots(driver);
        self.merger.collect(driver)
    }

    /// Proposes a page that moves too often, if it is a table.
    pub fn suspect(&mut self, page: u32, driver: &mut EngineDriver) {
        self.update_roots(driver);
        if let Some(proposal) = self.merger.suspect(Page(page)) {
            self.merger.propose(proposal, driver);
        }
    }

    /// Sends a causal message of the engine, or delays it until its ticket is due.
    pub fn send(
        &mut self,
        driver: &mut EngineDriver,
        to: usize,
        frame: Frame,
        page: Option<*const [u8; PAGE_LEN]>,
    ) {
        let ticket = self.collect(driver);
        if self.delayed.is_empty() && self.merger.may_send(ticket) {
            return self.post(driver, to, frame, page);
        }
        // SAFETY: no processor can write the page any more.
        let page = page.map(|page| Box::new(unsafe { page.read() }));
        self.delayed.push_back(DelayedMessage {
            to,
            frame,
            page,
            ticket,
        });
    }

    /// Sends a message with its vector time.
    fn post(
        &mut self,
        driver: &mut EngineDriver,
        to: usize,
        mut frame: Frame,
        page: Option<*const [u8; PAGE_LEN]>,
    ) {
        let stamp = self.merger.stamp();
        let sent = stamp.of(self.layout.me) as u32;
        frame[NUMBER_AT..].copy_from_slice(&sent.to_le_bytes());
        let mut frames: Frames = [0; size_of::<Frames>()];
        let length = match self.peers.get_mut(to) {
            Some(peer) => peer
                .sent_stamps
                .write(&mut frames, &frame, page.is_some(), &stamp),
            // The driver reports the error.
            None => 0,
        };
        driver.post(to, &frames[..length], page, false);
    }

    /// Returns whether a request is pending. Called before sleep: a later request wakes the page server.
    pub fn has_request(&self) -> bool {
        let _ = self.causal.event().read();
        self.causal.asked() != self.handled_requests
    }

    /// Sends the messages that are due, and answers requests.
    pub fn flush(&mut self, driver: &mut EngineDriver) {
        let asked = self.causal.asked();
        if asked != self.handled_requests {
            self.handled_requests = asked;
            if let Some((from, why)) = self.causal.refused() {
                driver.refused(&format!("{}: {why}", driver.peers.name(from)));
            }
            let ticket = self.collect(driver);
            self.requests.push_back((asked, ticket));
        }
        while let Some(delayed) = self
            .delayed
            .pop_front_if(|delayed| self.merger.may_send(delayed.ticket))
        {
            let page = delayed.page.as_deref().map(std::ptr::from_ref);
            self.post(driver, delayed.to, delayed.frame, page);
        }
        while let Some((number, _)) = self
            .requests
            .pop_front_if(|(_, ticket)| self.merger.may_send(*ticket))
        {
            self.causal.answer(number, Batches::from(&self.merger.stamp()));
        }
    }

    /// Handles a frame of a node. Returns the engine's message that may be handled now, if it is one.
    ///
    /// # Errors
    /// If the frame violates the protocol.
    pub fn receive(
        &mut self,
        driver: &mut EngineDriver,
        from: usize,
        kind: OrderedFrame,
        frame: &Frame,
    ) -> Result<Option<Frame>, &'static str> {
        match kind {
            OrderedFrame::Fragment => {
                let nodes = self.peers.len();
                if let Some(payload) = self.peers[from].fragments.add(frame, nodes)? {
                    self.receive_payload(driver, from, payload)?;
                }
                Ok(None)
            }
            OrderedFrame::Stamp => {
                let applied = self.merger.stamp();
                self.peers[from].received_stamps.receive(frame, &applied)?;
                Ok(None)
            }
            OrderedFrame::Message => {
                let (number, message) = unnumbered(frame);
                let Some((number, with_page)) = number else {
                    return Ok(Some(message));
                };
                let stamp = self.stamp_of(from, number, with_page)?;
                if self.merger.is_ready(&stamp) {
                    return Ok(Some(message));
                }
                // Its bytes are in place, if it has any.
                driver.landing.cancel(page_of(frame));
                self.buffer
                    .push(from, BufferedMessage::Message(message, stamp), now_ns())?;
                Ok(None)
            }
        }
    }

    /// Returns the buffered messages of the engine that may be handled now, and their senders.
    pub fn take_ready(&mut self) -> Vec<(usize, Frame)> {
        let mut ready = Vec::new();
        if std::mem::take(&mut self.has_applied) {
            let merger = &self.merger;
            let is_ready = |_, message: &BufferedMessage| match message {
                BufferedMessage::Message(_, stamp) => merger.is_ready(stamp),
                BufferedMessage::MergePayload(_) => false,
            };
            while let Some((from, BufferedMessage::Message(frame, _))) = self.buffer.take(is_ready) {
                ready.push((from, frame));
            }
        }
        ready
    }

    /// Returns whether the buffer holds messages.
    pub fn waits(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// Returns the sender of a buffered message whose predecessors will never arrive.
    pub fn overdue(&self) -> Option<usize> {
        self.waits().then(|| self.buffer.overdue(now_ns())).flatten()
    }

    /// Returns the vector time of a message of the engine with this batch number.
    fn stamp_of(&self, from: usize, number: u32, with_page: bool) -> Result<VectorTime, &'static str> {
        let node = NodeId(from as u16);
        let applied = self.merger.stamp().of(node);
        match ahead(applied as u32, number) {
            missing @ ..=AHEAD_MAX => {
                let stamp = self.peers[from].received_stamps.stamp(with_page);
                Ok(stamp.with(node, applied + u64::from(missing)))
            }
            _ => Err("its message comes after changes that there can't be"),
        }
    }

    /// Handles a complete batch or message.
    fn receive_payload(
        &mut self,
        driver: &mut EngineDriver,
        from: usize,
        payload: MergePayload,
    ) -> Result<(), &'static str> {
        let peer = &mut self.peers[from];
        match &payload {
            MergePayload::Batch(stamp, _) => {
                peer.batches += 1;
                if stamp.of(NodeId(from as u16)) != peer.batches {
                    return Err("it sends changes of merged pages out of their order");
                }
            }
            MergePayload::Message(message, _) => {
                if message.stamp.of(NodeId(from as u16)) > peer.batches {
                    return Err("it comes after changes of its own that it did not send");
                }
                self.check_sender(driver, from, message)?;
            }
        }
        self.check_stamp(from, payload.stamp())?;
        if !is_ready(&self.merger, from, &payload) {
            return self
                .buffer
                .push(from, BufferedMessage::MergePayload(payload), now_ns());
        }
        self.act(driver, from, payload);
        let is_due = |merger: &Merger, from, message: &BufferedMessage| match message {
            BufferedMessage::MergePayload(payload) => is_ready(merger, from, payload),
            BufferedMessage::Message(..) => false,
        };
        while let Some((from, BufferedMessage::MergePayload(payload))) = self
            .buffer
            .take(|from, message| is_due(&self.merger, from, message))
        {
            self.act(driver, from, payload);
        }
        if self.has_applied {
            self.causal.applied(Batches::from(&self.merger.stamp()));
        }
        Ok(())
    }

    /// Checks that the predecessors of a payload in batches of this node or a third one can exist.
    fn check_stamp(&self, from: usize, stamp: &VectorTime) -> Result<(), &'static str> {
        let here = self.merger.stamp();
        let is_impossible = |node: NodeId| match node {
            NodeId(node) if usize::from(node) == from => false,
            _ if node == self.layout.me => stamp.of(node) > here.of(node),
            _ => is_too_far(stamp.of(node), here.of(node)),
        };
        match (0..self.layout.nodes).map(NodeId).any(is_impossible) {
            true => Err("its message about merged pages comes after changes that there can't be"),
            false => Ok(()),
        }
    }

    /// Checks that the sender may send the message, and that its page exists.
    fn check_sender(
        &self,
        driver: &EngineDriver,
        from: usize,
        message: &MergeMessage,
    ) -> Result<(), &'static str> {
        let is_managers = match message.op {
            MergeOp::Offer(_)
            | MergeOp::Begin
            | MergeOp::Withdraw
            | MergeOp::Kept
            | MergeOp::Drop
            | MergeOp::Left => true,
            MergeOp::Propose(_) | MergeOp::Accept { .. } | MergeOp::Refuse | MergeOp::Leave => false,
            MergeOp::Loaded { .. } | MergeOp::Dropped | MergeOp::Settled => false,
        };
        let manager = match is_managers {
            true => NodeId(from as u16),
            false => self.layout.me,
        };
        let exists = message.page.0 < driver.region.pages();
        match exists && self.layout.manager(message.page) == manager {
            true => Ok(()),
            false => Err("it sent a message about a merged page that only the manager may send or receive"),
        }
    }

    fn act(&mut self, driver: &mut EngineDriver, from: usize, payload: MergePayload) {
        let from = NodeId(from as u16);
        match payload {
            MergePayload::Batch(stamp, diffs) => {
                let diffs = &diffs[..];
                self.merger.apply(Batch { from, stamp, diffs }, driver);
                self.has_applied = true;
            }
            MergePayload::Message(message, page) => {
                if let Some(page) = page {
                    driver.offered = page;
                }
                self.merger.receive(from, message, driver);
            }
        }
    }
}

/// Returns whether a payload may be handled now.
fn is_ready(merger: &Merger, from: usize, payload: &MergePayload) -> bool {
    match payload {
        MergePayload::Batch(stamp, _) => merger.awaits(NodeId(from as u16), stamp),
        MergePayload::Message(message, _) => merger.is_ready(&message.stamp),
    }
}

/// Splits a message of the engine: the number of the sender's last batch and whether a page is attached, if
/// it is causal; and the message without the number.
pub fn unnumbered(frame: &Frame) -> (Option<(u32, bool)>, Frame) {
    let mut without = *frame;
    without[NUMBER_AT..].fill(0);
    match Message::decode(&without) {
        Ok(message) if message.is_causal() => {
            let number = u32::from_le_bytes([frame[12], frame[13], frame[14], frame[15]]);
            (Some((number, message.carries_page())), without)
        }
        _ => (None, *frame),
    }
}

#[cfg(test)]
mod tests;
