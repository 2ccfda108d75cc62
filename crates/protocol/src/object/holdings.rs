//! The objects that this cell has, is being offered, or gave away.

use std::collections::BTreeMap;

use super::{Claim, Effect, Members, ObjectId, Packet, Taken};
use crate::CellId;

/// An object here.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Held<S> {
    version: u64,
    taken: Taken,
    role: Role<S>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum Role<S> {
    /// It runs here. The directory has noted that in this round of the members.
    Owner { noted: u64 },
    /// It is offered to a cell, as this version, and does not run.
    Offered { to: CellId, version: u64, state: S },
    /// A cell offers it. It does not run here.
    Arriving { from: CellId, state: S },
}

/// What is to become of an object whose cell gave it away.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Given {
    version: u64,
    to: CellId,
}

/// Why an object can't be offered.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum OfferError {
    /// It does not run here.
    #[error("the object is not here, or on its way")]
    NotHere,
    /// That cell is this one, or dead.
    #[error("there is no such other cell")]
    NoCell,
    /// The directory has not yet noted that it is here. Try again soon.
    #[error("the object has only just come")]
    NotNoted,
}

/// All of them.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Holdings<S> {
    me: CellId,
    held: BTreeMap<ObjectId, Held<S>>,
    given: BTreeMap<ObjectId, Given>,
    /// The highest version of each object that has been here.
    seen: BTreeMap<ObjectId, u64>,
    /// The latest round of which this cell has heard: what it has forgotten about its gifts, the directory knew then.
    round: u64,
}

impl<S: Clone> Holdings<S> {
    pub fn new(me: CellId) -> Self {
        Self {
            me,
            held: BTreeMap::new(),
            given: BTreeMap::new(),
            seen: BTreeMap::new(),
            round: 0,
        }
    }

    /// Whether the object runs here.
    pub fn runs(&self, object: ObjectId) -> bool {
        matches!(
            self.held.get(&object),
            Some(Held {
                role: Role::Owner { .. },
                ..
            })
        )
    }

    /// Whether the directory of this round knows that the object runs here.
    pub fn is_noted(&self, object: ObjectId, members: &Members) -> bool {
        let held = self.held.get(&object);
        held.is_some_and(|held| matches!(held.role, Role::Owner { noted } if noted == members.round))
    }

    /// A new object, here.
    pub fn create<M>(&mut self, object: ObjectId, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        self.own(object, 1, Taken::new(), members, effects);
    }

    /// The object ends, here. Nobody need be told: who asks hears that it is not here, and from the directory then that
    /// there is no later version.
    pub fn end(&mut self, object: ObjectId) {
        if self.runs(object) {
            self.held.remove(&object);
        }
    }

    /// Offers the object, which the caller has stopped, to another cell.
    pub fn offer<M>(
        &mut self,
        object: ObjectId,
        to: CellId,
        state: S,
        members: &Members,
        effects: &mut Vec<Effect<M, S>>,
    ) -> Result<(), OfferError> {
        let held = self.held.get_mut(&object).ok_or(OfferError::NotHere)?;
        let Role::Owner { noted } = held.role else {
            return Err(OfferError::NotHere);
        };
        if to == self.me || !members.live.contains(&to) {
            return Err(OfferError::NoCell);
        }
        // Otherwise there could be a moment when no census has it (rule 5).
        if noted != members.round {
            return Err(OfferError::NotNoted);
        }
        let version = held.version + 1;
        held.role = Role::Offered { to, version, state };
        held.send_offer(object, effects);
        Ok(())
    }

    /// A message has come for the object, with its sender, number, and the version that the sender knows of.
    pub fn message<M>(
        &mut self,
        object: ObjectId,
        (from, number, version): (CellId, u64, u64),
        body: M,
        effects: &mut Vec<Effect<M, S>>,
    ) {
        let Some(held) = self.held.get_mut(&object) else {
            effects.push(Effect::Send(from, self.not_here(object, version)));
            return;
        };
        match held.role {
            Role::Owner { .. } => {
                let taken = held.taken.entry(from).or_default();
                if number == *taken {
                    *taken += 1;
                    effects.push(Effect::Deliver { object, from, body });
                }
                let below = *taken;
                effects.push(Effect::Send(from, Packet::Taken { object, below }));
            }
            // It will come again, to whoever has the object then.
            Role::Offered { .. } | Role::Arriving { .. } => {}
        }
    }

    fn not_here<M>(&self, object: ObjectId, version: u64) -> Packet<M, S> {
        let given = self.given.get(&object);
        Packet::NotHere {
            object,
            version,
            given: given.map(|given| given.claim(object)),
            round: self.round,
        }
    }

    /// An offer has come.
    pub fn offered<M>(
        &mut self,
        from: CellId,
        object: ObjectId,
        version: u64,
        taken: Taken,
        state: S,
        effects: &mut Vec<Effect<M, S>>,
    ) {
        let seen = self.seen.entry(object).or_default();
        if version > *seen {
            *seen = version;
            self.given.remove(&object);
            self.held.insert(
                object,
                Held {
                    version,
                    taken,
                    role: Role::Arriving { from, state },
                },
            );
        }
        if let Some(Held {
            role: Role::Arriving { from: known, .. },
            version: held,
            ..
        }) = self.held.get(&object)
            && (*known, *held) == (from, version)
        {
            effects.push(Effect::Send(from, Packet::Ready(object, version)));
        }
    }

    /// The other side has the offer: from now on it is theirs.
    pub fn ready<M>(
        &mut self,
        from: CellId,
        object: ObjectId,
        version: u64,
        effects: &mut Vec<Effect<M, S>>,
    ) {
        if let Some(Held {
            role: Role::Offered {
                to, version: offered, ..
            },
            ..
        }) = self.held.get(&object)
            && (*to, *offered) == (from, version)
        {
            self.held.remove(&object);
            self.given.insert(object, Given { version, to: from });
            effects.push(Effect::Release(object));
            effects.push(Effect::Send(from, Packet::Yours(object, version)));
        }
    }

    /// The owner before has given it away.
    pub fn yours<M>(
        &mut self,
        from: CellId,
        object: ObjectId,
        version: u64,
        members: &Members,
        effects: &mut Vec<Effect<M, S>>,
    ) {
        match self.held.get(&object) {
            Some(held) if held.version == version && matches!(held.role, Role::Arriving { .. }) => {
                self.activate(object, members, effects);
            }
            // Until the directory has noted it, the one before must remember.
            Some(Held {
                role: Role::Owner { noted },
                version: held,
                ..
            }) if *held == version && *noted != members.round => {}
            _ if self.seen.get(&object).is_some_and(|seen| *seen >= version) => {
                effects.push(Effect::Send(from, Packet::Mine(object, version, members.round)));
            }
            _ => {}
        }
    }

    /// The new owner needs nobody to remember.
    pub fn mine(&mut self, from: CellId, object: ObjectId, version: u64, round: u64) {
        self.round = self.round.max(round);
        if self.given.get(&object) == Some(&Given { version, to: from }) {
            self.given.remove(&object);
        }
    }

    /// The directory has noted a claim.
    pub fn noted(&mut self, claim: Claim, round: u64) {
        let Some(held) = self.held.get_mut(&claim.object) else {
            return;
        };
        if held.version != claim.version {
            return;
        }
        if let Role::Owner { noted } = &mut held.role {
            *noted = round;
        }
    }

    /// Every claim that this cell can make.
    pub fn claims(&self) -> impl Iterator<Item = Claim> + '_ {
        let held = self.held.iter().map(|(object, held)| Claim {
            object: *object,
            version: held.version,
            owner: Some(self.me),
        });
        held.chain(self.given.iter().map(|(object, given)| given.claim(*object)))
    }

    /// The members have changed: what was between this cell and a dead one is settled.
    pub fn settle<M>(&mut self, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        self.round = self.round.max(members.round);
        let is_dead = |cell: &CellId| !members.live.contains(cell);
        self.given.retain(|_, given| !is_dead(&given.to));
        let mut inherited = Vec::new();
        for (object, held) in &mut self.held {
            held.taken.retain(|sender, _| !is_dead(sender));
            match &held.role {
                Role::Offered { to, version, .. } if is_dead(to) => {
                    held.version = *version + 1;
                    held.role = Role::Owner { noted: 0 };
                    self.seen.insert(*object, held.version);
                    effects.push(Effect::Resume(*object));
                }
                Role::Arriving { from, .. } if is_dead(from) => inherited.push(*object),
                _ => {}
            }
        }
        for object in inherited {
            self.activate(object, members, effects);
        }
    }

    /// Sends everything again that has had no answer.
    pub fn again<M>(&self, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        for (object, held) in &self.held {
            match &held.role {
                Role::Owner { noted } if *noted == members.round => {}
                Role::Owner { .. } => self.claim(*object, members, effects),
                Role::Offered { .. } => held.send_offer(*object, effects),
                Role::Arriving { from, .. } => {
                    effects.push(Effect::Send(*from, Packet::Ready(*object, held.version)));
                }
            }
        }
        for (object, given) in &self.given {
            effects.push(Effect::Send(given.to, Packet::Yours(*object, given.version)));
        }
    }

    fn activate<M>(&mut self, object: ObjectId, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        if let Some(Held {
            version,
            taken,
            role: Role::Arriving { state, .. },
        }) = self.held.remove(&object)
        {
            effects.push(Effect::Activate { object, state });
            self.own(object, version, taken, members, effects);
        }
    }

    fn own<M>(
        &mut self,
        object: ObjectId,
        version: u64,
        taken: Taken,
        members: &Members,
        effects: &mut Vec<Effect<M, S>>,
    ) {
        let role = Role::Owner { noted: 0 };
        self.seen.insert(object, version);
        self.held.insert(object, Held { version, taken, role });
        self.claim(object, members, effects);
    }

    fn claim<M>(&self, object: ObjectId, members: &Members, effects: &mut Vec<Effect<M, S>>) {
        let claim = self.claims().find(|claim| claim.object == object);
        if let (Some(claim), Some(home)) = (claim, members.home(object)) {
            effects.push(Effect::Send(home, Packet::Claim(members.round, claim)));
        }
    }
}

impl Given {
    fn claim(&self, object: ObjectId) -> Claim {
        Claim {
            object,
            version: self.version,
            owner: Some(self.to),
        }
    }
}

impl<S: Clone> Held<S> {
    fn send_offer<M>(&self, object: ObjectId, effects: &mut Vec<Effect<M, S>>) {
        if let Role::Offered { to, version, state } = &self.role {
            let packet = Packet::Offer {
                object,
                version: *version,
                taken: self.taken.clone(),
                state: state.clone(),
            };
            effects.push(Effect::Send(*to, packet));
        }
    }
}
