//! What shards of one VM say to one another.

use dsm::Batches;
use serde::{Deserialize, Serialize};

use super::startup::Startup;
use super::vcpu_migration::{MigratingVcpu, MoveOrder, Outcome, VcpuState};

/// An address space in which devices are.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Space {
    /// I/O ports.
    Ports,
    /// Memory.
    Memory,
}

/// One access of a vCPU to a device, 8 bytes at most.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Access {
    /// Where.
    pub space: Space,
    /// The port or the address.
    pub address: u64,
    /// Bytes: 1 to 8.
    pub size: u8,
    /// What is written; none for a read.
    pub value: Option<u64>,
}

/// A message. `S` is what travels of a vCPU.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Packet<S = VcpuState> {
    /// An interrupt for a vCPU.
    Interrupt {
        /// Whose.
        vcpu: u8,
        /// Its vector.
        vector: u8,
        /// Level-triggered.
        level: bool,
    },
    /// A non-maskable interrupt for a vCPU.
    Nmi {
        /// Whose.
        vcpu: u8,
    },
    /// INIT or start-up for a vCPU, for the home to number.
    Startup {
        /// Whose.
        vcpu: u8,
        /// Which.
        startup: Startup,
    },
    /// The same, numbered.
    Numbered {
        /// Whose.
        vcpu: u8,
        /// Its number.
        number: u64,
        /// Which.
        startup: Startup,
    },
    /// A vCPU has enabled or disabled its interrupt controller.
    Enabled {
        /// Which vCPU.
        vcpu: u8,
        /// Its moves so far: it is in the sender's shard.
        version: u64,
        /// Enabled.
        is_enabled: bool,
    },
    /// A level-triggered interrupt has been served: for the home's IOAPIC.
    EndOfInterrupt {
        /// Its vector.
        vector: u8,
    },
    /// A vCPU accesses a device; it waits for [`Packet::Answer`]. For the home.
    Access {
        /// Which vCPU.
        vcpu: u8,
        /// What.
        access: Access,
    },
    /// A vCPU rings a doorbell, and waits for nothing. For the home.
    Doorbell {
        /// What it writes.
        access: Access,
    },
    /// The answer to an access.
    Answer {
        /// Whose.
        vcpu: u8,
        /// What was read.
        value: u64,
    },
    /// A vCPU has obeyed the INIT of another.
    Obeyed {
        /// Who waits.
        vcpu: u8,
        /// Who obeyed.
        by: u8,
        /// Its moves so far: it is in the sender's shard.
        version: u64,
    },
    /// A vCPU is to move.
    Leave {
        /// Which.
        vcpu: u8,
        /// Where to.
        order: MoveOrder,
    },
    /// A vCPU comes.
    Arrive {
        /// Which.
        vcpu: u8,
        /// All of it.
        migrating: Box<MigratingVcpu<S>>,
    },
    /// What follows comes after changes of the guest's page tables, of a VM of two shards.
    After {
        /// So many batches of the sender's are to be here first ([`dsm::Causal::after`]).
        count: u32,
    },
    /// The same, of a VM of more.
    AfterAll {
        /// Each shard's.
        batches: Batches,
    },
    /// A vCPU has come to the sender.
    Owner {
        /// Which.
        vcpu: u8,
        /// How.
        outcome: Outcome,
    },
}
