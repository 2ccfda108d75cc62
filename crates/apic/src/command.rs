//! The interrupt command register, by which a vCPU has its local APIC send interrupts (SDM 11.6.1, 11.12.9).

use crate::interrupt::{Delivery, Destination, Interrupt, Ipi, Shorthand};
use crate::local::GeneralProtection;
use crate::registers::VECTOR_MIN;

const LOGICAL: u64 = 1 << 11;
/// Delivery status: gone in x2APIC mode, but not reserved; processors ignore it.
const STATUS: u64 = 1 << 12;
const ASSERTED: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const RESERVED: u64 = 0xFFF3_2000;

/// Result of a write to the register.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Command {
    Send(Ipi),
    /// Nothing is sent: the end of a level-triggered INIT, which processors of this century do not have, or a
    /// shorthand with a delivery mode that does not go with it.
    Nothing,
    /// Nothing is sent: vectors below 16 can't be.
    IllegalVector,
}

/// The register as it is read back.
pub(crate) fn kept(value: u64) -> u64 {
    value & !STATUS
}

/// Fails with reserved bits, and with the delivery modes that are reserved here (011 and 111).
pub(crate) fn decode(value: u64) -> Result<Command, GeneralProtection> {
    if value & RESERVED != 0 {
        return Err(GeneralProtection);
    }
    let delivery = match Delivery::of_bits((value >> 8) as u32) {
        None | Some(Delivery::External) => return Err(GeneralProtection),
        Some(delivery) => delivery,
    };
    let shorthand = match value >> 18 & 3 {
        0 => Shorthand::None,
        1 => Shorthand::Own,
        2 => Shorthand::All,
        _ => Shorthand::Others,
    };
    let vector = value as u8;
    if delivery.has_vector() && vector < VECTOR_MIN {
        return Ok(Command::IllegalVector);
    }
    // SDM 11.6.1, table of valid combinations
    let includes_sender = matches!(shorthand, Shorthand::Own | Shorthand::All);
    if includes_sender && delivery != Delivery::Fixed {
        return Ok(Command::Nothing);
    }
    if delivery == Delivery::Init && value & (LEVEL | ASSERTED) == LEVEL {
        return Ok(Command::Nothing);
    }
    let destination = (value >> 32) as u32;
    let interrupt = Interrupt {
        destination: if value & LOGICAL != 0 {
            Destination::Logical(destination)
        } else {
            Destination::Physical(destination)
        },
        delivery,
        vector,
        // These interrupts are edge-triggered, whatever the trigger mode (the same table, note 1).
        level: false,
    };
    Ok(Command::Send(Ipi { interrupt, shorthand }))
}

/// The interrupt that the self-IPI register sends (SDM 11.12.11).
pub(crate) fn to_self(id: u32, vector: u8) -> Command {
    if vector < VECTOR_MIN {
        return Command::IllegalVector;
    }
    let interrupt = Interrupt {
        destination: Destination::Physical(id),
        delivery: Delivery::Fixed,
        vector,
        level: false,
    };
    Command::Send(Ipi {
        interrupt,
        shorthand: Shorthand::Own,
    })
}
