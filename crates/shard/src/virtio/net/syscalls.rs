//! What a card's thread may ask of the kernel, beyond what every thread may.

use crate::sandbox::Syscall;

/// The allow-list: frames in and out, the TAP's settings.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_ioctl,
];
