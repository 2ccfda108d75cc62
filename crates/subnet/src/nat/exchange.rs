//! An exchange of UDP datagrams or echoes between a guest's port and one of a peer.

use std::io;
use std::net::UdpSocket;
use std::time::Duration;

use super::table::FlowId;
use crate::host_socket::{self, Client};

/// Time without packets after which an exchange ends.
const IDLE_LIMIT: Duration = Duration::from_secs(120);
/// The same for name servers and echoes, of which each query is an exchange.
const QUERY_LIMIT: Duration = Duration::from_secs(10);
const DNS_PORT: u16 = 53;

/// Path of an exchange on the host.
#[derive(Debug)]
pub(super) enum Path {
    /// A socket of its own, connected to the peer.
    Own(UdpSocket),
    /// The socket of a forwarded port, which other peers use too.
    Forwarded {
        /// The forwarded port.
        listener: FlowId,
        /// The peer.
        peer: Client,
    },
}

/// An exchange.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) path: Path,
    limit: Duration,
}

/// Result of sending a packet to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The host has taken it.
    Done,
    /// The host's socket has no room for it, or it is too long.
    Dropped,
    /// The peer has no program at the port.
    Refused,
    /// The peer is not reached.
    Unreachable,
}

impl Exchange {
    /// Creates an exchange with a peer's port by UDP.
    pub(super) fn udp(path: Path, port: u16) -> Self {
        let limit = if port == DNS_PORT { QUERY_LIMIT } else { IDLE_LIMIT };
        Self { path, limit }
    }

    /// Creates an exchange of echoes.
    pub(super) fn echo(socket: UdpSocket) -> Self {
        Self {
            path: Path::Own(socket),
            limit: QUERY_LIMIT,
        }
    }

    /// Returns the time without packets after which the exchange ends.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }
}

/// Sends a packet from a socket that is connected.
pub(super) fn send(socket: &UdpSocket, payload: &[u8]) -> Sent {
    // The error of an earlier packet is reported first. It says as much of this one.
    sent(socket.send(payload))
}

/// Sends a packet from a forwarded port to a peer.
pub(super) fn send_to(socket: &UdpSocket, payload: &[u8], peer: &Client) -> Sent {
    sent(host_socket::send_to(socket, payload, peer).map_err(io::Error::from))
}

fn sent(result: io::Result<usize>) -> Sent {
    let Err(error) = result else {
        return Sent::Done;
    };
    failure(&error)
}

/// Returns what an error of a socket says of its peer.
pub(super) fn failure(error: &io::Error) -> Sent {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Sent::Refused,
        io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::AddrNotAvailable => Sent::Unreachable,
        _ => Sent::Dropped,
    }
}
