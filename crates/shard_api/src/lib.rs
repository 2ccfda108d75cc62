//! Interface between a monitor and a shard: messages, and calculations that both sides make.
//!
//! [`launch`] defines the messages; [`control`], [`message`] and [`ports`] carry them; [`version`] refuses
//! builds without a common version. [`layout`], [`cpuid`] and [`relation`] are calculations on which both
//! sides must agree. [`saved`] is a frozen machine as the monitor reads it, [`page_map`] what its memory
//! consists of. This crate uses neither KVM nor
//! guest memory, so that a monitor, a cell and the simulator compile without them; [`Platform`] has the few
//! functions of a monitor that need them.

pub mod chain;
pub mod cmdline;
pub mod control;
pub mod cpuid;
pub mod launch;
pub mod layout;
pub mod memory;
pub mod message;
pub mod page_map;
pub mod platform;
pub mod ports;
pub mod relation;
pub mod saved;
pub mod version;

pub use platform::Platform;
