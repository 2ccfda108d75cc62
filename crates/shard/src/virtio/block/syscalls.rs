//! What a disk's thread may call beyond what every thread may.

use crate::sandbox::Syscall;

/// Reading, writing, syncing and punching the disk's files, and the kernel's ring. The ring itself is
/// restricted to reads and syncs of those files before the sandbox closes. No call here takes a path.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_fallocate,
    // What a temporary overlay may still take of its file system.
    libc::SYS_fstatfs,
    // imago grows a qcow2 file when it writes zeroes past its end.
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_io_uring_enter,
    // When to retry what found no room.
    libc::SYS_timerfd_settime,
];
