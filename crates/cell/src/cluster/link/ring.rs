//! Channels through rings: one in each direction in memory that both processes map, and a socket whose end is
//! the end of both.

use std::any::Any;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use protocol::CellId;
use urpc::SendError;
use urpc::fragment::{Assembly, Parts};
use urpc::host::{Block, BlockingReceiver, BlockingSender, SharedRing};

use super::{Link, MESSAGE_BYTES_MAX, MESSAGE_TIMEOUT, ReceiveBytes, SendBytes, Transport};

/// Messages that a channel holds.
pub const LINES: usize = 1024;
/// Port of the messages, all of which are of one kind.
const PORT: u16 = 0;

/// The rings of a link.
#[derive(Debug)]
pub struct Rings {
    /// Ring to the other cell.
    pub outgoing: SharedRing,
    /// Ring from the other cell.
    pub incoming: SharedRing,
    /// The way in which this side blocks.
    pub block: Block,
    /// As for [`BlockingReceiver::new`].
    pub block_ns: u64,
    /// Value that lives as long as either half of the link.
    pub keep: Arc<dyn Any + Send + Sync>,
}

#[derive(Debug)]
struct ToRing {
    outbox: BlockingSender,
    /// Socket whose shutdown ends the other half, too.
    socket: UnixStream,
    _keep: Arc<dyn Any + Send + Sync>,
}

struct FromRing {
    peer: CellId,
    inbox: BlockingReceiver,
    /// Returns when the other process is gone and both rings are closed.
    watch: Box<dyn FnOnce() + Send>,
    keep: Arc<dyn Any + Send + Sync>,
}

impl Rings {
    /// The link to `peer` through the rings. `watch` reads `socket` on its own thread, and closes the
    /// incoming ring when that has ended.
    pub fn link(
        self,
        peer: CellId,
        way: Transport,
        socket: UnixStream,
        watch: impl FnOnce() + Send + 'static,
    ) -> Link {
        let sending = ToRing {
            outbox: BlockingSender::new(self.outgoing, self.block.clone(), self.block_ns),
            socket,
            _keep: self.keep.clone(),
        };
        let receiving = FromRing {
            peer,
            inbox: BlockingReceiver::new(self.incoming, self.block, self.block_ns),
            watch: Box::new(watch),
            keep: self.keep,
        };
        Link::new(peer, way, sending, receiving)
    }
}

impl SendBytes for ToRing {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        // The deadline is set when it is needed: most messages find room, and the clock costs as much as a
        // message.
        let mut deadline = None;
        for part in Parts::of(PORT, bytes) {
            if self.outbox.post(&part).is_err() {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + MESSAGE_TIMEOUT);
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
        // The other half, here and there, reads the end of its channel.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl ReceiveBytes for FromRing {
    fn run(self: Box<Self>, heard: &mut dyn FnMut(&[u8]) -> io::Result<()>) {
        let Self {
            peer,
            // Until the receiver of the messages is gone, which is dropped after this thread.
            keep: _keep,
            mut inbox,
            watch,
        } = *self;
        let watch = std::thread::Builder::new()
            .name(format!("watch {peer}"))
            .spawn(watch);
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

impl std::fmt::Debug for FromRing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("FromRing")
            .field("inbox", &self.inbox)
            .finish_non_exhaustive()
    }
}
