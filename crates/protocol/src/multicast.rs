//! Messages to all, along trees, and to one, in one order (Multikernel, SOSP '09, sections 4.4 and 5.1).
//!
//! Between a machine that needs links in order, as [`crate::agreement`], and the links. The source sends a message for all to
//! the first cells of a tree; each of them passes it on to the cells below before it takes it itself. Which tree is the
//! caller's to say. A cell with nothing below it gets the message as any other: a tree that is one by one costs only the
//! numbers.
//!
//! What it promises is what links do: what one cell sends to another comes once and in order, until one of the two is dead
//! to the other, by whichever way each message goes. Why that holds:
//!
//! 1. *Once, in order.* A source numbers what it sends to each cell, and never uses a number twice. A cell takes the next
//!    number only, drops those it has had, and holds back those that are early. The first message over a link goes over the
//!    link itself and says so: there the numbers begin.
//! 2. *Nothing is lost.* What goes over the link itself can't be. What goes by a relay is kept by its source until the
//!    receiver says, with whatever it sends next or else within a [tick](Multicast::tick), that it has it; or until the
//!    source sends it over the link itself. It does so
//!    - when any cell dies, since that may have been the relay;
//!    - when a relay says that it has no link to the cell;
//!    - when it is not confirmed after [`LATE_TICKS`] ticks: the relay hangs, or died without anybody having noticed.
//!
//!    So no cell waits for a third one for longer than that.
//! 3. *Memory is bounded.* From the first message to a cell that is not confirmed to the next one are less than
//!    [`WINDOW`] numbers: before there were more, all are sent over the link. So a receiver holds back fewer than that, and
//!    what it may drop beyond is only what comes from relays, whose source still keeps it.
//!
//! Only a cell that has said something since it was linked is in a tree: it has the link too, and will know the source. One
//! that was late, or was above one that was, is in none until it says something.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::CellId;

#[cfg(test)]
mod tests;

/// Numbers from the first message that is not confirmed to the next one, at most.
const WINDOW: u64 = 64;
/// What is not confirmed after so many ticks is late: after two the receiver's own tick has been, too.
const LATE_TICKS: u8 = 3;

/// A cell in a tree. Trees are lists, each cell before those below it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Hop {
    /// The cell.
    pub cell: CellId,
    /// How many of the next in the list are below it.
    pub below: u16,
}

/// What goes over a link.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Packet<M> {
    /// From the source itself.
    Direct {
        /// Counts what the source sends to the receiver.
        number: u64,
        /// The first one over this link.
        begins: bool,
        /// The sender has all of the receiver's messages below this number.
        heard: u64,
        /// The message.
        body: M,
    },
    /// Along a tree.
    Relayed {
        /// Who sent it first.
        source: CellId,
        /// As in [`Packet::Direct`].
        number: u64,
        /// The tree below the receiver, with each one's number.
        below: Vec<(Hop, u64)>,
        /// The message.
        body: M,
    },
    /// As in [`Packet::Direct`], when there is nothing else to say.
    Heard {
        /// All below.
        heard: u64,
    },
    /// A relay has no link to these.
    Unreached {
        /// In no order.
        cells: Vec<CellId>,
    },
}

/// What is to be done.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Effect<M> {
    /// Send over the link to a cell.
    Send(CellId, Packet<M>),
    /// A cell's message has come.
    Deliver(CellId, M),
}

type Effects<M> = Vec<Effect<M>>;

/// A message that was sent by a relay.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Kept<M> {
    number: u64,
    relay: CellId,
    /// Since then.
    ticks: u8,
    body: M,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Peer<M> {
    /// To it: the next number.
    next: u64,
    /// Something was sent over the link.
    begun: bool,
    /// In order; not confirmed.
    kept: VecDeque<Kept<M>>,
    /// It has said something since the link was made, and since it was last late.
    prompt: bool,
    /// From it: the number that comes next, once it has begun.
    expected: Option<u64>,
    early: BTreeMap<u64, M>,
    /// It keeps something for this cell until it hears of it.
    is_owed: bool,
}

/// One cell's part.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Multicast<M> {
    me: CellId,
    /// The cells to which there are links.
    peers: BTreeMap<CellId, Peer<M>>,
    /// Above all numbers that were ever used.
    unused: u64,
}

impl<M: Clone> Multicast<M> {
    /// A cell without links.
    pub fn new(me: CellId) -> Self {
        Self {
            me,
            peers: BTreeMap::new(),
            unused: 0,
        }
    }

    /// There is a link to a cell now. If there was one before, nothing comes over that any more.
    pub fn link(&mut self, cell: CellId) {
        let peer = Peer {
            next: self.unused,
            begun: false,
            kept: VecDeque::new(),
            prompt: false,
            expected: None,
            early: BTreeMap::new(),
            is_owed: false,
        };
        self.peers.insert(cell, peer);
    }

    /// A cell is dead.
    pub fn dead(&mut self, cell: CellId) -> Effects<M> {
        let mut effects = Vec::new();
        if self.peers.remove(&cell).is_some() {
            // It may have been the relay of any of them.
            let cells: Vec<CellId> = self.peers.keys().copied().collect();
            self.send_kept(cells, &mut effects);
        }
        effects
    }

    /// The cells that can be in a tree.
    pub fn fit(&self) -> impl Iterator<Item = CellId> + '_ {
        let fit = self.peers.iter().filter(|(_, peer)| peer.begun && peer.prompt);
        fit.map(|(cell, _)| *cell)
    }

    /// Sends to one cell. Without a link to it nothing happens.
    pub fn send(&mut self, to: CellId, body: M) -> Effects<M> {
        let mut effects = Vec::new();
        self.send_directly(to, body, &mut effects);
        effects
    }

    /// Sends to all to which there are links, along a tree. Those that it leaves out get it over their links, and so do all
    /// if the tree has others than those that are [fit](Self::fit), or one twice.
    pub fn tell(&mut self, body: &M, tree: &[Hop]) -> Effects<M> {
        let mut effects = Vec::new();
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
            for hop in below {
                rest.remove(&hop.cell);
                numbered.push((*hop, self.keep(hop.cell, first.cell, body, &mut effects)));
            }
            // It goes over the link itself, so it can't be lost.
            let packet = Packet::Relayed {
                source: self.me,
                number: self.number(first.cell, &mut effects),
                below: numbered,
                body: body.clone(),
            };
            effects.push(Effect::Send(first.cell, packet));
        }
        for cell in rest {
            self.send_directly(cell, body.clone(), &mut effects);
        }
        effects
    }

    /// A packet has come over the link from a cell. One from a cell without a link is nothing.
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
                    peer.take(from, number, body, &mut effects);
                }
            }
            Packet::Relayed {
                source,
                number,
                below,
                body,
            } => {
                self.pass_on(source, below, &body, &mut effects);
                if let Some(peer) = self.peers.get_mut(&source) {
                    peer.is_owed |= from != source;
                    peer.take(source, number, body, &mut effects);
                }
            }
            Packet::Heard { heard } => peer.confirmed(heard),
            Packet::Unreached { cells } => self.send_kept(cells, &mut effects),
        }
        effects
    }

    /// A packet of this cell could not be sent, since the link is gone.
    pub fn unsent(&mut self, to: CellId, packet: Packet<M>) -> Effects<M> {
        let mut effects = Vec::new();
        if let Packet::Relayed { source, below, .. } = packet {
            let below = below.into_iter().map(|(hop, _)| hop.cell);
            self.unreached(source, [to].into_iter().chain(below).collect(), &mut effects);
        }
        effects
    }

    /// Whether there must be a [tick](Self::tick).
    pub fn needs_tick(&self) -> bool {
        let mut peers = self.peers.values();
        peers.any(|peer| peer.is_owed || !peer.kept.is_empty())
    }

    /// Some time has passed: about the same in all cells, and much longer than a message takes.
    pub fn tick(&mut self) -> Effects<M> {
        let mut effects = Vec::new();
        let mut late = BTreeSet::new();
        for (cell, peer) in &mut self.peers {
            if peer.is_owed {
                peer.is_owed = false;
                let heard = peer.heard();
                effects.push(Effect::Send(*cell, Packet::Heard { heard }));
            }
            for kept in &mut peer.kept {
                kept.ticks += 1;
                if kept.ticks >= LATE_TICKS {
                    late.extend([kept.relay, *cell]);
                }
            }
        }
        for cell in &late {
            if let Some(peer) = self.peers.get_mut(cell) {
                peer.prompt = false;
            }
        }
        self.send_kept(late, &mut effects);
        effects
    }

    /// The next number for a cell; first there may be room to be made.
    fn number(&mut self, cell: CellId, effects: &mut Effects<M>) -> u64 {
        let is_full = |peer: &Peer<M>| {
            let first = peer.kept.front();
            first.is_some_and(|kept| peer.next - kept.number >= WINDOW)
        };
        if self.peers.get(&cell).is_some_and(is_full) {
            self.send_kept([cell], effects);
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
            peer.kept.push_back(Kept {
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

    /// Sends what is not confirmed over the links, where nothing is lost.
    fn send_kept(&mut self, cells: impl IntoIterator<Item = CellId>, effects: &mut Effects<M>) {
        for cell in cells {
            let Some(peer) = self.peers.get_mut(&cell) else {
                continue;
            };
            for kept in std::mem::take(&mut peer.kept) {
                effects.push(Effect::Send(cell, peer.packet(kept.number, kept.body)));
            }
        }
    }

    fn pass_on(&mut self, source: CellId, below: Vec<(Hop, u64)>, body: &M, effects: &mut Effects<M>) {
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
                body: body.clone(),
            };
            effects.push(Effect::Send(first.0.cell, packet));
        }
        if !unreached.is_empty() {
            self.unreached(source, unreached, effects);
        }
    }

    fn unreached(&mut self, source: CellId, cells: Vec<CellId>, effects: &mut Effects<M>) {
        if source == self.me {
            self.send_kept(cells, effects);
        } else if self.peers.contains_key(&source) {
            effects.push(Effect::Send(source, Packet::Unreached { cells }));
        }
    }
}

impl<M> Peer<M> {
    fn heard(&self) -> u64 {
        self.expected.unwrap_or(0)
    }

    fn packet(&mut self, number: u64, body: M) -> Packet<M> {
        let begins = !self.begun;
        self.begun = true;
        self.is_owed = false;
        Packet::Direct {
            number,
            begins,
            heard: self.heard(),
            body,
        }
    }

    fn confirmed(&mut self, heard: u64) {
        while self.kept.front().is_some_and(|kept| kept.number < heard) {
            self.kept.pop_front();
        }
    }

    fn take(&mut self, from: CellId, number: u64, body: M, effects: &mut Effects<M>) {
        match &mut self.expected {
            Some(expected) if number < *expected => {}
            Some(expected) if number == *expected => {
                effects.push(Effect::Deliver(from, body));
                *expected += 1;
                while let Some(body) = self.early.remove(expected) {
                    effects.push(Effect::Deliver(from, body));
                    *expected += 1;
                }
            }
            _ if (self.early.len() as u64) < WINDOW => _ = self.early.insert(number, body),
            // Its source has it yet.
            _ => {}
        }
    }
}

/// The first cells of a tree, each with what is below it.
fn branches<T>(tree: &[T], hop: impl Fn(&T) -> &Hop) -> Vec<(&T, &[T])> {
    let mut branches = Vec::new();
    let mut left = tree;
    while let Some((first, rest)) = left.split_first() {
        // One that claims more than there is has what there is.
        let (below, others) = rest.split_at(rest.len().min(usize::from(hop(first).below)));
        branches.push((first, below));
        left = others;
    }
    branches
}
