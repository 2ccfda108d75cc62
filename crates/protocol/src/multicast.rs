//! Ordered multicast along trees, and unicast in the same order (Multikernel, SOSP '09, sections 4.4 and
//! 5.1).
//!
//! This layer lies between a state machine that needs ordered links, as [`crate::agreement`], and the links.
//! The source sends a multicast message to the first cells of a tree. Each of them forwards the message to
//! the cells below before it takes the message itself. The caller chooses the tree. A first cell with nothing
//! below it gets the message as a unicast: a tree of such cells costs only the numbers.
//!
//! The guarantee is that of links: the messages of one cell to another arrive once and in order, by any
//! route, until one of the two is dead to the other. The argument:
//!
//! 1. *Once, in order.* A source numbers its messages to each cell, and never uses a number twice. A cell
//!    takes only the next number, drops those it has had, and holds back early ones. The first message over a
//!    link goes over the link itself and is marked: the numbers begin there.
//! 2. *Nothing is lost.* A link loses no message. The source keeps a message that goes by a relay until the
//!    receiver confirms it, with its next message or else within a [tick](Multicast::tick), or until the
//!    source sends the message over the link itself. The source does so
//!    - when any cell dies, since that may have been the relay;
//!    - when a relay reports that it has no link to the cell;
//!    - when the message is not confirmed after [`LATE_TICKS`] ticks: the relay hangs, or its death is
//!      undetected.
//!
//!    So no cell waits for a third one for longer than that.
//! 3. *Memory is bounded.* From the first unconfirmed message to a cell to the next one there are less than
//!    [`WINDOW`] numbers: before there were more, all unconfirmed ones are sent over the link. So a receiver
//!    holds back fewer messages than that. It drops only messages beyond that from relays, whose source still
//!    keeps them.
//!
//! A message may ask for replies, as a request for votes does. [`Multicast::reply`] sends a reply back by the
//! relay that brought the message, which [gathers](gather) those of the cells below it and sends one packet
//! up (Multikernel, section 5.1, Figure 6). Replies are outside the guarantee above: one may be lost with a
//! relay, and one may arrive before earlier messages of its cell. So the layer above counts replies by cell,
//! and repeats the request to the cells below a relay, over their links, when the relay dies or is late. A
//! packet of replies confirms messages as any other does.
//!
//! A tree contains only cells that have sent something since they were linked: they have the link too, and
//! will know the source. A cell that was late, or that relayed to one, is in no tree until it sends
//! something.

use std::collections::{BTreeMap, BTreeSet};

use crate::CellId;

mod gather;
mod packet;
mod peer;
#[cfg(test)]
mod tests;

pub use gather::ReplyPath;
pub use packet::{Gathered, Hop, Packet};

use gather::{Batch, Gatherings};
use peer::{Peer, Unacked};

/// Most sequence numbers from the first unacknowledged message to the next one.
const WINDOW: u64 = 64;
/// Ticks after which an unacknowledged message is late. After two ticks the receiver's own tick has passed,
/// too.
pub(crate) const LATE_TICKS: u8 = 3;

/// Effect that the caller has to carry out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Effect<M> {
    /// Send a packet over the link to a cell.
    Send(CellId, Packet<M>),
    /// Deliver a message of this cell; with the path of a reply, if it came by a relay that gathers replies.
    Deliver(CellId, M, Option<ReplyPath>),
}

type Effects<M> = Vec<Effect<M>>;

/// Result of [`Multicast::send_to_all`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MulticastResult<M> {
    /// Effects that the caller has to carry out.
    pub effects: Vec<Effect<M>>,
    /// The cells whose replies relays gather, each with the first cell of its branch. Without that cell, or
    /// if it is late, the reply may be lost.
    pub gathered: BTreeMap<CellId, CellId>,
}

/// The multicast state of one cell.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Multicast<M> {
    me: CellId,
    /// The cells to which there are links.
    peers: BTreeMap<CellId, Peer<M>>,
    /// Lowest number above all that were ever used.
    unused: u64,
    /// Replies to messages that this cell has forwarded.
    gatherings: Gatherings<M>,
}

impl<M: Clone + PartialEq> Multicast<M> {
    /// Returns a cell without links.
    pub fn new(me: CellId) -> Self {
        Self {
            me,
            peers: BTreeMap::new(),
            unused: 0,
            gatherings: Gatherings::new(),
        }
    }

    /// Adds a link to a cell. Nothing comes over an earlier link to that cell any more.
    /// `gathers`: whether the cell supports packets of replies.
    pub fn link(&mut self, cell: CellId, gathers: bool) {
        self.peers.insert(cell, Peer::new(self.unused, gathers));
    }

    /// Removes the link to a dead cell. Unconfirmed messages to all others are sent over the links.
    pub fn dead(&mut self, cell: CellId) -> Effects<M> {
        let mut effects = Vec::new();
        if self.peers.remove(&cell).is_some() {
            // The dead cell may have relayed any of them.
            let cells: Vec<CellId> = self.peers.keys().copied().collect();
            self.resend_unacked(cells, &mut effects);
        }
        effects.extend(self.gatherings.dead(cell).into_iter().map(upward));
        effects
    }

    /// Whether all linked cells know packets of replies, and so what came with them.
    pub fn all_gather(&self) -> bool {
        self.peers.values().all(|peer| peer.gathers)
    }

    /// Returns the cells that a tree may contain.
    pub fn fit(&self) -> impl Iterator<Item = CellId> + '_ {
        let fit = self.peers.iter().filter(|(_, peer)| peer.begun && peer.prompt);
        fit.map(|(cell, _)| *cell)
    }

    /// Sends a message to one cell. Without a link to that cell nothing happens.
    pub fn send(&mut self, to: CellId, body: M) -> Effects<M> {
        let mut effects = Vec::new();
        self.send_directly(to, body, &mut effects);
        effects
    }

    /// Sends a message to all linked cells along a tree. Cells that the tree leaves out get the message over
    /// their links. So do all cells if the tree has a cell that is not [fit](Self::fit), or a cell twice. If
    /// `gathers`, the message requests replies, and relays gather them if all linked cells know how.
    pub fn send_to_all(&mut self, body: &M, tree: &[Hop], gathers: bool) -> MulticastResult<M> {
        let mut effects = Vec::new();
        let mut gathered = BTreeMap::new();
        let gathers = gathers && self.all_gather();
        let fit: BTreeSet<CellId> = self.fit().collect();
        let cells: BTreeSet<CellId> = tree.iter().map(|hop| hop.cell).collect();
        let is_sound = cells.len() == tree.len() && cells.is_subset(&fit);
        let tree = if is_sound { tree } else { &[] };
        let mut rest: BTreeSet<CellId> = self.peers.keys().copied().collect();
        for (first, below) in branches(tree, |hop| hop) {
            rest.remove(&first.cell);
            if below.is_empty() {
                self.send_directly(first.cell, body.clone(), &mut effects);
                continue;
            }
            let mut numbered = Vec::new();
            gathered.insert(first.cell, first.cell);
            for hop in below {
                rest.remove(&hop.cell);
                gathered.insert(hop.cell, first.cell);
                numbered.push((*hop, self.keep(hop.cell, first.cell, body, &mut effects)));
            }
            // This packet goes over the link itself, so it can't be lost.
            let packet = Packet::Relayed {
                source: self.me,
                number: self.number(first.cell, &mut effects),
                below: numbered,
                gathers,
                body: body.clone(),
            };
            effects.push(Effect::Send(first.cell, packet));
        }
        for cell in rest {
            self.send_directly(cell, body.clone(), &mut effects);
        }
        if !gathers {
            gathered.clear();
        }
        MulticastResult { effects, gathered }
    }

    /// Replies to a message of a cell, by the path that the message came with. A reply that is `at_once`
    /// waits for no other. Without a link to the cell nothing happens.
    pub fn reply(&mut self, to: CellId, path: Option<ReplyPath>, at_once: bool, body: M) -> Effects<M> {
        let mut effects = Vec::new();
        let Some(peer) = self.peers.get_mut(&to) else {
            return effects;
        };
        let Some(ReplyPath { relay, number }) = path else {
            self.send_directly(to, body, &mut effects);
            return effects;
        };
        let cells = vec![(self.me, peer.heard())];
        let batch = |body: M| Batch {
            replies: vec![Gathered { body, cells }],
            at_once,
            last: true,
        };
        if relay == self.me {
            match self.gatherings.own(to, number, batch(body.clone())) {
                Ok(up) => effects.extend(up.map(upward)),
                Err(_) => self.send_directly(to, body, &mut effects),
            }
        } else if self.peers.contains_key(&relay) {
            let packet = batch(body).packet(to, number);
            effects.push(Effect::Send(relay, packet));
        } else {
            self.send_directly(to, body, &mut effects);
            return effects;
        }
        if let Some(peer) = self.peers.get_mut(&to) {
            peer.owes_ack = false;
        }
        effects
    }

    /// Handles a packet from the link to a cell. A packet from a cell without a link is ignored.
    pub fn take(&mut self, from: CellId, packet: Packet<M>) -> Effects<M> {
        let mut effects = Vec::new();
        let Some(peer) = self.peers.get_mut(&from) else {
            return effects;
        };
        peer.prompt = true;
        match packet {
            Packet::Direct {
                number,
                begins,
                heard,
                body,
            } => {
                peer.confirmed(heard);
                if begins {
                    peer.expected = Some(number);
                    peer.early = peer.early.split_off(&number);
                }
                // Otherwise it is from an earlier link.
                if peer.expected.is_some() {
                    peer.take(from, number, body, None, &mut effects);
                }
            }
            Packet::Relayed {
                source,
                number,
                below,
                gathers,
                body,
            } => {
                let children = self.pass_on(source, below, gathers, &body, &mut effects);
                let is_relay = !children.is_empty();
                if let Some(peer) = self.peers.get_mut(&source) {
                    peer.owes_ack |= from != source;
                    let relay = if is_relay { self.me } else { from };
                    let path = (gathers && relay != source).then_some(ReplyPath { relay, number });
                    let is_new = peer.take(source, number, body, path, &mut effects);
                    if gathers && is_relay {
                        let room = self.gatherings.begin(source, number, from, is_new, children);
                        effects.extend(room.map(upward));
                    }
                }
            }
            Packet::Replies {
                source,
                number,
                replies,
                at_once,
                last,
            } => {
                let batch = Batch {
                    replies,
                    at_once,
                    last,
                };
                self.take_replies(from, source, number, batch, &mut effects);
            }
            Packet::Heard { heard } => peer.confirmed(heard),
            Packet::Unreached { cells } => self.resend_unacked(cells, &mut effects),
        }
        effects
    }

    /// Handles a packet of this cell that could not be sent, since the link is gone.
    pub fn unsent(&mut self, to: CellId, packet: Packet<M>) -> Effects<M> {
        let mut effects = Vec::new();
        match packet {
            Packet::Relayed { source, below, .. } => {
                let below = below.into_iter().map(|(hop, _)| hop.cell);
                self.unreached(source, [to].into_iter().chain(below).collect(), &mut effects);
            }
            // The source takes them from any cell.
            Packet::Replies { source, .. } if source != to && self.peers.contains_key(&source) => {
                effects.push(Effect::Send(source, packet));
            }
            Packet::Replies { .. }
            | Packet::Direct { .. }
            | Packet::Heard { .. }
            | Packet::Unreached { .. } => {}
        }
        effects
    }

    /// Whether [`Self::tick`] must be called.
    pub fn needs_tick(&self) -> bool {
        let mut peers = self.peers.values();
        !self.gatherings.is_empty() || peers.any(|peer| peer.owes_ack || !peer.unacked.is_empty())
    }

    /// Advances time by one tick. A tick is about equally long in all cells, and much longer than a message
    /// takes.
    pub fn tick(&mut self) -> Effects<M> {
        let mut effects = Vec::new();
        let mut late = BTreeSet::new();
        for (cell, peer) in &mut self.peers {
            if peer.owes_ack {
                peer.owes_ack = false;
                let heard = peer.heard();
                effects.push(Effect::Send(*cell, Packet::Heard { heard }));
            }
            for unacked in &mut peer.unacked {
                unacked.ticks += 1;
                if unacked.ticks >= LATE_TICKS {
                    late.extend([unacked.relay, *cell]);
                }
            }
        }
        for cell in &late {
            if let Some(peer) = self.peers.get_mut(cell) {
                peer.prompt = false;
            }
        }
        self.resend_unacked(late, &mut effects);
        effects.extend(self.gatherings.tick().into_iter().map(upward));
        effects
    }

    /// The next number for a cell; first there may be room to be made.
    fn number(&mut self, cell: CellId, effects: &mut Effects<M>) -> u64 {
        let is_full = |peer: &Peer<M>| {
            let first = peer.unacked.front();
            first.is_some_and(|unacked| peer.next - unacked.number >= WINDOW)
        };
        if self.peers.get(&cell).is_some_and(is_full) {
            self.resend_unacked([cell], effects);
        }
        let Some(peer) = self.peers.get_mut(&cell) else {
            return self.unused;
        };
        let number = peer.next;
        peer.next += 1;
        self.unused = self.unused.max(peer.next);
        number
    }

    fn keep(&mut self, cell: CellId, relay: CellId, body: &M, effects: &mut Effects<M>) -> u64 {
        let number = self.number(cell, effects);
        if let Some(peer) = self.peers.get_mut(&cell) {
            peer.unacked.push_back(Unacked {
                number,
                relay,
                ticks: 0,
                body: body.clone(),
            });
        }
        number
    }

    fn send_directly(&mut self, cell: CellId, body: M, effects: &mut Effects<M>) {
        let number = self.number(cell, effects);
        if let Some(peer) = self.peers.get_mut(&cell) {
            effects.push(Effect::Send(cell, peer.packet(number, body)));
        }
    }

    /// Sends unconfirmed messages over the links, where nothing is lost.
    fn resend_unacked(&mut self, cells: impl IntoIterator<Item = CellId>, effects: &mut Effects<M>) {
        for cell in cells {
            let Some(peer) = self.peers.get_mut(&cell) else {
                continue;
            };
            for unacked in std::mem::take(&mut peer.unacked) {
                effects.push(Effect::Send(cell, peer.packet(unacked.number, unacked.body)));
            }
        }
    }

    /// Replies come to their source, or to a relay on their way.
    fn take_replies(
        &mut self,
        from: CellId,
        source: CellId,
        number: u64,
        batch: Batch<M>,
        effects: &mut Effects<M>,
    ) {
        if source == self.me {
            for Gathered { body, cells } in batch.replies {
                for (cell, heard) in cells {
                    if let Some(peer) = self.peers.get_mut(&cell) {
                        peer.confirmed(heard);
                        effects.push(Effect::Deliver(cell, body.clone(), None));
                    }
                }
            }
            return;
        }
        match self.gatherings.of_child(source, from, number, batch) {
            Ok(up) => effects.extend(up.map(upward)),
            // They come after the gathering's end.
            Err(batch) if self.peers.contains_key(&source) && !batch.replies.is_empty() => {
                effects.push(Effect::Send(source, batch.packet(source, number)));
            }
            Err(_) => {}
        }
    }

    /// Forwards a message to the cells below. Returns those next to this one, with their numbers.
    fn pass_on(
        &mut self,
        source: CellId,
        below: Vec<(Hop, u64)>,
        gathers: bool,
        body: &M,
        effects: &mut Effects<M>,
    ) -> BTreeMap<CellId, u64> {
        let mut children = BTreeMap::new();
        let mut unreached = Vec::new();
        for (first, rest) in branches(&below, |(hop, _)| hop) {
            if !self.peers.contains_key(&first.0.cell) {
                unreached.push(first.0.cell);
                unreached.extend(rest.iter().map(|(hop, _)| hop.cell));
                continue;
            }
            let packet = Packet::Relayed {
                source,
                number: first.1,
                below: rest.to_vec(),
                gathers,
                body: body.clone(),
            };
            children.insert(first.0.cell, first.1);
            effects.push(Effect::Send(first.0.cell, packet));
        }
        if !unreached.is_empty() {
            self.unreached(source, unreached, effects);
        }
        children
    }

    fn unreached(&mut self, source: CellId, cells: Vec<CellId>, effects: &mut Effects<M>) {
        if source == self.me {
            self.resend_unacked(cells, effects);
        } else if self.peers.contains_key(&source) {
            effects.push(Effect::Send(source, Packet::Unreached { cells }));
        }
    }
}

fn upward<M>((to, packet): (CellId, Packet<M>)) -> Effect<M> {
    Effect::Send(to, packet)
}

/// The first cells of a tree, each with its subtree.
fn branches<T>(tree: &[T], hop: impl Fn(&T) -> &Hop) -> Vec<(&T, &[T])> {
    let mut branches = Vec::new();
    let mut left = tree;
    while let Some((first, rest)) = left.split_first() {
        // A packet that claims more cells than there are has all of them.
        let (below, others) = rest.split_at(rest.len().min(usize::from(hop(first).below)));
        branches.push((first, below));
        left = others;
    }
    branches
}
