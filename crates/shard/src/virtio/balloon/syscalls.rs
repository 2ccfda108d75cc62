//! System calls of the balloon's thread beyond those of every thread.

use crate::sandbox::Syscall;

/// The allow-list.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_fallocate, libc::SYS_dup];
