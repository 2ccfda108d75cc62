//! Tests against real Linux guests, through the `mirrorball` command only.
//!
//! The tests are in `tests/*.rs`, one file for each kind of risk; this library has their common parts. A test
//! calls the command as a person would ([`command`]), starts VMs that end with the test ([`vm`]), gives every
//! wait a limit ([`wait`]), and checks the host for remains ([`host`]). Inside a guest the program
//! `guest-tool` writes and checks patterns, which both sides compute ([`pattern`]). `guest/` is a separate
//! kernel, which does nothing but interrupts ([`storm`]).

pub mod cluster;
pub mod command;
pub mod fault_points;
pub mod halting;
pub mod host;
pub mod load;
pub mod net;
pub mod pattern;
pub mod peer;
pub mod repetitions;
pub mod scratch;
pub mod setting;
pub mod span;
pub mod storm;
pub mod terminal;
pub mod vm;
pub mod wait;

pub use cluster::Cluster;
pub use command::{Output, mirrorball};
pub use repetitions::repetitions;
pub use scratch::Scratch;
pub use setting::Setting;
pub use vm::{Vm, VmFile};
