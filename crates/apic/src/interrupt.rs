//! What travels between interrupt controllers.

use serde::{Deserialize, Serialize};

/// An interrupt on its way: to whom, how, and which.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Interrupt {
    /// To whom, unless a [`Shorthand`] says that.
    pub destination: Destination,
    /// What it does there.
    pub delivery: Delivery,
    /// The vector of a fixed or lowest-priority one, the page number of a start-up, else without a meaning.
    pub vector: u8,
    /// Level-triggered: the IOAPIC is to be told of the end of its service.
    pub level: bool,
}

/// Whom an interrupt names, in x2APIC format; `0xFFFF_FFFF` in either names everybody (SDM 11.12.9, 11.12.10.1).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Destination {
    /// An APIC id.
    Physical(u32),
    /// A cluster of 16 APIC ids in the upper half, a bit for each of them in the lower.
    Logical(u32),
}

impl Destination {
    /// Everybody.
    pub(crate) const BROADCAST: u32 = u32::MAX;

    /// The destination of an IOAPIC's entry or an MSI, which has 8 bits: physical 0xFF is everybody; a logical one is a set
    /// of the first eight APIC ids, whose cluster is 0.
    pub(crate) fn of_8_bits(destination: u8, is_logical: bool) -> Self {
        match (is_logical, destination) {
            (true, members) => Self::Logical(members.into()),
            (false, 0xFF) => Self::Physical(Self::BROADCAST),
            (false, id) => Self::Physical(id.into()),
        }
    }
}

/// What an interrupt does where it arrives (SDM 11.6.1, table of delivery modes).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Delivery {
    /// Its vector is requested of all destinations.
    Fixed,
    /// Its vector is requested of one of the destinations.
    LowestPriority,
    /// System management mode.
    Smi,
    /// Non-maskable interrupt.
    Nmi,
    /// Reset; waits for a start-up then.
    Init,
    /// Start at the page `vector`.
    Startup,
    /// The vector is an external (8259A) controller's to tell.
    External,
}

impl Delivery {
    /// The three bits that name it in commands, entries and messages; `None` if they are reserved in all of these.
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

    /// Does it request a vector, which the local APIC then has to be told the end of?
    pub(crate) fn has_vector(self) -> bool {
        matches!(self, Self::Fixed | Self::LowestPriority)
    }
}

/// Destinations that need no name (SDM 11.6.1, destination shorthand).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Shorthand {
    /// The interrupt's own destination counts.
    None,
    /// The sender.
    Own,
    /// Everybody, the sender too.
    All,
    /// Everybody but the sender.
    Others,
}

/// An interrupt that a vCPU sends.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Ipi {
    /// What is sent.
    pub interrupt: Interrupt,
    /// To whom, if not to the interrupt's destination.
    pub shorthand: Shorthand,
}
