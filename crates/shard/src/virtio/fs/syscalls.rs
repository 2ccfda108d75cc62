//! System calls of a shared folder's thread beyond those of every thread.

use crate::sandbox::Syscall;

/// The allow-list: packets to and from the folder's process.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_recvfrom, libc::SYS_sendto];
