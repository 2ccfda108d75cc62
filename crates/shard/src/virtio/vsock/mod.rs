//! The socket device (Virtio 1.2, section 5.10), all in user space.
//!
//! A client of the host connects to a unix socket, writes `CONNECT <port>\n`, reads `OK <host port>\n`, and
//! is then connected to that port of the guest. A guest that connects to port N of the host (cid 2) reaches
//! the unix socket named N in the ports directory, if it exists: the monitor connects to it
//! ([`crate::ports`]). All other connections are refused with a reset.
//!
//! One thread (`handler`) moves packets between guest memory (`queues`) and the `connections`, each of which
//! belongs to a `peer` in a `table`. [`connection::Connection`] is the state machine of a connection, without
//! I/O. Bytes to the host wait in the connection, at most [`connection::BUFFER_BYTES`] (the guest's credit).
//! Bytes to the guest stay in the host's socket until the guest has a buffer and has granted credit.
//! Connections take turns.
//!
//! Packets are parsed here instead of by the `virtio-vsock` crate, which refuses the scatter-gather packets
//! of guests from Linux 6.7 on (it accepts one data descriptor only).

pub mod connection;
mod connections;
mod device;
mod handler;
mod metrics;
mod open_request;
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
