//! System calls of the entropy source's thread beyond those of every thread.

use crate::sandbox::Syscall;

/// The allow-list.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_getrandom, libc::SYS_dup];
