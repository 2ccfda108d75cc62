//! System calls of a card's thread beyond those of every thread.

use super::tap;
use crate::sandbox::Syscall;

/// The allow-list: receiving and sending frames.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
];

/// Requests of the thread by `ioctl`: the TAP's offloads, queues and header size.
pub const REQUESTS: &[u64] = &[tap::SET_OFFLOAD, tap::SET_QUEUE, tap::SET_HEADER_BYTES];
