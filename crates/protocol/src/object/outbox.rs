//! The messages of this cell that have not been taken yet.

use std::collections::{BTreeMap, VecDeque};

use super::{Claim, Effect, Members, ObjectId, Packet};
use crate::CellId;

/// To one object.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Outbox<M> {
    /// The number of the first message in `queue`.
    taken: u64,
    queue: VecDeque<M>,
    /// Who had it when somebody last knew.
    owner: Option<CellId>,
    /// The last version of the object that this cell heard of.
    version: u64,
    /// Directories of earlier rounds do not know what became of that version.
    round: u64,
}

/// To all objects.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Outboxes<M>(BTreeMap<ObjectId, Outbox<M>>);

impl<M> Default for Outboxes<M> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<M: Clone> Outboxes<M> {
    /// Takes a message to send: its number.
    pub fn add<S>(
        &mut self,
        object: ObjectId,
        body: M,
        members: &Members,
        effects: &mut Vec<Effect<M, S>>,
    ) -> u64 {
        let outbox = self.0.entry(object).or_insert_with(|| Outbox {
            taken: 0,
            queue: VecDeque::new(),
            owner: None,
            version: 0,
            round: 0,
        });
        let number = outbox.taken + outbox.queue.len() as u64;
        outbox.queue.push_back(body.clone());
        if outbox.owner.is_some() {
            outbox.send(object, number, effects);
        } else {
            outbox.ask(object, members, effects);
        }
        number
    }

    /// Messages below `below` were taken.
    pub fn taken<S>(&mut self, object: ObjectId, below: u64, effects: &mut Vec<Effect<M, S>>) {
        let Some(outbox) = self.0.get_mut(&object) else {
            return;
        };
        while outbox.taken < below && outbox.queue.pop_front().is_some() {
            let number = outbox.taken;
            effects.push(Effect::Done { object, number });
            outbox.taken += 1;
        }
    }

    /// Who had that version has it no longer, but gave it away as `given`, or else the directory of `round` knows.
    pub fn not_here<S>(
        &mut self,
        object: ObjectId,
        version: u64,
        given: Option<Claim>,
        round: u64,
        members: &Members,
        effects: &mut Vec<Effect<M, S>>,
    ) {
        let Some(outbox) = self.0.get_mut(&object) else {
            return;
        };
        if outbox.version != version || outbox.owner.is_none() {
            return;
        }
        outbox.round = outbox.round.max(round);
        outbox.owner = None;
        if let Some(claim) = given {
            outbox.learn(claim, members);
        }
        outbox.send_or_ask(object, members, effects);
    }

    /// The directory answers.
    pub fn found<S>(&mut self, claim: Claim, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        let object = claim.object;
        let Some(outbox) = self.0.get_mut(&object) else {
            return;
        };
        if claim.owner.is_none() {
            let number = outbox.taken;
            self.0.remove(&object);
            effects.push(Effect::Gone { object, number });
        } else if claim.version > outbox.version {
            outbox.learn(claim, members);
            outbox.send_or_ask(object, members, effects);
        }
    }

    /// The members have changed.
    pub fn forget_dead(&mut self, members: &Members) {
        for outbox in self.0.values_mut() {
            outbox.owner = outbox.owner.filter(|owner| members.live.contains(owner));
        }
    }

    /// Sends everything again.
    pub fn again<S>(&self, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        for (object, outbox) in &self.0 {
            if !outbox.queue.is_empty() {
                outbox.send_or_ask(*object, members, effects);
            }
        }
    }
}

impl<M: Clone> Outbox<M> {
    /// A later version was at a cell, which is its owner unless it is dead.
    fn learn(&mut self, claim: Claim, members: &Members) {
        self.version = claim.version;
        self.owner = claim.owner.filter(|owner| members.live.contains(owner));
    }

    fn send_or_ask<S>(&self, object: ObjectId, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        if self.owner.is_some() {
            self.send(object, self.taken, effects);
        } else {
            self.ask(object, members, effects);
        }
    }

    fn ask<S>(&self, object: ObjectId, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        if members.round < self.round {
            // This cell will hear of that round too, and then ask.
            return;
        }
        let packet = Packet::Find {
            object,
            round: members.round,
            above: self.version,
        };
        effects.extend(members.home(object).map(|home| Effect::Send(home, packet)));
    }

    /// Sends the messages from this number on.
    fn send<S>(&self, object: ObjectId, first: u64, effects: &mut Vec<Effect<M, S>>) {
        let Some(owner) = self.owner else {
            return;
        };
        for (number, body) in (self.taken..)
            .zip(&self.queue)
            .filter(|(number, _)| *number >= first)
        {
            let packet = Packet::Message {
                object,
                number,
                version: self.version,
                body: body.clone(),
            };
            effects.push(Effect::Send(owner, packet));
        }
    }
}
