//! Programs of the guests.

use crate::Time;
use crate::chance::Chance;

/// Program of a VM; each of its vCPUs runs one thread of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    /// Computes forever.
    Busy,
    /// Computes, then all vCPUs meet at a barrier, and so on.
    Barrier {
        /// Mean work of one vCPU between two barriers; single ones differ by a tenth either way.
        work_ns: Time,
        /// Barriers until the program ends.
        rounds: u64,
        /// Time of spinning after which a vCPU halts until the barrier opens, as with paravirtual
        /// spinlocks; it spins without limit when none.
        halt_after_ns: Option<Time>,
    },
    /// Computes and halts in turns, each for up to twice the mean time.
    Bursts {
        /// Mean time of computing.
        busy_ns: Time,
        /// Mean time of halting.
        idle_ns: Time,
    },
    /// Only the first vCPU computes.
    Single,
}

/// Activity of one vCPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Phase {
    /// Computes; this much is left.
    Compute(Time),
    /// Spins at a barrier.
    Spin,
    /// Waits for an interrupt.
    Halt,
}

impl Program {
    /// The first phase of a vCPU.
    pub fn first(&self, index: u16, chance: &mut Chance) -> Phase {
        match self {
            Self::Single if index > 0 => Phase::Halt,
            Self::Busy | Self::Single => Phase::Compute(Time::MAX),
            Self::Barrier { .. } | Self::Bursts { .. } => Phase::Compute(self.work(chance)),
        }
    }

    /// Work of a vCPU until its next phase.
    pub fn work(&self, chance: &mut Chance) -> Time {
        match self {
            Self::Busy | Self::Single => Time::MAX,
            Self::Barrier { work_ns, .. } => work_ns * 9 / 10 + chance.below(work_ns / 5),
            Self::Bursts { busy_ns, .. } => 1 + chance.below(2 * busy_ns),
        }
    }
}
