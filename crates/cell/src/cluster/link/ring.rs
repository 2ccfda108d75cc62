//! Channels within a host: a ring each way in memory that both map, and a socket whose end tells that the other process
//! died.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Instant;

use protocol::CellId;
use serde::{Deserialize, Serialize};
use shard::launch::Fd;
use shard::process::{receive, send};
use urpc::SendError;
use urpc::fragment::{Assembly, Parts};
use urpc::host::{Block, Inbox, Outbox, SharedRing, end};

use super::{Answer, Calling, Link, MESSAGE_BYTES_MAX, PATIENCE, ReceiveBytes, SendBytes};
use crate::cluster::files::Files;

/// Messages that a channel holds.
const LINES: usize = 1024;
/// All messages are of one kind.
const PORT: u16 = 0;

/// A call from one cell to another.
#[derive(Serialize, Deserialize)]
struct Hail {
    cell: CellId,
    /// The ring to the caller.
    to: Fd,
    /// The ring from it.
    from: Fd,
}

#[derive(Debug)]
struct ToRing {
    outbox: Outbox,
    /// Ends the other half, too.
    socket: UnixStream,
}

#[derive(Debug)]
struct FromRing {
    peer: CellId,
    inbox: Inbox,
    /// To be ended when the other process is gone.
    ring: SharedRing,
    socket: UnixStream,
}

/// Calls between the cells of a host.
#[derive(Clone, Debug)]
pub struct Calls {
    /// Whose.
    pub me: CellId,
    block_ns: u64,
    calling: Arc<Calling>,
}

impl Calls {
    /// None under way. `block_ns` as for [`Inbox::new`].
    pub fn new(me: CellId, block_ns: u64, calling: Arc<Calling>) -> Self {
        Self {
            me,
            block_ns,
            calling,
        }
    }

    /// Calls every other cell of the host that runs. Those that are calling this one just now.
    pub fn call_all(&self, files: &Files, linked: &impl Fn(Link)) -> io::Result<BTreeSet<u16>> {
        let mut crossed = BTreeSet::new();
        for cell in files.plan()? {
            if cell.number == self.me.number {
                continue;
            }
            let socket = files.cell(cell.number).link_socket();
            match self.calling.during(cell.number, || self.call(&socket)) {
                Ok(Some(link)) => linked(link),
                Ok(None) => _ = crossed.insert(cell.number),
                // It does not run, and calls when it starts.
                Err(_) => {}
            }
        }
        Ok(crossed)
    }

    fn call(&self, socket: &std::path::Path) -> io::Result<Option<Link>> {
        let mut socket = UnixStream::connect(socket)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let (outgoing, theirs) = SharedRing::create(LINES).map_err(io::Error::other)?;
        let (incoming, ours) = SharedRing::create(LINES).map_err(io::Error::other)?;
        let hail = Hail {
            cell: self.me,
            from: Fd(0),
            to: Fd(1),
        };
        send(&mut socket, &hail, &[theirs.as_fd(), ours.as_fd()]).map_err(io::Error::other)?;
        let (answer, _) = receive(&mut socket).map_err(io::Error::other)?;
        match answer {
            Answer::Crossed => Ok(None),
            Answer::Welcome(peer) => self.link(peer, outgoing, incoming, &ours, socket).map(Some),
        }
    }

    /// Takes calls until the process ends.
    pub fn take(&self, listener: &UnixListener, linked: impl Fn(Link)) {
        for socket in listener.incoming().flatten() {
            // A caller that makes no sense has no link.
            if let Ok(Some(link)) = self.take_one(socket) {
                linked(link);
            }
        }
    }

    fn take_one(&self, mut socket: UnixStream) -> io::Result<Option<Link>> {
        socket.set_read_timeout(Some(PATIENCE))?;
        let (hail, mut files) = receive::<Hail>(&mut socket).map_err(io::Error::other)?;
        let answer = self.calling.answer(hail.cell);
        if matches!(answer, Answer::Crossed) {
            send(&mut socket, &answer, &[]).map_err(io::Error::other)?;
            return Ok(None);
        }
        let ring = |file: OwnedFd| {
            SharedRing::attach(&file)
                .map(|ring| (ring, file))
                .map_err(io::Error::other)
        };
        let (incoming, ours) = ring(files.take(hail.from).map_err(io::Error::other)?.into())?;
        let (outgoing, _) = ring(files.take(hail.to).map_err(io::Error::other)?.into())?;
        send(&mut socket, &answer, &[]).map_err(io::Error::other)?;
        self.link(hail.cell, outgoing, incoming, &ours, socket).map(Some)
    }

    fn link(
        &self,
        peer: CellId,
        outgoing: SharedRing,
        incoming: SharedRing,
        ours: &OwnedFd,
        socket: UnixStream,
    ) -> io::Result<Link> {
        socket.set_read_timeout(None)?;
        let sending = ToRing {
            outbox: Outbox::new(outgoing, Block::Futex, self.block_ns),
            socket: socket.try_clone()?,
        };
        let receiving = FromRing {
            peer,
            inbox: Inbox::new(incoming, Block::Futex, self.block_ns),
            ring: SharedRing::attach(ours).map_err(io::Error::other)?,
            socket,
        };
        Ok(Link::new(peer, sending, receiving))
    }
}

impl SendBytes for ToRing {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        // Set when it is needed: most messages find room, and the clock costs as much as a message.
        let mut deadline = None;
        for part in Parts::of(PORT, bytes) {
            if self.outbox.post(&part).is_err() {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
                self.outbox
                    .send(&part, Some(deadline))
                    .map_err(|error| match error {
                        SendError::Full => io::Error::new(io::ErrorKind::TimedOut, error),
                        gone => io::Error::new(io::ErrorKind::BrokenPipe, gone),
                    })?;
            }
        }
        self.outbox.flush();
        Ok(())
    }
}

impl Drop for ToRing {
    fn drop(&mut self) {
        // The other half, here and there, reads its end.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl ReceiveBytes for FromRing {
    fn run(self: Box<Self>, heard: &mut dyn FnMut(&[u8]) -> io::Result<()>) {
        let Self {
            mut inbox,
            ring,
            socket,
            peer,
        } = *self;
        // A process that is killed ends no channel; the kernel ends its sockets.
        let watch = std::thread::Builder::new()
            .name(format!("watch {peer}"))
            .spawn(move || {
                let mut byte = [0];
                let _ = (&socket).read(&mut byte);
                end(&ring);
            });
        if watch.is_err() {
            return;
        }
        let mut assembly = Assembly::new(vec![0; MESSAGE_BYTES_MAX].into_boxed_slice());
        while let Ok(Some(part)) = inbox.recv(None) {
            match assembly.add(&part) {
                Ok(None) => {}
                Ok(Some((_, bytes))) if heard(bytes).is_ok() => {}
                _ => return,
            }
        }
    }
}
