//! What a card's thread may ask of the kernel, beyond what every thread may.

use super::tap;
use crate::sandbox::Syscall;

/// The allow-list: frames in and out.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
];

/// The requests that the thread may make by `ioctl`: the TAP's offloads, queues and size of header.
pub const REQUESTS: &[u64] = &[tap::SET_OFFLOAD, tap::SET_QUEUE, tap::SET_HEADER_BYTES];
