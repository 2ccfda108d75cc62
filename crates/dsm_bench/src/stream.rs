//! Streams between nodes, plain or with TLS, and typed messages on them.
//!
//! Each message is its length and then its bytes. They serve the rendezvous and commands; pages use
//! [`dsm::Link`].

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use urpc::tls::{Deadline, Identity, TlsError};

/// Time for which a peer may take to answer during the rendezvous.
pub const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between attempts to reach a node that has not started yet.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Time for which sent bytes may stay without acknowledgement, milliseconds. The other host is gone then.
const ACK_TIMEOUT_MS: u32 = 5_000;
/// Length of the longest message, bytes.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Protection of streams.
#[derive(Clone, Debug)]
pub enum Security {
    /// None: for one host, or a network of trusted hosts.
    Plain,
    /// TLS with the keys of a cluster.
    Tls(Box<Identity>),
}

/// How the streams between the nodes are made.
#[derive(Clone, Copy, Debug)]
pub struct StreamOptions<'a> {
    /// Protection of the streams.
    pub security: &'a Security,
    /// File of memory that all nodes share; page servers then send by it.
    pub memory: Option<&'a Path>,
}

impl<'a> From<&'a Security> for StreamOptions<'a> {
    fn from(security: &'a Security) -> Self {
        Self {
            security,
            memory: None,
        }
    }
}

/// Address of a node: `HOST:PORT`, and with TLS `NAME@HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Peer {
    /// Name on the node's key; needed with TLS only.
    pub name: Option<String>,
    /// Address at which the node listens.
    pub address: String,
}

/// Reason why there is no stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The address is malformed.
    #[error("{0:?} is no address of a node; write HOST:PORT, and with TLS NAME@HOST:PORT")]
    Address(String),
    /// The address can't be bound.
    #[error("can't listen at {0}: {1}")]
    Listen(String, #[source] io::Error),
    /// The node can't be reached.
    #[error("can't reach the node at {0} ({1}); is `mirrorball dsm serve` running there?")]
    Reach(String, #[source] io::Error),
    /// The TLS handshake failed.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The shared memory has another length or content than expected.
    #[error("shared memory {0:?}: {1}")]
    Memory(PathBuf, #[source] io::Error),
    /// The peer stopped, or speaks another protocol.
    #[error("the node at {0} {1}")]
    Broken(String, String),
}

impl std::str::FromStr for Peer {
    type Err = StreamError;

    fn from_str(text: &str) -> Result<Self, StreamError> {
        let (name, address) = match text.split_once('@') {
            Some((name, address)) => (Some(name.to_owned()), address),
            None => (None, text),
        };
        let is_address = address
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if !is_address || name.as_deref() == Some("") {
            return Err(StreamError::Address(text.to_owned()));
        }
        Ok(Self {
            name,
            address: address.to_owned(),
        })
    }
}

/// Listens at an address.
///
/// # Errors
/// [`StreamError::Listen`].
pub fn listen(address: &str) -> Result<TcpListener, StreamError> {
    TcpListener::bind(address).map_err(|error| StreamError::Listen(address.to_owned(), error))
}

/// Connects to a node, which may still be starting.
///
/// # Errors
/// If it can't be reached within [`RENDEZVOUS_TIMEOUT`], or has another key.
pub fn connect(peer: &Peer, security: &Security) -> Result<OwnedFd, StreamError> {
    let reach = |error| StreamError::Reach(peer.address.clone(), error);
    let end = Instant::now() + RENDEZVOUS_TIMEOUT;
    let addresses: Vec<SocketAddr> = peer.address.to_socket_addrs().map_err(reach)?.collect();
    let tcp = loop {
        let error = match TcpStream::connect(&addresses[..]) {
            Ok(tcp) => break tcp,
            Err(error) => error,
        };
        if Instant::now() > end || error.kind() != io::ErrorKind::ConnectionRefused {
            return Err(reach(error));
        }
        std::thread::sleep(CONNECT_RETRY_INTERVAL);
    };
    match security {
        Security::Plain => {
            prepare(&tcp).map_err(reach)?;
            Ok(tcp.into())
        }
        Security::Tls(identity) => {
            let name = peer
                .name
                .as_deref()
                .ok_or_else(|| StreamError::Address(peer.address.clone()))?;
            let address = tcp.peer_addr().map_err(reach)?;
            drop(tcp);
            Ok(identity.connect(address, name, RENDEZVOUS_TIMEOUT)?.into())
        }
    }
}

/// Accepts a connection within `limit`, if there is one.
///
/// # Errors
/// If the peer has no key of this cluster, or the network fails.
pub fn accept(
    listener: &TcpListener,
    security: &Security,
    limit: Option<Duration>,
) -> Result<OwnedFd, StreamError> {
    let at = || {
        listener
            .local_addr()
            .map_or_else(|_| "?".into(), |address| address.to_string())
    };
    if let Some(limit) = limit {
        let mut wait = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        if poll(&mut wait, limit) == Ok(0) {
            return Err(StreamError::Listen(at(), io::ErrorKind::TimedOut.into()));
        }
    }
    let (tcp, _) = listener
        .accept()
        .map_err(|error| StreamError::Listen(at(), error))?;
    match security {
        Security::Plain => {
            prepare(&tcp).map_err(|error| StreamError::Listen(at(), error))?;
            Ok(tcp.into())
        }
        Security::Tls(identity) => Ok(identity
            .accept(tcp, Deadline::after(RENDEZVOUS_TIMEOUT))?
            .0
            .into()),
    }
}

/// Sends small messages at once, and detects a silent host within seconds.
fn prepare(tcp: &TcpStream) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    setsockopt(tcp, sockopt::KeepAlive, &true)?;
    setsockopt(tcp, sockopt::TcpKeepIdle, &1)?;
    setsockopt(tcp, sockopt::TcpKeepInterval, &1)?;
    setsockopt(tcp, sockopt::TcpKeepCount, &5)?;
    setsockopt(tcp, sockopt::TcpUserTimeout, &ACK_TIMEOUT_MS)?;
    Ok(())
}

/// Sends a message.
///
/// # Errors
/// If the connection is closed.
pub fn send(stream: &OwnedFd, message: &impl Serialize) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let mut framed = u32::try_from(bytes.len())
        .map_err(io::Error::other)?
        .to_le_bytes()
        .to_vec();
    framed.extend_from_slice(&bytes);
    socket(stream)?.write_all(&framed)
}

/// Receives a message within `limit`, if there is one.
///
/// # Errors
/// If the connection is closed, the peer is silent, or it sends another type.
pub fn receive<T: DeserializeOwned>(stream: &OwnedFd, limit: Option<Duration>) -> io::Result<T> {
    let mut socket = socket(stream)?;
    socket.set_read_timeout(limit)?;
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}

/// Returns the stream as a reader and writer. A unix stream does the same calls, whatever the socket's
/// family.
fn socket(stream: &OwnedFd) -> io::Result<UnixStream> {
    Ok(UnixStream::from(stream.try_clone()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_malformed_ones_refused() {
        let peer: Peer = "10.0.0.1:7000".parse().unwrap();
        assert_eq!((peer.name, peer.address.as_str()), (None, "10.0.0.1:7000"));
        let peer: Peer = "east@[::1]:7000".parse().unwrap();
        assert_eq!(
            (peer.name.as_deref(), peer.address.as_str()),
            (Some("east"), "[::1]:7000")
        );
        for text in ["", "host", "host:", ":7000", "host:70000", "@host:1", "host:port"] {
            assert!(text.parse::<Peer>().is_err(), "{text}");
        }
    }

    #[test]
    fn messages_are_typed_and_a_closed_stream_is_an_error() {
        let (near, far) = UnixStream::pair().unwrap();
        let (near, far) = (OwnedFd::from(near), OwnedFd::from(far));
        send(&near, &(7_u16, "seven".to_owned())).unwrap();
        let message: (u16, String) = receive(&far, Some(RENDEZVOUS_TIMEOUT)).unwrap();
        assert_eq!(message, (7, "seven".to_owned()));
        drop(near);
        assert!(receive::<u16>(&far, Some(RENDEZVOUS_TIMEOUT)).is_err());
    }

    #[test]
    fn silent_peer_times_out() {
        let (_near, far) = UnixStream::pair().unwrap();
        assert!(receive::<u16>(&far.into(), Some(Duration::from_millis(20))).is_err());
    }
}
