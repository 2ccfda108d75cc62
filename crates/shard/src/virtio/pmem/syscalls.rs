//! What persistent memory's thread may ask of the kernel, beyond what every thread may.

use crate::sandbox::Syscall;

/// The allow-list.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_fdatasync, libc::SYS_fsync, libc::SYS_dup];
