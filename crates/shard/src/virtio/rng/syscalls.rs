//! What the entropy source's thread may ask of the kernel, beyond what every thread may.

use crate::sandbox::Syscall;

/// The allow-list.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_getrandom, libc::SYS_dup];
