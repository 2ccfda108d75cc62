//! The other nodes of one page server, and outgoing messages. Each is sent at once, except that the requests
//! of one fault are sent together.

use std::io;
use std::sync::Arc;

use crate::PAGE_LEN;
use crate::frame::{FRAME_BYTES, Frame};
use crate::link::Link;
use crate::prefetch::WINDOW_MAX;
use crate::shutdown::End;

/// Bytes of a request and its prefetches.
const GATHERED_BYTES: usize = (1 + WINDOW_MAX as usize) * FRAME_BYTES;

/// Requests of one fault: for its page and those after it.
#[derive(Debug)]
struct Gathered {
    /// Whether a fault is being handled.
    is_open: bool,
    to: usize,
    /// Whether they go on the bulk stream.
    with_answers: bool,
    bytes: usize,
    frames: [u8; GATHERED_BYTES],
}

impl Default for Gathered {
    fn default() -> Self {
        Self {
            is_open: false,
            to: 0,
            with_answers: false,
            bytes: 0,
            frames: [0; GATHERED_BYTES],
        }
    }
}

/// The other nodes.
#[derive(Debug)]
pub struct Peers {
    /// Link to each node; none to this one.
    pub links: Vec<Option<Link>>,
    names: Arc<Vec<String>>,
    gathered: Gathered,
    /// Bytes sent to all other nodes together.
    pub bytes_sent: u64,
}

impl Peers {
    /// Creates the state, with the nodes' names for users.
    pub fn new(links: Vec<Option<Link>>, names: Arc<Vec<String>>) -> Self {
        Self {
            links,
            names,
            gathered: Gathered::default(),
            bytes_sent: 0,
        }
    }

    /// Returns a node's name for users.
    pub fn name(&self, node: usize) -> String {
        self.names
            .get(node)
            .cloned()
            .unwrap_or_else(|| format!("node {node}"))
    }

    /// Returns the node with that name.
    pub fn number_of(&self, name: &str) -> Option<usize> {
        (0..self.links.len()).find(|&node| self.name(node) == name)
    }

    /// Returns the reason of the end for a failed stream of a node.
    pub fn lost(&self, node: usize, error: &io::Error) -> End {
        let why = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "it closed its streams".to_owned()
            }
            io::ErrorKind::TimedOut => "it does not answer".to_owned(),
            _ => error.to_string(),
        };
        End::Lost {
            node: self.name(node),
            why,
        }
    }

    /// Sends messages of the engine, the last one with its page if it has one. A message without a page may
    /// use the bulk stream too.
    ///
    /// # Errors
    /// If there is no such node, or its stream failed.
    pub fn post(
        &mut self,
        to: usize,
        frames: &[u8],
        page: Option<*const [u8; PAGE_LEN]>,
        with_answers: bool,
    ) -> Result<(), End> {
        let Some(link) = self.links.get_mut(to).and_then(Option::as_mut) else {
            return Err(End::ProtocolError(format!(
                "the protocol has a message for node {to}, which does not exist"
            )));
        };
        let result = match page {
            Some(page) => {
                self.bytes_sent += (frames.len() + PAGE_LEN) as u64;
                // SAFETY: a page of the region, which no thread may write since the engine has it sent.
                unsafe { link.send_page(frames, page) }
            }
            None => {
                self.bytes_sent += frames.len() as u64;
                link.send(frames, with_answers)
            }
        };
        result.map_err(|error| self.lost(to, &error))
    }

    /// Sends fragments of a merge payload. Sends nothing to this node itself.
    ///
    /// # Errors
    /// If the stream failed.
    pub fn post_fragments(&mut self, to: usize, frames: &[u8]) -> Result<(), End> {
        let Some(link) = self.links.get_mut(to).and_then(Option::as_mut) else {
            return Ok(());
        };
        self.bytes_sent += frames.len() as u64;
        let result = link.send(frames, false);
        result.map_err(|error| self.lost(to, &error))
    }

    /// Returns whether requests are being gathered.
    pub fn is_gathering(&self) -> bool {
        self.gathered.is_open
    }

    /// Gathers requests until [`Peers::send_gathered`].
    pub fn gather(&mut self) {
        self.gathered.is_open = true;
    }

    /// Sends the gathered requests in order.
    ///
    /// # Errors
    /// If a stream failed.
    pub fn send_gathered(&mut self) -> Result<(), End> {
        self.gathered.is_open = false;
        self.flush_gathered()
    }

    fn flush_gathered(&mut self) -> Result<(), End> {
        let Gathered {
            to,
            bytes,
            with_answers,
            ..
        } = self.gathered;
        self.gathered.bytes = 0;
        if bytes > 0
            && let Some(link) = self.links.get_mut(to).and_then(Option::as_mut)
        {
            self.bytes_sent += bytes as u64;
            let result = link.send(&self.gathered.frames[..bytes], with_answers);
            return result.map_err(|error| self.lost(to, &error));
        }
        Ok(())
    }

    /// Gathers a request.
    ///
    /// # Errors
    /// If the stream of the earlier requests failed.
    pub fn gather_one(&mut self, to: usize, frame: &Frame, with_answers: bool) -> Result<(), End> {
        let is_full = self.gathered.bytes == self.gathered.frames.len();
        let flushed = match is_full || (self.gathered.to, self.gathered.with_answers) != (to, with_answers) {
            true => self.flush_gathered(),
            false => Ok(()),
        };
        let gathered = &mut self.gathered;
        (gathered.to, gathered.with_answers) = (to, with_answers);
        gathered.frames[gathered.bytes..][..FRAME_BYTES].copy_from_slice(frame);
        gathered.bytes += FRAME_BYTES;
        flushed
    }
}
