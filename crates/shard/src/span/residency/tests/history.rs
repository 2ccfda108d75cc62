//! What was sent to the vCPU and ordered, and what came of it.

use crate::span::startup::Startup;
use crate::span::vcpu_migration::Outcome;

/// In place of registers and interrupt controller: what the vCPU has received.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct FakeVcpuState {
    /// Sorted: the order of interrupts does not count.
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

/// Of the whole world.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct History {
    /// All that was sent: each vector once; start-ups in the order in which the home numbered them.
    pub sent: FakeVcpuState,
    /// Moves that were ordered, those that the vCPU began, and what the home heard of them.
    pub orders: u64,
    pub begun: u64,
    pub outcomes: Vec<Outcome>,
    /// Orders in whose place a later one came before they were looked at.
    pub merged: u64,
}

impl History {
    /// Moves of which the home heard how they came out.
    pub fn reported(&self) -> u64 {
        self.outcomes.len() as u64
    }

    /// What must never be, if it is.
    pub fn fault(&self, state: &FakeVcpuState) -> Option<&'static str> {
        let mut sent = self.sent.startups.iter();
        let mut numbers: Vec<u64> = self.outcomes.iter().map(|outcome| outcome.order).collect();
        numbers.sort_unstable();
        first(&[
            (
                state.vectors.windows(2).any(|two| two[0] == two[1]) || state.nmis > self.sent.nmis,
                "something came twice",
            ),
            (
                !state.startups.iter().all(|taken| sent.any(|sent| sent == taken)),
                "start-ups came out of order",
            ),
            (
                self.reported() > self.begun || numbers.windows(2).any(|two| two[0] == two[1]),
                "a move came out twice",
            ),
            (
                numbers.iter().any(|number| !(1..=self.orders).contains(number)),
                "a move came out that nobody ordered",
            ),
        ])
    }

    /// What must not be when nothing happens any more. The vCPU has moved `version` times.
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
            (self.reported() != self.begun, "the home did not hear of a move"),
            (self.orders != self.begun + self.merged, "an order is lost"),
            (
                last.is_some_and(|last| last != version),
                "the home did not hear of the last move",
            ),
        ])
    }
}

fn first(faults: &[(bool, &'static str)]) -> Option<&'static str> {
    faults.iter().find(|(is, _)| *is).map(|(_, what)| *what)
}
