//! Links within a host: a ring in each direction, in memory that one side makes and sends to the other, and a
//! socket whose end reports the death of the other process.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use protocol::CellId;
use registry::cluster::files::Files;
use serde::{Deserialize, Serialize};
use shard_api::launch::Fd;
use shard_api::message::{Files as ReceivedFiles, receive, send};
use urpc::host::{Block, SharedRing, end};
use urpc::version::Versions;

use super::ring::{LINES, Rings};
use super::{CallAnswer, CallTable, Link, MESSAGE_TIMEOUT, Transport, VERSIONS, agree, is_version_mismatch};

/// A call from one cell to another.
#[derive(Serialize, Deserialize)]
struct CallMessage {
    cell: CellId,
    /// The protocol versions of the caller.
    versions: Versions,
    /// The ring to the caller.
    to: Fd,
    /// The ring from the caller.
    from: Fd,
}

/// Calls between the cells of a host.
#[derive(Clone, Debug)]
pub struct LocalCalls {
    /// The cell that calls.
    pub me: CellId,
    block_ns: u64,
    calling: Arc<CallTable>,
}

impl LocalCalls {
    /// Calls of the cell `me`. `block_ns` as for [`urpc::host::BlockingReceiver::new`].
    pub fn new(me: CellId, block_ns: u64, calling: Arc<CallTable>) -> Self {
        Self {
            me,
            block_ns,
            calling,
        }
    }

    /// Calls every other cell of the host that runs and has no link with this one. Returns those that are
    /// calling this one at the moment, or have called it.
    ///
    /// # Errors
    /// If the plan can't be read, or a cell that runs has no version in common with this one.
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
                // Two cells of a host without a link would give one name twice.
                Err(error) if is_version_mismatch(&error) => return Err(error),
                // It does not run, and calls when it starts.
                Err(_) => {}
            }
        }
        Ok(crossed)
    }

    pub(super) fn call(&self, socket: &std::path::Path) -> io::Result<Option<Link>> {
        let mut socket = UnixStream::connect(socket)?;
        socket.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        let (outgoing, theirs) = SharedRing::create(LINES).map_err(io::Error::other)?;
        let (incoming, ours) = SharedRing::create(LINES).map_err(io::Error::other)?;
        let hail = CallMessage {
            cell: self.me,
            versions: VERSIONS,
            from: Fd(0),
            to: Fd(1),
        };
        send(&mut socket, &hail, &[theirs.as_fd(), ours.as_fd()]).map_err(io::Error::other)?;
        let (answer, _) = receive(&mut socket).map_err(io::Error::other)?;
        match CallAnswer::peer(answer).map_err(io::Error::other)? {
            None => Ok(None),
            Some((peer, version)) => {
                let link = self.link(peer, outgoing, incoming, &ours, socket)?;
                Ok(Some(link.speaking(version)))
            }
        }
    }

    /// Accepts calls until the process ends.
    pub fn take(&self, listener: &UnixListener, linked: impl Fn(Link)) {
        for socket in listener.incoming().flatten() {
            // A caller that breaks the protocol gets no link.
            if let Ok(Some(link)) = self.take_one(socket) {
                linked(link);
            }
        }
    }

    pub(super) fn take_one(&self, mut socket: UnixStream) -> io::Result<Option<Link>> {
        socket.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        let (hail, mut files) = receive::<CallMessage>(&mut socket).map_err(io::Error::other)?;
        let answer = self.calling.answer(hail.cell, hail.versions);
        if !matches!(answer, CallAnswer::Welcome { .. }) {
            send(&mut socket, &answer, &[]).map_err(io::Error::other)?;
            return Ok(None);
        }
        let link = self.welcome(&hail, &mut files, socket, answer);
        if link.is_err() {
            self.calling.forget(hail.cell);
        }
        link.map(Some)
    }

    /// Answers a caller that gets a link, and makes it.
    fn welcome(
        &self,
        hail: &CallMessage,
        files: &mut ReceivedFiles,
        mut socket: UnixStream,
        answer: CallAnswer,
    ) -> io::Result<Link> {
        let ring = |file: OwnedFd| {
            SharedRing::attach(&file)
                .map(|ring| (ring, file))
                .map_err(io::Error::other)
        };
        let (incoming, ours) = ring(files.take(hail.from).map_err(io::Error::other)?.into())?;
        let (outgoing, _) = ring(files.take(hail.to).map_err(io::Error::other)?.into())?;
        send(&mut socket, &answer, &[]).map_err(io::Error::other)?;
        let version = agree(hail.versions, hail.cell).map_err(io::Error::other)?;
        let link = self.link(hail.cell, outgoing, incoming, &ours, socket)?;
        Ok(link.speaking(version))
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
        let (ring, watched) = (
            SharedRing::attach(ours).map_err(io::Error::other)?,
            socket.try_clone()?,
        );
        let watch = move || {
            // A process that is killed closes no channel; the kernel closes its sockets.
            let _ = (&watched).read(&mut [0]);
            end(&ring, &Block::Futex);
        };
        let rings = Rings {
            outgoing,
            incoming,
            block: Block::Futex,
            block_ns: self.block_ns,
            keep: Arc::new(()),
        };
        Ok(rings.link(peer, Transport::Ring, socket, watch))
    }
}

/// A call that comes without the rings that it names.
#[cfg(test)]
pub(super) fn hail_without_rings(cell: CellId) -> impl Serialize {
    CallMessage {
        cell,
        versions: VERSIONS,
        to: Fd(0),
        from: Fd(1),
    }
}
