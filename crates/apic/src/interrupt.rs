//! Interrupts between interrupt controllers.

use serde::{Deserialize, Serialize};

/// An interrupt in flight: destination, delivery mode and vector.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Interrupt {
    /// Destination, unless a [`Shorthand`] replaces it.
    pub destination: Destination,
    /// Delivery mode.
    pub delivery: Delivery,
    /// The vector of a fixed or lowest-priority one, the page number of a start-up, else without a meaning.
    pub vector: u8,
    /// Whether it is level-triggered: the IOAPIC receives its end of interrupt.
    pub level: bool,
}

/// Destination in x2APIC format. `0xFFFF_FFFF` is the broadcast in both modes (SDM 11.12.9, 11.12.10.1).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Destination {
    /// An APIC id.
    Physical(u32),
    /// A cluster of 16 APIC ids in the upper half, a bit for each of them in the lower.
    Logical(u32),
}

impl Destination {
    /// The broadcast destination.
    pub(crate) const BROADCAST: u32 = u32::MAX;

    /// The destination of an IOAPIC's entry or an MSI, which has 8 bits: physical 0xFF is all vCPUs; a
    /// logical one is a set of the first eight APIC ids, whose cluster is 0.
    pub(crate) fn of_8_bits(destination: u8, is_logical: bool) -> Self {
        match (is_logical, destination) {
            (true, members) => Self::Logical(members.into()),
            (false, 0xFF) => Self::Physical(Self::BROADCAST),
            (false, id) => Self::Physical(id.into()),
        }
    }
}

/// Effect of an interrupt at its destination (SDM 11.6.1, table of delivery modes).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Delivery {
    /// Requests the vector at all destinations.
    Fixed,
    /// Requests the vector at one of the destinations.
    LowestPriority,
    /// System management mode.
    Smi,
    /// Non-maskable interrupt.
    Nmi,
    /// Reset. The vCPU then waits for a start-up.
    Init,
    /// Start at the page `vector`.
    Startup,
    /// An external (8259A) controller supplies the vector.
    External,
}

impl Delivery {
    /// The three bits that name it in commands, entries and messages; `None` if they are reserved in all of
    /// these.
    pub(crate) fn of_bits(bits: u32) -> Option<Self> {
        match bits & 7 {
            0 => Some(Self::Fixed),
            1 => Some(Self::LowestPriority),
            2 => Some(Self::Smi),
            4 => Some(Self::Nmi),
            5 => Some(Self::Init),
            6 => Some(Self::Startup),
            7 => Some(Self::External),
            _ => None,
        }
    }

    /// Whether it requests a vector, whose service ends with an end-of-interrupt write.
    pub(crate) fn has_vector(self) -> bool {
        matches!(self, Self::Fixed | Self::LowestPriority)
    }
}

/// Destinations that need no name (SDM 11.6.1, destination shorthand).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Shorthand {
    /// None: the interrupt's own destination applies.
    None,
    /// The vCPU that sends the interrupt.
    Own,
    /// All vCPUs, including the sender.
    All,
    /// All vCPUs, excluding the sender.
    Others,
}

/// An interrupt that a vCPU sends.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Ipi {
    /// The interrupt in flight, whose destination counts only without a shorthand.
    pub interrupt: Interrupt,
    /// Shorthand that replaces the interrupt's destination.
    pub shorthand: Shorthand,
}
