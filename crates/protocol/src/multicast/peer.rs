//! The link to one cell: numbers of messages both ways, and the messages that are kept for them.

use std::collections::{BTreeMap, VecDeque};

use super::gather::ReplyPath;
use super::{Effect, Effects, Packet, WINDOW};
use crate::CellId;

/// An unacknowledged message that was sent by a relay.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Unacked<M> {
    pub(super) number: u64,
    pub(super) relay: CellId,
    /// Ticks since it was sent.
    pub(super) ticks: u8,
    pub(super) body: M,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Peer<M> {
    /// Next sequence number to the peer.
    pub(super) next: u64,
    /// Whether the peer supports packets of replies.
    pub(super) gathers: bool,
    /// Whether anything was sent over the link.
    pub(super) begun: bool,
    /// Unacknowledged messages, in order.
    pub(super) unacked: VecDeque<Unacked<M>>,
    /// Whether the peer has sent anything since the link was made and since it was last late.
    pub(super) prompt: bool,
    /// Next sequence number from the peer; `None` before its first message.
    pub(super) expected: Option<u64>,
    pub(super) early: BTreeMap<u64, (M, Option<ReplyPath>)>,
    /// Whether the peer keeps messages for this cell until it receives an acknowledgement.
    pub(super) owes_ack: bool,
}

impl<M> Peer<M> {
    /// Returns the state of a new link; `next` is above all numbers of earlier links.
    pub(super) fn new(next: u64, gathers: bool) -> Self {
        Self {
            next,
            gathers,
            begun: false,
            unacked: VecDeque::new(),
            prompt: false,
            expected: None,
            early: BTreeMap::new(),
            owes_ack: false,
        }
    }

    pub(super) fn heard(&self) -> u64 {
        self.expected.unwrap_or(0)
    }

    pub(super) fn packet(&mut self, number: u64, body: M) -> Packet<M> {
        let begins = !self.begun;
        self.begun = true;
        self.owes_ack = false;
        Packet::Direct {
            number,
            begins,
            heard: self.heard(),
            body,
        }
    }

    pub(super) fn confirmed(&mut self, heard: u64) {
        while self.unacked.front().is_some_and(|unacked| unacked.number < heard) {
            self.unacked.pop_front();
        }
    }

    /// Takes a message, and those that it makes the next ones. Returns whether it will be delivered.
    pub(super) fn take(
        &mut self,
        from: CellId,
        number: u64,
        body: M,
        path: Option<ReplyPath>,
        effects: &mut Effects<M>,
    ) -> bool {
        match &mut self.expected {
            Some(expected) if number < *expected => false,
            Some(expected) if number == *expected => {
                effects.push(Effect::Deliver(from, body, path));
                *expected = expected.saturating_add(1);
                while let Some((body, path)) = self.early.remove(expected) {
                    effects.push(Effect::Deliver(from, body, path));
                    *expected = expected.saturating_add(1);
                }
                true
            }
            _ if (self.early.len() as u64) < WINDOW => {
                self.early.insert(number, (body, path));
                true
            }
            // The source still keeps it.
            _ => false,
        }
    }
}
