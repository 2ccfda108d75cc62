//! The socket device (Virtio 1.2, section 5.10), all in user space.
//!
//! A client of the host connects to one unix socket, writes `CONNECT <port>\n`, reads `OK <host port>\n`, and
//! is then connected to that port of the guest. A guest that connects to port N of the host (cid 2) reaches
//! the unix socket named N in the ports directory, if there is one: the monitor connects to it
//! ([`crate::ports`]). Everything else is refused with a reset.
//!
//! One thread (`handler`) moves packets between guest memory (`queues`) and the `connections`, each of which
//! belongs to a `peer` in a `table`. What a connection may do is decided by [`connection::Connection`], which
//! does no I/O. Bytes to the host wait in the connection, at most [`connection::BUFFER_BYTES`] (the credit
//! that the guest gets); bytes to the guest stay in the host's socket until the guest has a buffer and has
//! given credit. Connections take turns.
//!
//! Packets are parsed here and not by the `virtio-vsock` crate, which refuses the scatter-gather packets that
//! guests send from Linux 6.7 on (it takes one data descriptor only).

pub mod connection;
mod connections;
mod device;
mod handler;
mod metrics;
mod opening;
mod packet;
mod peer;
mod queues;
mod socket;
mod syscalls;
mod table;
#[cfg(test)]
mod tests;

pub use device::Vsock;
#[cfg(fuzzing)]
pub(crate) use device::bare;
pub use metrics::VsockMetrics;
pub use syscalls::SYSCALLS;
