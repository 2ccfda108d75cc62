//! The shard's program, which a monitor starts. It serves one VM, or the VM's share in one cell, from the
//! launch message to the last report. It is also the program of a card's frame filter, and of a shared
//! folder.

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use shard::launch::CONTROL_FD;

fn main() -> ExitCode {
    agent::panic::ends_the_process();
    keep_one_arena();
    if let Some(status) = shard::card::take_over().or_else(shard::folder::take_over) {
        return status;
    }
    // SAFETY: reads the flags of a descriptor, which may be closed.
    if unsafe { libc::fcntl(CONTROL_FD, libc::F_GETFD) } < 0 {
        eprintln!("mirrorball-shard: a monitor starts this program; help: start VMs with `mirrorball run`");
        return ExitCode::from(2);
    }
    let log = process_log::Settings::from_args(std::env::args()).and_then(process_log::Settings::begin);
    if let Err(error) = log {
        eprintln!("mirrorball-shard: {error}");
        return ExitCode::from(2);
    }
    // SAFETY: the monitor puts the control socket at this descriptor; nothing else here owns it.
    let control = unsafe { OwnedFd::from_raw_fd(CONTROL_FD) };
    shard::process::run(&control.into())
}

/// Keeps the allocator from creating an arena for each thread: it would read the number of CPUs in /sys,
/// which a sealed thread may not do. The few small allocations of a shard are not worth the memory of arenas
/// either.
fn keep_one_arena() {
    // SAFETY: sets a number of the allocator's before any other thread exists.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}
