//! A connection for DNS over TCP without a gateway, for `fuzz/`: a run depends on its input only.
//!
//! It is compiled under `cfg(fuzzing)` only, which `scripts/fuzz.sh` sets.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use subnet::network::{Card, Limits, Network, Settings, dns};

use super::*;

const CARD: CardId = CardId(1);
/// Longest answer of the host's resolver.
const ANSWER_BYTES_MAX: usize = 65_535;
/// Number of turns after which a connection without new input is at rest. Each one asks several queries.
const TURNS_MAX: usize = 10_000;

/// A guest that the input plays, its connection, and what the connection must do.
pub struct Conversation {
    streams: DnsStreams,
    network: Network,
    guest: UnixStream,
    now: Instant,
    /// Bytes that the guest has sent, and the number of those that were passed on as queries.
    sent: Vec<u8>,
    asked: usize,
    /// Queries at the host's resolver.
    pending: Vec<StreamId>,
    /// Bytes that the guest is to receive, and the number of those that it has received.
    expected: Vec<u8>,
    received: usize,
    /// Whether the connection may have ended without the rest of its answers.
    may_be_cut: bool,
}

impl Conversation {
    /// Begins with a network of two VMs, and a connection of one of them.
    ///
    /// # Panics
    /// If the kernel has no sockets left.
    pub fn new() -> Self {
        let now = Instant::now();
        let mut network = Network::new(Settings::new("n"), now);
        for (number, name) in [(1, "web"), (2, "db")] {
            let card = Card {
                name: name.to_owned(),
                mac: [2, 0, 0, 0, 0, number],
                address: None,
                outside: true,
                limits: Limits::default(),
            };
            let id = CardId(number.into());
            network.attach(id, card, now).expect("a free name and address");
        }
        let (guest, server) = UnixStream::pair().expect("a pair of sockets");
        guest.set_nonblocking(true).expect("a socket");
        let mut streams = DnsStreams::new().expect("an epoll");
        let end = DnsStream {
            card: CARD,
            socket: server.into(),
        };
        streams.add(end, now);
        Self {
            streams,
            network,
            guest,
            now,
            sent: Vec::new(),
            asked: 0,
            pending: Vec::new(),
            expected: Vec::new(),
            received: 0,
            may_be_cut: false,
        }
    }

    /// Sends bytes of the guest, as many as the socket takes.
    pub fn send(&mut self, bytes: &[u8]) {
        if let Ok(count) = self.guest.write(bytes) {
            self.sent.extend(&bytes[..count]);
        }
    }

    /// Ends the guest's direction.
    pub fn end(&mut self) {
        let _ = self.guest.shutdown(Shutdown::Write);
    }

    /// Lets time pass.
    pub fn wait(&mut self, time: Duration) {
        self.now += time;
        self.may_be_cut |= time >= IDLE_LIMIT / 64;
    }

    /// Receives up to `count` bytes as the guest, and compares them with the answers.
    ///
    /// # Panics
    /// If they differ.
    pub fn receive(&mut self, count: usize) -> usize {
        let mut bytes = vec![0; count];
        let count = self.guest.read(&mut bytes).unwrap_or(0);
        let until = self.received + count;
        assert_eq!(self.expected.get(self.received..until), Some(&bytes[..count]));
        self.received = until;
        count
    }

    /// Answers one of the queries at the host's resolver, in any order, with this many bytes.
    pub fn answer(&mut self, which: usize, count: usize) {
        if self.pending.is_empty() {
            return;
        }
        let id = self.pending.swap_remove(which % self.pending.len());
        let message = vec![which as u8; count % (ANSWER_BYTES_MAX + 64)];
        if self.streams.streams.contains_key(&id) {
            expect(&mut self.expected, &message);
        }
        self.streams.answer(id, &message, self.now);
    }

    /// Serves the connection once.
    ///
    /// # Panics
    /// If a query is other than the guest sent it, or a bound is exceeded.
    pub fn turn(&mut self) {
        let Self {
            streams,
            network,
            sent,
            asked,
            pending,
            expected,
            may_be_cut,
            ..
        } = self;
        streams.turn(self.now, &mut |id, card, query| {
            assert_eq!(next_message(&sent[*asked..]), Some(query));
            *asked += LENGTH_BYTES + query.len();
            match network.decide_query(card, query) {
                dns::Decision::Answer(answer) => {
                    expect(expected, &answer);
                    Outcome::Answer(answer)
                }
                dns::Decision::Upstream => {
                    pending.push(id);
                    Outcome::Later
                }
                dns::Decision::Ignore => {
                    *may_be_cut = true;
                    Outcome::End
                }
            }
        });
        if let Some(stream) = self.streams.streams.values().next() {
            assert!(stream.input.len() <= LENGTH_BYTES + QUERY_BYTES_MAX);
            assert!(
                stream.output.len()
                    <= OUTPUT_BYTES_MAX + (PENDING_MAX + 1) * (LENGTH_BYTES + ANSWER_BYTES_MAX)
            );
            assert!(stream.pending <= PENDING_MAX && stream.pending == self.pending.len());
        }
    }

    /// Answers and receives all, until the connection is at rest.
    ///
    /// # Panics
    /// If it keeps an answer or a whole query back, or does not come to rest.
    pub fn finish(mut self) {
        let mut turns = 0;
        loop {
            let before = (self.asked, self.received, self.pending.len());
            self.answer(0, 100);
            self.receive(1 << 20);
            self.turn();
            if (self.asked, self.received, self.pending.len()) == before {
                break;
            }
            turns += 1;
            assert!(turns < TURNS_MAX, "it does not come to rest");
        }
        let waiting = next_message(&self.sent[self.asked..]);
        let is_long = self.sent[self.asked..]
            .first_chunk()
            .is_some_and(|length| usize::from(u16::from_be_bytes(*length)) > QUERY_BYTES_MAX);
        if !self.may_be_cut && !is_long {
            assert_eq!(self.received, self.expected.len());
            assert_eq!(waiting, None);
        }
        if is_long {
            assert!(self.streams.streams.is_empty());
        }
    }
}

impl Default for Conversation {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the message at the start of `bytes`, if it is whole.
fn next_message(bytes: &[u8]) -> Option<&[u8]> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.get(..usize::from(u16::from_be_bytes(*length)))
}

/// Adds a message that the guest is to receive. One that is too long for DNS is left out.
fn expect(expected: &mut Vec<u8>, message: &[u8]) {
    if let Ok(length) = u16::try_from(message.len()) {
        expected.extend(length.to_be_bytes());
        expected.extend(message);
    }
}
