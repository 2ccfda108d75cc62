//! System calls of a disk's thread beyond those of every thread.

use crate::sandbox::Syscall;

/// Calls for reading, writing, syncing and punching the disk's files, and for the kernel's ring. The ring
/// itself is restricted to reads and syncs of those files before the sandbox closes. None of the calls takes
/// a path.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_fallocate,
    // Free space of a temporary overlay's file system.
    libc::SYS_fstatfs,
    // imago grows a qcow2 file when it writes zeroes past its end.
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_io_uring_enter,
    // Timer that retries requests without room.
    libc::SYS_timerfd_settime,
];
