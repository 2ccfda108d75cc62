//! Channels between two cells of a host: a ring each way in memory that both map, and a socket whose end tells that the
//! other process died.
//!
//! A cell that starts dials all that run. Two that start at once dial each other; the lower-numbered one's call goes through.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use protocol::CellId;
use serde::{Deserialize, Serialize};
use shard::launch::Fd;
use shard::process::{receive, send};
use urpc::SendError;
use urpc::fragment::{Assembly, Parts};
use urpc::host::{Block, Inbox, Outbox, SharedRing, end};

use super::files::Files;
use super::state::CellMessage;

/// Messages that a channel holds.
const LINES: usize = 1024;
/// Bytes of what one cell tells another at once, at most: a table of some ten thousand VMs.
const MESSAGE_BYTES_MAX: usize = 2 << 20;
/// How long another cell may take to answer a call, or to take a message.
const PATIENCE: Duration = Duration::from_secs(2);
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

/// The answer.
#[derive(Serialize, Deserialize)]
enum Answer {
    Welcome(CellId),
    /// I am calling you.
    Crossed,
}

/// Both channels to another cell.
#[derive(Debug)]
pub struct Link {
    /// Who is at the other end.
    pub peer: CellId,
    outbox: Outbox,
    inbox: Inbox,
    /// To be ended when the other process is gone.
    ring: SharedRing,
    socket: UnixStream,
}

/// The half that sends.
#[derive(Debug)]
pub struct Sending {
    outbox: Outbox,
    /// Ends the other half, too.
    socket: UnixStream,
}

/// The half that receives.
#[derive(Debug)]
pub struct Receiving {
    peer: CellId,
    inbox: Inbox,
    ring: SharedRing,
    socket: UnixStream,
}

/// Who is calling whom, for calls that cross.
#[derive(Debug)]
pub struct Calls {
    me: CellId,
    block_ns: u64,
    calling: Mutex<BTreeSet<u16>>,
}

impl Calls {
    /// None under way. `block_ns` as for [`Inbox::new`].
    pub fn new(me: CellId, block_ns: u64) -> Self {
        Self {
            me,
            block_ns,
            calling: Mutex::default(),
        }
    }

    fn calling(&self) -> std::sync::MutexGuard<'_, BTreeSet<u16>> {
        self.calling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls every other cell of the plan that runs. True for those that are calling this one just now.
    pub fn call_all(&self, files: &Files, linked: impl Fn(Link)) -> io::Result<BTreeSet<u16>> {
        let mut crossed = BTreeSet::new();
        for cell in files.plan()? {
            if cell.number == self.me.number {
                continue;
            }
            self.calling().insert(cell.number);
            let called = self.call(&files.cell(cell.number).link_socket());
            self.calling().remove(&cell.number);
            match called {
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
        if self.me.number < hail.cell.number && self.calling().contains(&hail.cell.number) {
            send(&mut socket, &Answer::Crossed, &[]).map_err(io::Error::other)?;
            return Ok(None);
        }
        let ring = |file: OwnedFd| {
            SharedRing::attach(&file)
                .map(|ring| (ring, file))
                .map_err(io::Error::other)
        };
        let (incoming, ours) = ring(files.take(hail.from).map_err(io::Error::other)?.into())?;
        let (outgoing, _) = ring(files.take(hail.to).map_err(io::Error::other)?.into())?;
        send(&mut socket, &Answer::Welcome(self.me), &[]).map_err(io::Error::other)?;
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
        Ok(Link {
            peer,
            outbox: Outbox::new(outgoing, Block::Futex, self.block_ns),
            inbox: Inbox::new(incoming, Block::Futex, self.block_ns),
            ring: SharedRing::attach(ours).map_err(io::Error::other)?,
            socket,
        })
    }
}

impl Link {
    /// Its halves, for two threads.
    pub fn split(self) -> io::Result<(Sending, Receiving)> {
        let sending = Sending {
            outbox: self.outbox,
            socket: self.socket.try_clone()?,
        };
        let receiving = Receiving {
            peer: self.peer,
            inbox: self.inbox,
            ring: self.ring,
            socket: self.socket,
        };
        Ok((sending, receiving))
    }
}

impl Sending {
    /// Sends a message.
    ///
    /// # Errors
    /// `BrokenPipe` if the other cell has ended the link, `TimedOut` if it has taken nothing for two seconds.
    pub fn send(&mut self, message: &CellMessage) -> io::Result<()> {
        let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::other("the table is too large for a message"));
        }
        let deadline = Some(Instant::now() + PATIENCE);
        for part in Parts::of(PORT, &bytes) {
            if self.outbox.post(&part).is_err() {
                self.outbox.send(&part, deadline).map_err(|error| match error {
                    SendError::Full => io::Error::new(io::ErrorKind::TimedOut, error),
                    gone => io::Error::new(io::ErrorKind::BrokenPipe, gone),
                })?;
            }
        }
        self.outbox.flush();
        Ok(())
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        // The other half, here and there, reads its end.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl Receiving {
    /// Gives every message to `heard`, and returns when the other cell is dead or makes no sense.
    pub fn run(self, mut heard: impl FnMut(CellMessage)) {
        let Self {
            mut inbox,
            ring,
            socket,
            peer,
        } = self;
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
                Ok(Some((_, bytes))) => match postcard::from_bytes(bytes) {
                    Ok(message) => heard(message),
                    Err(_) => return,
                },
                Err(_) => return,
            }
        }
    }
}
