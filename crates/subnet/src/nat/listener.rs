//! Forwarded ports of the host.

use std::collections::HashMap;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;

use super::CardId;
use super::table::FlowId;
use crate::host_socket::{self as socket, Client};
use crate::{PortForward, Protocol, SubnetError};

/// The socket of a forwarded port.
#[derive(Debug)]
pub(super) enum ListeningSocket {
    /// A port for connections.
    Tcp(TcpListener),
    /// A port for datagrams.
    Udp(UdpSocket),
}

/// A forwarded port.
#[derive(Debug)]
pub(super) struct Listener {
    /// Card of the guest to which it leads.
    pub(super) card: CardId,
    /// Its ports.
    pub(super) forward: PortForward,
    pub(super) socket: ListeningSocket,
    /// Exchanges by their peers, of datagrams.
    pub(super) peers: HashMap<Client, FlowId>,
}

impl Listener {
    /// Opens a port of the host.
    pub(super) fn open(card: CardId, forward: PortForward) -> Result<Self, SubnetError> {
        let socket = match forward.protocol {
            Protocol::Tcp => socket::listen_tcp(forward.host).map(ListeningSocket::Tcp),
            Protocol::Udp => socket::bind_udp(forward.host).map(ListeningSocket::Udp),
        };
        Ok(Self {
            card,
            forward,
            socket: socket.map_err(|error| explain(forward, error))?,
            peers: HashMap::new(),
        })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            ListeningSocket::Tcp(listener) => listener.as_fd(),
            ListeningSocket::Udp(socket) => socket.as_fd(),
        }
    }
}

fn explain(forward: PortForward, error: Errno) -> SubnetError {
    let (port, protocol) = (forward.host, forward.protocol.name());
    match error {
        Errno::EADDRINUSE => SubnetError::PortInUse { port, protocol },
        Errno::EACCES | Errno::EPERM => SubnetError::PortPermission { port, protocol },
        error => SubnetError::Port {
            port,
            protocol,
            source: error.into(),
        },
    }
}
