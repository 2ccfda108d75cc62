//! System calls of the pager's threads beyond those of every thread.

use crate::sandbox::Syscall;

/// The allow-list. The requests by `ioctl` are those of a userfaultfd.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_fallocate, libc::SYS_pread64, libc::SYS_pwrite64];
