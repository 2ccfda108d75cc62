//! One cell's part: takes events, gives effects.

use super::directory::Directory;
use super::holdings::{Holdings, OfferError};
use super::outbox::Outboxes;
use super::{Claim, Effect, Members, ObjectId, Packet};
use crate::CellId;

/// The state of one cell.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Node<M, S> {
    me: CellId,
    members: Members,
    holdings: Holdings<S>,
    directory: Directory,
    outboxes: Outboxes<M>,
    /// Members that have this cell's census of this round.
    counted_by: std::collections::BTreeSet<CellId>,
}

impl<M: Clone, S: Clone> Node<M, S> {
    /// A cell without objects, among these members. Rounds count from 1.
    pub fn new(me: CellId, members: Members) -> Self {
        Self {
            me,
            members,
            holdings: Holdings::new(me),
            directory: Directory::default(),
            outboxes: Outboxes::default(),
            counted_by: std::collections::BTreeSet::new(),
        }
    }

    /// Whether the object runs here.
    pub fn runs(&self, object: ObjectId) -> bool {
        self.holdings.runs(object)
    }

    /// Whether the object runs here and the directory knows it.
    pub fn is_noted(&self, object: ObjectId) -> bool {
        self.holdings.is_noted(object, &self.members)
    }

    /// A new object runs here. Its name must never have been used, and is to be told to others only when it
    /// [is noted](Self::is_noted): who asks before hears that there is no such object.
    pub fn create(&mut self, object: ObjectId) -> Vec<Effect<M, S>> {
        self.effects(|node, effects| node.holdings.create(object, &node.members, effects))
    }

    /// The object, which runs here, ends.
    pub fn end(&mut self, object: ObjectId) {
        self.holdings.end(object);
    }

    /// The object, which the caller has stopped and whose state this is, shall move.
    ///
    /// # Errors
    /// If it can't; then it stays and may run on.
    pub fn offer(&mut self, object: ObjectId, to: CellId, state: S) -> Result<Vec<Effect<M, S>>, OfferError> {
        let mut effects = Vec::new();
        self.holdings
            .offer(object, to, state, &self.members, &mut effects)?;
        Ok(effects)
    }

    /// Sends a message to an object, wherever it is: the message's number.
    pub fn send(&mut self, object: ObjectId, body: M) -> (u64, Vec<Effect<M, S>>) {
        let mut effects = Vec::new();
        let number = self.outboxes.add(object, body, &self.members, &mut effects);
        (number, effects)
    }

    /// The members have changed. Changes come in the same order at all cells.
    pub fn members(&mut self, members: Members) -> Vec<Effect<M, S>> {
        self.members = members;
        self.directory = Directory::default();
        self.counted_by.clear();
        self.outboxes.forget_dead(&self.members);
        self.effects(|node, effects| {
            node.holdings.settle(&node.members, effects);
            node.send_census(effects);
        })
    }

    /// Sends again what has had no answer. To be called now and then; how often decides only how long a lost packet delays.
    pub fn again(&mut self) -> Vec<Effect<M, S>> {
        self.effects(|node, effects| {
            node.send_census(effects);
            node.holdings.again(&node.members, effects);
            node.outboxes.again(&node.members, effects);
        })
    }

    /// A packet has come.
    pub fn take(&mut self, from: CellId, packet: Packet<M, S>) -> Vec<Effect<M, S>> {
        if !self.members.live.contains(&from) {
            return Vec::new();
        }
        let now = self.members.round;
        self.effects(|node, effects| match packet {
            Packet::Message {
                object,
                number,
                version,
                body,
            } => {
                let stamp = (from, number, version);
                node.holdings.message(object, stamp, body, effects);
            }
            Packet::Taken { object, below } => node.outboxes.taken(object, below, effects),
            Packet::NotHere {
                object,
                version,
                given,
                round,
            } => {
                let outboxes = &mut node.outboxes;
                outboxes.not_here(object, version, given, round, &node.members, effects);
            }
            Packet::Find { object, round, above } => {
                if round == now
                    && let Some(claim) = node.directory.find(object, above, &node.members)
                {
                    effects.push(Effect::Send(from, Packet::Found(claim)));
                }
            }
            Packet::Found(claim) => node.outboxes.found(claim, &node.members, effects),
            Packet::Claim(round, claim) => {
                if round == now {
                    node.directory.note(claim);
                    effects.push(Effect::Send(from, Packet::Noted(round, claim)));
                }
            }
            Packet::Noted(round, claim) => {
                if round == now {
                    node.holdings.noted(claim, round);
                }
            }
            Packet::Census(round, claims) => {
                if round == now {
                    node.directory.count(from, &claims);
                    effects.push(Effect::Send(from, Packet::CensusNoted(round)));
                }
            }
            Packet::CensusNoted(round) => {
                if round == now {
                    node.counted_by.insert(from);
                }
            }
            Packet::Offer {
                object,
                version,
                taken,
                state,
            } => {
                node.holdings
                    .offered(from, object, version, taken, state, effects);
            }
            Packet::Ready(object, version) => node.holdings.ready(from, object, version, effects),
            Packet::Yours(object, version) => {
                node.holdings.yours(from, object, version, &node.members, effects)
            }
            Packet::Mine(object, version, round) => node.holdings.mine(from, object, version, round),
        })
    }

    /// To each member its part of this cell's claims, but to those who have it.
    fn send_census(&self, effects: &mut Vec<Effect<M, S>>) {
        for home in self.members.live.difference(&self.counted_by) {
            let is_theirs = |claim: &Claim| self.members.home(claim.object) == Some(*home);
            let claims = self.holdings.claims().filter(is_theirs).collect();
            effects.push(Effect::Send(*home, Packet::Census(self.members.round, claims)));
        }
    }

    fn effects(&mut self, act: impl FnOnce(&mut Self, &mut Vec<Effect<M, S>>)) -> Vec<Effect<M, S>> {
        let mut effects = Vec::new();
        act(self, &mut effects);
        effects
    }
}
