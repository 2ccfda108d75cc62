//! Messages between the shards of one VM.

use dsm::Batches;
use serde::{Deserialize, Serialize};

use super::startup::Startup;
use super::vcpu_migration::{MigratingVcpu, MoveOrder, Outcome, VcpuState};

/// Address space of devices.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Space {
    /// I/O ports.
    Ports,
    /// Physical memory.
    Memory,
}

/// Access of a vCPU to a device, 8 bytes at most.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Access {
    /// Address space of the access.
    pub space: Space,
    /// Port or physical address.
    pub address: u64,
    /// Size, bytes: 1 to 8.
    pub size: u8,
    /// Value to write; none for a read.
    pub value: Option<u64>,
}

/// Message to another shard. `S` is the state of a migrating vCPU.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Packet<S = VcpuState> {
    /// Interrupt for a vCPU.
    Interrupt {
        /// Target vCPU.
        vcpu: u8,
        /// Interrupt vector.
        vector: u8,
        /// Whether it is level-triggered.
        level: bool,
    },
    /// Non-maskable interrupt for a vCPU.
    Nmi {
        /// Target vCPU.
        vcpu: u8,
    },
    /// INIT or start-up interrupt for a vCPU, not yet numbered. Sent to the home.
    Startup {
        /// Target vCPU.
        vcpu: u8,
        /// The interrupt.
        startup: Startup,
    },
    /// INIT or start-up interrupt with the number that the home has given it.
    Numbered {
        /// Target vCPU.
        vcpu: u8,
        /// Number in the order of sending.
        number: u64,
        /// The interrupt.
        startup: Startup,
    },
    /// Report that a vCPU has enabled or disabled its local APIC.
    Enabled {
        /// vCPU that reports.
        vcpu: u8,
        /// Its moves so far; the sender owns the vCPU.
        version: u64,
        /// Whether the local APIC is enabled.
        is_enabled: bool,
    },
    /// End of a level-triggered interrupt, for the home's IOAPIC.
    EndOfInterrupt {
        /// Interrupt vector.
        vector: u8,
    },
    /// Access of a vCPU to a device, for which the vCPU awaits [`Packet::Answer`]. Sent to the home.
    Access {
        /// vCPU that makes the access.
        vcpu: u8,
        /// Address, width and data of the access.
        access: Access,
    },
    /// Write to a doorbell, which has no reply. Sent to the home.
    Doorbell {
        /// Address and value of the write.
        access: Access,
    },
    /// Reply to an access.
    Answer {
        /// vCPU that made the access.
        vcpu: u8,
        /// Value that was read; 0 for a write.
        value: u64,
    },
    /// Report that a vCPU has completed the INIT of another.
    Obeyed {
        /// vCPU that sent the INIT and waits.
        vcpu: u8,
        /// vCPU that has reset.
        by: u8,
        /// Its moves so far; the sender owns the vCPU.
        version: u64,
    },
    /// Order to a vCPU to migrate.
    Leave {
        /// vCPU that migrates.
        vcpu: u8,
        /// Target shard and number of the order.
        order: MoveOrder,
    },
    /// A vCPU that migrates to the receiver.
    Arrive {
        /// vCPU that migrates.
        vcpu: u8,
        /// The vCPU and its transfer.
        migrating: Box<MigratingVcpu<S>>,
    },
    /// In a VM of two shards: the next packet arrives after changes of the guest's page tables.
    After {
        /// Number of the sender's batches that must arrive first ([`dsm::Causal::after`]).
        count: u32,
    },
    /// The same in a VM of more shards.
    AfterAll {
        /// Batches of each shard that must arrive first.
        batches: Batches,
    },
    /// Report that the sender owns a vCPU.
    Owner {
        /// vCPU that has arrived.
        vcpu: u8,
        /// Outcome of its move.
        outcome: Outcome,
    },
}
