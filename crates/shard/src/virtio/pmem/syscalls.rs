//! System calls of persistent memory's thread beyond those of every thread.

use crate::sandbox::Syscall;

/// The allow-list.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_fdatasync, libc::SYS_fsync, libc::SYS_dup];
