//! History of the events and orders sent to the vCPU, with their outcomes.

use crate::span::startup::Startup;
use crate::span::vcpu_migration::Outcome;

/// Events that the vCPU has received, in place of its registers and local APIC.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct FakeVcpuState {
    /// Received vectors, sorted: the order of interrupts does not matter.
    pub vectors: Vec<u8>,
    pub nmis: u8,
    pub startups: Vec<Startup>,
}

impl FakeVcpuState {
    pub fn accept(&mut self, vector: u8) {
        self.vectors.push(vector);
        self.vectors.sort_unstable();
    }
}

/// History of one model.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct History {
    /// All events sent: each vector once; start-ups in the order in which the home numbered them.
    pub sent: FakeVcpuState,
    /// Number of moves ordered and begun, and the outcomes that the home received.
    pub orders: u64,
    pub begun: u64,
    pub outcomes: Vec<Outcome>,
    /// Orders that a later one replaced before the vCPU served them.
    pub merged: u64,
}

impl History {
    /// Returns the number of moves whose outcome the home has received.
    pub fn reported(&self) -> u64 {
        self.outcomes.len() as u64
    }

    /// Returns a violated invariant, if any.
    pub fn fault(&self, state: &FakeVcpuState) -> Option<&'static str> {
        let mut sent = self.sent.startups.iter();
        let mut numbers: Vec<u64> = self.outcomes.iter().map(|outcome| outcome.order).collect();
        numbers.sort_unstable();
        first(&[
            (
                state.vectors.windows(2).any(|two| two[0] == two[1]) || state.nmis > self.sent.nmis,
                "an event was received twice",
            ),
            (
                !state.startups.iter().all(|taken| sent.any(|sent| sent == taken)),
                "start-ups were taken out of order",
            ),
            (
                self.reported() > self.begun || numbers.windows(2).any(|two| two[0] == two[1]),
                "a move has two outcomes",
            ),
            (
                numbers.iter().any(|number| !(1..=self.orders).contains(number)),
                "a move has an outcome without an order",
            ),
        ])
    }

    /// Returns a violated invariant of a model at rest, if any. The vCPU has moved `version` times.
    pub fn fault_at_rest(&self, state: &FakeVcpuState, version: u64) -> Option<&'static str> {
        let sent = &self.sent;
        let is_init = |startup: &Startup| matches!(startup, Startup::Init { .. });
        let from = sent.startups.iter().rposition(is_init).unwrap_or(0);
        let last = self.outcomes.iter().map(|outcome| outcome.version).max();
        first(&[
            (state.vectors != sent.vectors, "an interrupt is lost"),
            (state.nmis != sent.nmis, "an NMI is lost"),
            (
                !state.startups.ends_with(&sent.startups[from..]),
                "a start-up is lost",
            ),
            (
                self.reported() != self.begun,
                "the home did not receive the outcome of a move",
            ),
            (self.orders != self.begun + self.merged, "an order is lost"),
            (
                last.is_some_and(|last| last != version),
                "the home did not receive the outcome of the last move",
            ),
        ])
    }
}

fn first(faults: &[(bool, &'static str)]) -> Option<&'static str> {
    faults.iter().find(|(is, _)| *is).map(|(_, what)| *what)
}
