//! The x86 interrupt controllers as state machines, without I/O, clock, threads or `unsafe`. A register access, an interrupt
//! or a time goes in; what the guest reads, what is to be sent and to whom come out.
//!
//! - [`LocalApic`]: one for each vCPU, always in x2APIC mode: pending interrupts, priorities, timer, commands;
//! - [`IoApic`]: the interrupt lines of the devices at home;
//! - [`message`]: an MSI that a device writes;
//! - [`targets`]: whom an interrupt is for.
//!
//! Times are ticks of the guest's TSC. All state is the guest's to spoil, and travels between processes: no register access
//! panics, and [`LocalApic::is_sane`] and [`IoApic::is_sane`] say whether a state that came from elsewhere can have come
//! about here.
//!
//! Sources: Intel SDM volume 3A, chapter 11, "Advanced Programmable Interrupt Controller" ("SDM" with a section below);
//! Intel 82093AA I/O APIC datasheet.

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
