//! Hosts in software: real Linux hosts with KVM inside QEMU's emulation, for machines without usable KVM and
//! for tests that need several hosts, NUMA nodes or distances.
//!
//! A lab host's root is this machine's `/`, so every path means the same inside and outside. Its initramfs
//! has the running program itself as `/init`, the programs of shards and keepers beside it, the necessary
//! kernel modules, and nothing else. [`take_over`] must be the first call in `main`: it becomes the host's
//! first process, or the hidden supervisor, if the program was started as one.

pub mod auto;
pub mod boot;
pub mod cli;
mod clock;
mod control;
mod cpio;
mod error;
mod host;
pub mod init;
mod initramfs;
mod kernel;
mod links;
mod module;
mod netem;
mod qemu;
mod qmp;
mod registry;
mod session;
mod supervisor;
mod switch;

pub use error::LabError;

/// The argument that makes the program a lab's supervisor.
pub(crate) const SUPERVISOR_ARGUMENT: &str = "lab-supervisor";

/// Set to `1` for programs that run inside a lab host.
pub const IN_LAB_VARIABLE: &str = "MIRRORBALL_IN_LAB";

/// The user outside, for programs that run inside a lab host: that user's files have this owner there.
pub const OWNER_VARIABLE: &str = "MIRRORBALL_LAB_OWNER";

/// Exit status of a command whose lab could not be started or died.
pub const EXIT_LAB_DIED: u8 = 125;

/// Exit status of a command that ran into its limit on time.
pub const EXIT_TIME_LIMIT: u8 = 124;

/// Becomes a lab host's first process or a lab's supervisor when started as one; returns otherwise.
///
/// Call it first in `main`, before any thread is started.
pub fn take_over() {
    if std::process::id() == 1 && std::env::args_os().next().is_some_and(|name| name == "/init") {
        init::main();
    }
    if std::env::args_os()
        .nth(1)
        .is_some_and(|argument| argument == SUPERVISOR_ARGUMENT)
    {
        std::process::exit(supervisor::main());
    }
}
