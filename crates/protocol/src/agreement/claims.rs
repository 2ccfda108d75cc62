//! Claims on new keys: the votes that a cell collects for its own, and gives to those of others.

use super::replies::Replies;
use super::{CellNumber, Effect, Effects, Message, Node};

/// A claim of this cell whose outcome is pending.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Claim<K, V> {
    pub(super) key: K,
    pub(super) value: V,
    /// Missing votes. Complete before the claim begins: this cell lacks a hello of some link.
    pub(super) votes: Replies,
    pub(super) begun: bool,
    /// Winner of the key, if this claim has lost. The claim settles with the last vote, so that no vote
    /// arrives later.
    pub(super) lost_to: Option<CellNumber>,
}

impl<K: Clone + Ord, V: Clone + PartialEq> Node<K, V> {
    /// Claims a key. Returns the claim's number, with which [`Effect::Won`] or [`Effect::Lost`] reports the
    /// outcome.
    pub fn claim(&mut self, key: K, value: V) -> (u64, Effects<K, V>) {
        let number = self.claim_next;
        self.claim_next += 1;
        let mut effects = Vec::new();
        if let Some(to) = self.refusal(&key) {
            effects.push(Effect::Lost { claim: number, to });
            return (number, effects);
        }
        let claim = Claim {
            key,
            value,
            votes: Replies::default(),
            begun: false,
            lost_to: None,
        };
        self.claims.insert(number, claim);
        self.go_on(&mut effects);
        (number, effects)
    }

    /// Returns the cell against which a claim of this cell would lose now.
    fn refusal(&self, key: &K) -> Option<CellNumber> {
        if let Some(owner) = self.owner(key) {
            return Some(owner);
        }
        if self.claims.values().any(|claim| claim.key == *key) {
            return Some(self.me.number);
        }
        // Its claimer may still lose, but so may this claim.
        self.promised.get(key).map(|claim| claim.cell.number)
    }

    /// Begins the claims that wait: sends their requests to all linked cells.
    pub(super) fn begin(&mut self, effects: &mut Effects<K, V>) {
        let mut claims = std::mem::take(&mut self.claims);
        for (number, claim) in &mut claims {
            if claim.begun {
                continue;
            }
            claim.begun = true;
            // Another cell may have turned out to own the key before the claim began.
            claim.lost_to = self.owner(&claim.key);
            if claim.lost_to.is_some() {
                continue;
            }
            claim.votes = Replies::of(self.links.keys().copied());
            let (claim, key) = (*number, claim.key.clone());
            effects.push(Effect::Tell(Message::Ask { claim, key }));
        }
        self.claims = claims;
    }

    /// Votes on the claims of others for which nothing has to be awaited any longer.
    pub(super) fn vote(&mut self, effects: &mut Effects<K, V>) {
        // Votes follow the order of claims, so that the lowest waiting claim gets the vote.
        for (asked, (key, path)) in self.deferred.clone() {
            let against = if let Some(owner) = self.owner(&key) {
                Some(owner)
            } else if let Some(promised) = self.promised.get(&key) {
                // A dead cell settles no claim.
                if asked < *promised && self.links.contains_key(&promised.cell) {
                    continue;
                }
                Some(promised.cell.number)
            } else {
                // A lower-numbered claimer votes against this cell's own claim.
                let own = self.claims.values().any(|claim| claim.key == key);
                (own && self.me < asked.cell).then_some(self.me.number)
            };
            self.deferred.remove(&asked);
            if against.is_none() {
                self.promised.insert(key, asked);
            }
            self.votes.insert(asked, against);
            let claim = asked.number;
            effects.push(Effect::Reply {
                to: asked.cell,
                message: Message::Vote { claim, against },
                path,
                at_once: against.is_some(),
            });
        }
    }

    /// Settles the claims of this cell that have all votes.
    pub(super) fn settle(&mut self, effects: &mut Effects<K, V>) {
        let is_decided = |claim: &Claim<K, V>| claim.begun && claim.votes.are_complete();
        let decided = self.claims.iter().filter(|(_, claim)| is_decided(claim));
        for number in decided.map(|(number, _)| *number).collect::<Vec<_>>() {
            let Some(Claim {
                key, value, lost_to, ..
            }) = self.claims.remove(&number)
            else {
                continue;
            };
            // A cell that died before it voted may have turned out to own the key.
            let lost_to = lost_to.or_else(|| self.owner(&key).filter(|owner| *owner != self.me.number));
            let value = if lost_to.is_none() { Some(value) } else { None };
            effects.push(Effect::Tell(Message::Settle {
                claim: number,
                key: key.clone(),
                value: value.clone(),
            }));
            match lost_to {
                Some(to) => effects.push(Effect::Lost { claim: number, to }),
                None => {
                    self.put(self.me.number, &key, value);
                    effects.push(Effect::Won(number));
                }
            }
        }
    }
}
