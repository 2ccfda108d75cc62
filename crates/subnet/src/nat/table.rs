//! The table of flows: by number, by addresses, by card, and by the time of their timers. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::CardId;
use super::limits::Use;

/// Exactness of the order in which idle exchanges end.
const IDLE_STEP: Duration = Duration::from_secs(1);

/// Number of a flow or a forwarded port, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FlowId(pub(super) u64);

/// Protocol of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Transport {
    /// A TCP connection.
    Tcp,
    /// UDP datagrams between two ports.
    Udp,
    /// Echoes of one identifier.
    Echo,
}

/// Addresses of a flow, as its guest sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FlowKey {
    /// The guest's card.
    pub(super) card: CardId,
    /// Protocol of both ports.
    pub(super) transport: Transport,
    /// Address and port of the guest.
    pub(super) guest: SocketAddr,
    /// Address and port of its peer.
    pub(super) remote: SocketAddr,
}

/// A flow with its place in the table.
#[derive(Debug)]
struct Entry<T> {
    key: FlowKey,
    value: T,
    /// Its share of the bounded resources.
    used: Use,
    /// Its timer.
    timer: Option<Instant>,
    /// Time of its last packet, of an exchange, to [`IDLE_STEP`].
    active: Instant,
}

/// Flows of one card.
#[derive(Debug, Default)]
struct CardFlows {
    used: Use,
    flows: HashSet<FlowId>,
    /// Exchanges by the time of their last packet.
    exchanges: BTreeSet<(Instant, FlowId)>,
}

/// A table of flows.
#[derive(Debug)]
pub(super) struct Table<T> {
    flows: HashMap<FlowId, Entry<T>>,
    ids: HashMap<FlowKey, FlowId>,
    cards: HashMap<CardId, CardFlows>,
    timers: BTreeSet<(Instant, FlowId)>,
    used: Use,
    next: u64,
}

impl<T> Table<T> {
    pub(super) fn new() -> Self {
        Self {
            flows: HashMap::new(),
            ids: HashMap::new(),
            cards: HashMap::new(),
            timers: BTreeSet::new(),
            used: Use::default(),
            next: 0,
        }
    }

    /// Returns a number that no flow has had.
    pub(super) fn next_id(&mut self) -> FlowId {
        self.next += 1;
        FlowId(self.next)
    }

    /// Returns what a card uses, and what all cards use.
    pub(super) fn used(&self, card: CardId) -> (Use, Use) {
        let of_card = self.cards.get(&card).map(|card| card.used);
        (of_card.unwrap_or_default(), self.used)
    }

    /// Adds a flow. No flow may have its key or number.
    pub(super) fn insert(&mut self, id: FlowId, key: FlowKey, used: Use, value: T, now: Instant) {
        let card = self.cards.entry(key.card).or_default();
        card.used.add(&used);
        self.used.add(&used);
        card.flows.insert(id);
        if used.exchanges > 0 {
            card.exchanges.insert((now, id));
        }
        self.ids.insert(key, id);
        let entry = Entry {
            key,
            value,
            used,
            timer: None,
            active: now,
        };
        self.flows.insert(id, entry);
    }

    /// Removes a flow.
    pub(super) fn remove(&mut self, id: FlowId) -> Option<(FlowKey, T)> {
        let entry = self.flows.remove(&id)?;
        self.ids.remove(&entry.key);
        if let Some(timer) = entry.timer {
            self.timers.remove(&(timer, id));
        }
        self.used.subtract(&entry.used);
        if let Some(card) = self.cards.get_mut(&entry.key.card) {
            card.used.subtract(&entry.used);
            card.flows.remove(&id);
            card.exchanges.remove(&(entry.active, id));
            if card.flows.is_empty() {
                self.cards.remove(&entry.key.card);
            }
        }
        Some((entry.key, entry.value))
    }

    pub(super) fn find(&self, key: &FlowKey) -> Option<FlowId> {
        self.ids.get(key).copied()
    }

    pub(super) fn get_mut(&mut self, id: FlowId) -> Option<(FlowKey, &mut T)> {
        self.flows.get_mut(&id).map(|entry| (entry.key, &mut entry.value))
    }

    /// Returns the numbers of a card's flows.
    pub(super) fn of_card(&self, card: CardId) -> Vec<FlowId> {
        let card = self.cards.get(&card);
        card.map_or_else(Vec::new, |card| card.flows.iter().copied().collect())
    }

    /// Returns the numbers and addresses of all flows.
    pub(super) fn keys(&self) -> impl Iterator<Item = (FlowId, &FlowKey)> {
        self.ids.iter().map(|(key, id)| (*id, key))
    }

    /// Records a packet of an exchange.
    pub(super) fn touch(&mut self, id: FlowId, now: Instant) {
        let Some(entry) = self.flows.get_mut(&id) else {
            return;
        };
        if now.saturating_duration_since(entry.active) < IDLE_STEP {
            return;
        }
        if let Some(card) = self.cards.get_mut(&entry.key.card)
            && card.exchanges.remove(&(entry.active, id))
        {
            card.exchanges.insert((now, id));
        }
        entry.active = now;
    }

    /// Returns the time of an exchange's last packet, to [`IDLE_STEP`].
    pub(super) fn active(&self, id: FlowId) -> Option<Instant> {
        self.flows.get(&id).map(|entry| entry.active)
    }

    /// Returns the card's exchange that was idle for longest.
    pub(super) fn oldest_exchange(&self, card: CardId) -> Option<FlowId> {
        let exchanges = &self.cards.get(&card)?.exchanges;
        exchanges.first().map(|(_, id)| *id)
    }

    /// Sets a flow's timer. One that is set for an earlier time stays and fires early: a flow that moves its
    /// timer with each packet costs little.
    pub(super) fn set_timer(&mut self, id: FlowId, at: Instant) {
        let Some(entry) = self.flows.get_mut(&id) else {
            return;
        };
        if let Some(timer) = entry.timer {
            if timer <= at {
                return;
            }
            self.timers.remove(&(timer, id));
        }
        entry.timer = Some(at);
        self.timers.insert((at, id));
    }

    /// Takes the next timer that has expired.
    pub(super) fn expired(&mut self, now: Instant) -> Option<FlowId> {
        let (at, id) = *self.timers.first()?;
        if at > now {
            return None;
        }
        self.timers.remove(&(at, id));
        if let Some(entry) = self.flows.get_mut(&id) {
            entry.timer = None;
        }
        Some(id)
    }

    /// Returns the time of the next timer.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests;
