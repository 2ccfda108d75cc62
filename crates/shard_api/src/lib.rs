//! What a monitor and a shard say to each other, and what both compute from it.
//!
//! [`launch`] defines the messages; [`control`], [`message`] and [`ports`] carry them; [`version`] keeps
//! different builds apart. [`layout`], [`cpuid`] and [`relation`] are calculations that both sides must agree
//! on. [`saved`] is a frozen machine as the monitor reads it. Neither KVM nor guest memory is in here, so
//! that a monitor, a cell and the simulator compile without them; [`Platform`] is what a monitor asks of them
//! all the same.

pub mod chain;
pub mod cmdline;
pub mod control;
pub mod cpuid;
pub mod launch;
pub mod layout;
pub mod memory;
pub mod message;
pub mod platform;
pub mod ports;
pub mod relation;
pub mod saved;
pub mod version;

pub use platform::Platform;
