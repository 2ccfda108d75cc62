//! System calls of the socket device's thread beyond those of every thread.

use crate::sandbox::Syscall;

/// The allow-list: connected unix sockets, new ones from the listener and from the monitor, and the timer.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_timerfd_settime,
    libc::SYS_getrandom,
];
