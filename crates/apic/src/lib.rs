//! The x86 interrupt controllers as state machines, without I/O, clock, threads or `unsafe`. The inputs are
//! register accesses, interrupts and times. The outputs are register values, and interrupts with their
//! targets.
//!
//! - [`LocalApic`]: one per vCPU, always in x2APIC mode: pending interrupts, priorities, timer, commands;
//! - [`IoApic`]: the interrupt lines of devices, in the shard that has the devices;
//! - [`message`]: decodes an MSI write;
//! - [`targets`]: resolves an interrupt's destination to vCPUs.
//!
//! Times are ticks of the guest's TSC. The guest controls all state, and processes exchange it: no register
//! access panics, and [`LocalApic::is_sane`] and [`IoApic::is_sane`] check whether a received state is
//! reachable.
//!
//! Sources: Intel SDM volume 3A, chapter 11, "Advanced Programmable Interrupt Controller" ("SDM" with a
//! section below); Intel 82093AA I/O APIC datasheet.

#![forbid(unsafe_code)]

mod command;
mod interrupt;
mod io;
mod local;
mod message;
mod registers;
mod set;
mod targets;
mod timer;

pub use interrupt::{Delivery, Destination, Interrupt, Ipi, Shorthand};
pub use io::IoApic;
pub use local::{GeneralProtection, LocalApic, Written};
pub use message::message;
pub use targets::{Targets, VCPUS_MAX, targets};
