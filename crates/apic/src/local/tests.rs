//! Rules of the SDM, one test each; `model` has an independent model of it all, against which any traffic is
//! checked.

mod commands;
mod model;
mod registers;
mod service;

use super::*;
use crate::interrupt::{Delivery, Destination, Interrupt, Shorthand};

const FAULT: Result<Written, GeneralProtection> = Err(GeneralProtection);
const NOTHING: Result<Written, GeneralProtection> = Ok(Written::Nothing);

/// Enabled by software, the spurious vector 0xFF.
fn enabled(id: u32) -> LocalApic {
    let mut apic = LocalApic::new(id, 10);
    assert_eq!(apic.write(SPURIOUS, 0x1FF, 0), Ok(Written::Enabled(true)));
    apic
}

fn write(apic: &mut LocalApic, msr: u32, value: u64) {
    assert_eq!(apic.write(msr, value, 0), NOTHING, "{msr:#x} {value:#x}");
}

fn read(apic: &LocalApic, msr: u32) -> u64 {
    apic.read(msr, 0).expect("a register that can be read")
}
