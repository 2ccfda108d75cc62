//! Client connections, of which each user has a bounded number.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use nix::unistd::geteuid;
use registry::monitor::Owner;
use registry::peer::owner_of;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};

use crate::caller::Caller;
use crate::slots::{Slot, Slots};

/// Maximum simultaneous connections of a member.
const MEMBERS_CONNECTIONS_MAX: usize = 64;
/// Maximum simultaneous connections of an owner.
const OWNERS_CONNECTIONS_MAX: usize = 256;
/// Pause after a failed accept, as when the process has no descriptors left.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Socket of the API. It closes a connection above the user's bound at once.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    slots: Slots,
}

/// A client's connection.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    owner: Option<Owner>,
    _slot: Slot,
}

impl Listener {
    /// Creates a listener for this socket.
    pub fn new(socket: UnixListener) -> Self {
        Self {
            socket,
            slots: Slots::of("connections", MEMBERS_CONNECTIONS_MAX, OWNERS_CONNECTIONS_MAX),
        }
    }
}

impl Connection {
    /// Ids of the peer, from the kernel at connection time; none if unknown.
    pub fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }
}

impl axum::serve::Listener for Listener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            let Ok((stream, address)) = self.socket.accept().await else {
                tokio::time::sleep(RETRY_PAUSE).await;
                continue;
            };
            let owner = owner_of(&stream).ok();
            let uid = owner.as_ref().map(|owner| owner.uid);
            if let Some(slot) = self.slots.take_free(Caller::by_uid(uid, geteuid().as_raw())) {
                let connection = Connection {
                    stream,
                    owner,
                    _slot: slot,
                };
                return (connection, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
