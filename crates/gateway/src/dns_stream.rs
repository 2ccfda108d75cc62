//! DNS over TCP: messages of guests' connections to their gateway, each with its length before it (RFC 7766).
//!
//! A connection answers its queries in the order of their answers. One with an unknown message, or without a
//! query for [`IDLE_LIMIT`], ends.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{MsgFlags, recv, send};
use subnet::nat::DnsStream;
use subnet::network::CardId;

/// Greatest number of connections, of all cards and of one.
const STREAMS_MAX: usize = 256;
const STREAMS_PER_CARD_MAX: usize = 16;
/// Greatest number of a connection's queries that wait for the host's resolver. Others wait in its socket.
const PENDING_MAX: usize = 8;
/// Longest query. A name has 255 bytes, and extended DNS adds little.
const QUERY_BYTES_MAX: usize = 4096;
/// Bytes of answers that a guest has not taken, from which on its queries wait. One more answer has at most
/// 64 KiB.
const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// Time after which a connection without a query ends.
const IDLE_LIMIT: Duration = Duration::from_secs(10);
/// Bytes before a message: its length.
const LENGTH_BYTES: usize = 2;
const EVENTS_MAX: usize = 64;

/// Number of a connection. None is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamId(u64);

/// Outcome of a query.
pub(crate) enum Outcome {
    /// This is the answer.
    Answer(Vec<u8>),
    /// The answer comes later, by [`DnsStreams::answer`].
    Later,
    /// The message is no query: the connection ends.
    End,
}

/// A connection.
#[derive(Debug)]
struct Stream {
    end: DnsStream,
    /// Received bytes: the start of a query at least.
    input: Vec<u8>,
    /// Answers, without the bytes that were sent.
    output: Vec<u8>,
    /// Number of queries without an answer.
    pending: usize,
    is_readable: bool,
    is_writable: bool,
    /// Whether the guest has ended its direction.
    has_ended: bool,
    deadline: Instant,
}

/// Connections of guests to their gateway's DNS.
#[derive(Debug)]
pub(crate) struct DnsStreams {
    epoll: Epoll,
    streams: BTreeMap<StreamId, Stream>,
    next: u64,
    /// Connections to serve in the next turn.
    ready: BTreeSet<StreamId>,
}

impl DnsStreams {
    /// Creates an empty list.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            streams: BTreeMap::new(),
            next: 0,
            ready: BTreeSet::new(),
        })
    }

    /// Adds a connection. Beyond the limits it ends at once.
    pub(crate) fn add(&mut self, end: DnsStream, now: Instant) {
        let of_card = self.streams.values().filter(|other| other.end.card == end.card);
        if self.streams.len() >= STREAMS_MAX || of_card.count() >= STREAMS_PER_CARD_MAX {
            return;
        }
        self.next += 1;
        let id = StreamId(self.next);
        let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
        if self.epoll.add(&end, EpollEvent::new(events, id.0)).is_err() {
            return;
        }
        let stream = Stream {
            end,
            input: Vec::new(),
            output: Vec::new(),
            pending: 0,
            is_readable: true,
            is_writable: true,
            has_ended: false,
            deadline: now + IDLE_LIMIT,
        };
        self.streams.insert(id, stream);
        self.ready.insert(id);
    }

    /// Handles events, and passes each query to `ask`.
    pub(crate) fn turn(&mut self, now: Instant, ask: &mut dyn FnMut(StreamId, CardId, &[u8]) -> Outcome) {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        // The wait does not block. A failure to wait is one to wait again.
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            let id = StreamId(event.data());
            if let Some(stream) = self.streams.get_mut(&id) {
                let is_gone = event
                    .events()
                    .intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
                stream.is_readable |= is_gone || event.events().contains(EpollFlags::EPOLLIN);
                stream.is_writable |= is_gone || event.events().contains(EpollFlags::EPOLLOUT);
                self.ready.insert(id);
            }
        }
        for id in std::mem::take(&mut self.ready) {
            if let Some(stream) = self.streams.get_mut(&id)
                && !stream.serve(now, &mut |card, query| ask(id, card, query))
            {
                self.streams.remove(&id);
            }
        }
        self.streams.retain(|_, stream| stream.deadline > now);
    }

    /// Takes the answer to a query that [`Outcome::Later`] promised; none ends the connection.
    pub(crate) fn answer(&mut self, id: StreamId, message: &[u8], now: Instant) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.pending = stream.pending.saturating_sub(1);
            stream.deadline = now + IDLE_LIMIT;
            stream.push(message);
            self.ready.insert(id);
        }
    }

    /// Ends the connections of a card.
    pub(crate) fn remove_card(&mut self, card: CardId) {
        self.streams.retain(|_, stream| stream.end.card != card);
    }

    /// Returns the time at which [`Self::turn`] must be called without events.
    pub(crate) fn deadline(&self, now: Instant) -> Option<Instant> {
        let deadlines = self.streams.values().map(|stream| stream.deadline);
        deadlines.chain((!self.ready.is_empty()).then_some(now)).min()
    }
}

impl AsFd for DnsStreams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

impl Stream {
    /// Moves bytes and asks queries as far as there is room. Returns whether the connection goes on.
    fn serve(&mut self, now: Instant, ask: &mut dyn FnMut(CardId, &[u8]) -> Outcome) -> bool {
        loop {
            if !self.flush() {
                return false;
            }
            let is_read = self.fill();
            let Some(asked) = self.ask_queries(now, ask) else {
                return false;
            };
            if !is_read && asked == 0 {
                break;
            }
        }
        let is_idle = self.pending == 0 && self.output.is_empty();
        !(self.has_ended && is_idle)
    }

    /// Reads what fits. Returns whether there was anything.
    fn fill(&mut self) -> bool {
        let mut buffer = [0; LENGTH_BYTES + QUERY_BYTES_MAX];
        let room = buffer.len().saturating_sub(self.input.len());
        if !self.is_readable || self.has_ended || room == 0 {
            return false;
        }
        let socket = self.end.socket.as_raw_fd();
        match recv(socket, &mut buffer[..room], MsgFlags::MSG_DONTWAIT) {
            Ok(0) => {
                self.has_ended = true;
                false
            }
            Ok(bytes) => {
                self.input.extend(&buffer[..bytes]);
                true
            }
            Err(Errno::EAGAIN) => {
                self.is_readable = false;
                false
            }
            Err(Errno::EINTR) => true,
            Err(_) => {
                self.has_ended = true;
                false
            }
        }
    }

    /// Asks the whole queries of the input. Returns their number; none if one is malformed.
    fn ask_queries(&mut self, now: Instant, ask: &mut dyn FnMut(CardId, &[u8]) -> Outcome) -> Option<usize> {
        let mut asked = 0;
        while self.pending < PENDING_MAX && self.output.len() < OUTPUT_BYTES_MAX {
            let Some((length, rest)) = self.input.split_first_chunk::<LENGTH_BYTES>() else {
                break;
            };
            let bytes = usize::from(u16::from_be_bytes(*length));
            if bytes > QUERY_BYTES_MAX {
                return None;
            }
            let Some(query) = rest.get(..bytes) else { break };
            match ask(self.end.card, query) {
                Outcome::Answer(answer) => self.push(&answer),
                Outcome::Later => self.pending += 1,
                Outcome::End => return None,
            }
            self.input.drain(..LENGTH_BYTES + bytes);
            self.deadline = now + IDLE_LIMIT;
            asked += 1;
        }
        Some(asked)
    }

    /// Adds an answer. One that is too long for DNS is left out.
    fn push(&mut self, message: &[u8]) {
        if let Ok(length) = u16::try_from(message.len()) {
            self.output.extend(length.to_be_bytes());
            self.output.extend(message);
        }
    }

    /// Sends answers. Returns whether the guest may get more.
    fn flush(&mut self) -> bool {
        while self.is_writable && !self.output.is_empty() {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(self.end.socket.as_raw_fd(), &self.output, flags) {
                Ok(bytes) => {
                    self.output.drain(..bytes);
                }
                Err(Errno::EAGAIN) => self.is_writable = false,
                Err(Errno::EINTR) => {}
                Err(_) => return false,
            }
        }
        true
    }
}

#[cfg(fuzzing)]
pub mod fuzzing;
#[cfg(test)]
mod tests;
