//! A process by its descriptor, which never names another process, whichever process waits for its end.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::Child;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Kills the process. One that has ended needs no signal.
pub(crate) fn kill(process: BorrowedFd<'_>) {
    // SAFETY: sends a signal; the kernel reads no memory of ours without the third argument.
    unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        );
    }
}

/// Whether the process has ended.
pub(crate) fn has_ended(process: BorrowedFd<'_>) -> bool {
    ends_within(process, PollTimeout::ZERO)
}

/// Whether the process ends within `limit`. A signal to this process shortens the wait.
pub(crate) fn ends_within(process: BorrowedFd<'_>, limit: PollTimeout) -> bool {
    let mut files = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    poll(&mut files, limit).is_ok_and(|ready| ready > 0)
}

/// Opens the descriptor of a child that was not waited for yet.
///
/// # Errors
/// If this process has no descriptors left.
pub(crate) fn of_child(child: &Child) -> io::Result<OwnedFd> {
    open(i32::try_from(child.id()).map_err(io::Error::other)?)
}

/// Opens the descriptor of the process that has this number now.
///
/// # Errors
/// If there is none, or this process has no descriptors left.
pub(crate) fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
