//! System calls of the background thread beyond those of every thread.

use crate::sandbox::Syscall;

/// Command of `fcntl` of the threads that take leased files and watch them.
pub const LEASE_COMMANDS: &[libc::c_int] = &[libc::F_GETLEASE];

/// The allow-list.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_fallocate,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_pread64,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
];
