//! The program of a keeper. A monitor starts it, with a socket as standard input and the VM's name as
//! argument.

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

fn main() -> ExitCode {
    // SAFETY: sets a number of the allocator's before any other thread exists.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    // SAFETY: nothing else in this program knows standard input, which the runtime has opened if nobody else
    // had.
    let socket = unsafe { OwnedFd::from_raw_fd(libc::STDIN_FILENO) };
    match keeper::server::run(socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "mirrorball-keeper: {error}; a monitor starts this program; \
                 help: start VMs with `mirrorball run`"
            );
            ExitCode::from(2)
        }
    }
}
