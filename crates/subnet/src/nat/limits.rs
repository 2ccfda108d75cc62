//! Bounds on the memory and descriptors of a translator. Pure.

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Bytes of both buffers of a connection, by the share of its card's memory that is in use.
const BUFFERS: [usize; 3] = [512 * KIB, 128 * KIB, 32 * KIB];

/// Bounds of a translator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections and exchanges of all cards. Each has one descriptor.
    pub flows: usize,
    /// Connections that the host has not opened yet, of one card.
    pub connecting_per_card: usize,
    /// Exchanges of UDP and ICMP of one card. The one that was idle for longest ends for a new one.
    pub exchanges_per_card: usize,
    /// Bytes of the buffers of one card's connections.
    pub memory_per_card: usize,
    /// Bytes of all buffers.
    pub memory: usize,
}

impl Limits {
    /// Returns the bounds for a process with this limit of descriptors (`RLIMIT_NOFILE`).
    pub fn of_descriptors(descriptors: u64) -> Self {
        // A quarter is left to cards, listeners and the process itself.
        let flows = usize::try_from(descriptors / 4 * 3).unwrap_or(usize::MAX);
        Self {
            flows: flows.clamp(16, 65_536),
            connecting_per_card: 256,
            exchanges_per_card: 1024,
            memory_per_card: 96 * MIB,
            memory: 1024 * MIB,
        }
    }
}

/// Use of the bounded resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Use {
    /// Connections and exchanges.
    pub(super) flows: usize,
    /// Connections that the host has not opened yet.
    pub(super) connecting: usize,
    /// Exchanges of UDP and ICMP.
    pub(super) exchanges: usize,
    /// Bytes of buffers.
    pub(super) memory: usize,
}

impl Use {
    pub(super) fn add(&mut self, other: &Self) {
        self.flows += other.flows;
        self.connecting += other.connecting;
        self.exchanges += other.exchanges;
        self.memory += other.memory;
    }

    pub(super) fn subtract(&mut self, other: &Self) {
        self.flows -= other.flows;
        self.connecting -= other.connecting;
        self.exchanges -= other.exchanges;
        self.memory -= other.memory;
    }
}

impl Limits {
    /// Returns whether a card may have another flow. Once three quarters of all flows are in use, only cards
    /// below an equal share get more.
    fn has_flow(&self, card: &Use, all: &Use, cards: usize) -> bool {
        let is_scarce = all.flows >= self.flows / 4 * 3;
        let share = self.flows / cards.max(1);
        all.flows < self.flows && (!is_scarce || card.flows < share)
    }

    /// Decides on another connection of a card. Its buffers are taken when the host has opened it.
    pub(super) fn admit_connection(&self, card: &Use, all: &Use, cards: usize) -> Admission {
        if card.connecting >= self.connecting_per_card {
            return Admission::Later;
        }
        let has_room = self.has_flow(card, all, cards) && self.buffers(card, all, cards).is_some();
        if has_room {
            Admission::Admitted
        } else {
            Admission::Refused
        }
    }

    /// Decides on another exchange of a card.
    pub(super) fn admit_exchange(&self, card: &Use, all: &Use, cards: usize) -> Admission {
        if card.exchanges >= self.exchanges_per_card {
            return Admission::ReplacesOldest;
        }
        match self.has_flow(card, all, cards) {
            true => Admission::Admitted,
            false if card.exchanges > 0 => Admission::ReplacesOldest,
            false => Admission::Refused,
        }
    }

    /// Returns the bytes of both buffers of a new connection; none if the memory is in use. Buffers shrink as
    /// a card uses its memory, so that its last connections still get some. When most of all memory is in
    /// use, only cards below an equal share get more.
    pub(super) fn buffers(&self, card: &Use, all: &Use, cards: usize) -> Option<usize> {
        let is_scarce = all.memory >= self.memory / 4 * 3;
        let of_card = match is_scarce {
            true => self.memory_per_card.min(self.memory / cards.max(1)),
            false => self.memory_per_card,
        };
        // Halves: the first half for large buffers, then a quarter for medium ones, and one for small ones.
        let bounds = [of_card / 2, of_card / 4 * 3, of_card];
        let fits = |(bytes, bound): &(usize, usize)| {
            card.memory.saturating_add(*bytes) <= *bound && all.memory.saturating_add(*bytes) <= self.memory
        };
        BUFFERS.into_iter().zip(bounds).find(fits).map(|(bytes, _)| bytes)
    }
}

/// Decision on a new flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It is opened.
    Admitted,
    /// It is opened, and the card's exchange that was idle for longest ends.
    ReplacesOldest,
    /// It is not opened now: the guest repeats its request.
    Later,
    /// It is not opened.
    Refused,
}

#[cfg(test)]
mod tests;
