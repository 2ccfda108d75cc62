//! System calls of a shared folder's thread beyond those of every thread.

use crate::sandbox::Syscall;

/// The allow-list: packets to and from the folder's process, and checks of the files that it passes.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_newfstatat,
    libc::SYS_statx,
];
