//! Times of the simulated machine.

use policy::cpu::topology::MoveKind;

use crate::Time;

/// Times of the simulated machine, nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// Message between two drivers, one way.
    pub message_ns: Time,
    /// Change of the vCPU that a CPU runs.
    pub switch_ns: Time,
    /// Refill of caches when another vCPU has run on the CPU.
    pub refill_ns: Time,
    /// Move of a vCPU, by kind.
    pub move_ns: [Time; 3],
    /// Refill of caches after a move.
    pub move_refill_ns: Time,
    /// Time from the end of a barrier until a halted vCPU has the interrupt.
    pub wake_ns: Time,
}

impl Costs {
    /// Cellular Disco, sections 4.1 and 4.2: an RPC of 16 us; moves of 37, 520 and 1,520 us, and 8 ms until
    /// the cache is full again. A switch of 10 us, and 200 us of refill after it, are ours.
    pub const PAPER: Self = Self {
        message_ns: 8_000,
        switch_ns: 10_000,
        refill_ns: 200_000,
        move_ns: [37_000, 520_000, 1_520_000],
        move_refill_ns: 8_000_000,
        wake_ns: 0,
    };

    /// A machine of today with one node. Ours: a message and the switch after it take the 24 us that were
    /// measured for a stop (`bench/results/gates.json`); caches that CPUs share keep
    /// refills short; an interrupt wakes a vCPU after as long as a round computes, as in `bench-gangs`, where
    /// rounds that sleep take three times as long.
    pub const PRESENT: Self = Self {
        message_ns: 12_000,
        switch_ns: 3_000,
        refill_ns: 10_000,
        move_ns: [5_000, 20_000, 400_000],
        move_refill_ns: 20_000,
        wake_ns: 100_000,
    };

    /// Cost of a move.
    pub fn of_move(&self, kind: MoveKind) -> Time {
        self.move_ns[kind as usize] + self.move_refill_ns
    }
}
