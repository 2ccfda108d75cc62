//! Relay between a card and its passt, which drops frames that the guest may not send.
//!
//! It has a separate process ([`crate::process`]) with one thread. No socket blocks that thread: each
//! direction has a buffer for two frames of the largest size, and reads more once the buffer's whole frames
//! are sent. The end of either side ends the relay.

mod frames;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};

use self::frames::{Frames, LENGTH_BYTES};
use crate::filter::{Barred, Peers, Resolvers, admits};
use crate::listing::{Freshness, Listing};
use crate::process::message::{ASK, MESSAGE_BYTES_MAX, Message};

/// Reason for the end of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The card's socket has closed.
    Card,
    /// passt's socket has closed.
    Passt,
    /// The card's stream has an impossible length of a frame.
    CardBroken,
    /// passt's stream has an impossible length of a frame.
    PasstBroken,
}

impl End {
    const ALL: [Self; 4] = [Self::Card, Self::Passt, Self::CardBroken, Self::PasstBroken];

    /// Returns the exit status of a relay's process with this end.
    pub fn status(self) -> u8 {
        match self {
            Self::Card => 0,
            Self::Passt => 3,
            Self::CardBroken => 4,
            Self::PasstBroken => 5,
        }
    }

    /// Returns the end with this `status`; none for a process that failed.
    pub fn of_status(status: i32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|end| i32::from(end.status()) == status)
    }

    /// Returns the text that a relay's process writes at this end, for a reader that does not receive its
    /// exit status.
    pub fn words(self) -> &'static str {
        match self {
            Self::Card => "the card has ended",
            Self::Passt => "passt has ended",
            Self::CardBroken => "the shard sent a length that no frame has",
            Self::PasstBroken => "passt sent a length that no frame has",
        }
    }

    /// Returns the end with this text; none for a process that failed.
    pub fn of_words(words: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|end| end.words() == words)
    }
}

/// The descriptors of a relay.
#[derive(Debug)]
pub struct Sockets {
    /// Stream to the card.
    pub card: OwnedFd,
    /// Stream to passt.
    pub passt: OwnedFd,
    /// Socket of the lists of barred addresses.
    pub lists: OwnedFd,
    /// Number of dropped frames, eight bytes, little endian.
    pub count: File,
}

/// A relay with the incomplete bytes of both directions.
#[derive(Debug)]
pub struct Relay {
    sockets: Sockets,
    /// Whether lists may still arrive.
    has_lists: bool,
    listing: Listing,
    resolvers: Resolvers,
    peers: Peers,
    /// Bytes from the card to passt.
    outgoing: Frames,
    /// Bytes from passt to the card.
    incoming: Frames,
    /// Number of dropped frames, including those before this relay's start.
    dropped: u64,
    message: Vec<u8>,
}

impl Relay {
    /// Creates a relay that begins with the list `barred`. `udp_ports` of the guest are forwarded.
    pub fn new(sockets: Sockets, barred: Barred, resolvers: Resolvers, udp_ports: Vec<u16>) -> Self {
        let mut dropped = [0; 8];
        // A count that cannot be read restarts at 0.
        let _ = sockets.count.read_exact_at(&mut dropped, 0);
        Self {
            sockets,
            has_lists: true,
            listing: Listing::new(barred, Instant::now()),
            resolvers,
            peers: Peers::new(udp_ports),
            outgoing: Frames::new(),
            incoming: Frames::new(),
            dropped: u64::from_le_bytes(dropped),
            message: vec![0; MESSAGE_BYTES_MAX],
        }
    }

    /// Moves frames until one side ends.
    ///
    /// # Errors
    /// Fails if the kernel does not wait for the sockets.
    pub fn run(&mut self) -> io::Result<End> {
        loop {
            let now = Instant::now();
            let moved = self.send_out(now).and_then(|()| self.send_in(now));
            if let Err(end) = moved {
                return Ok(end);
            }
            if let Some(end) = self.wait(now)? {
                return Ok(end);
            }
        }
    }

    /// Sends the card's frames to passt as far as it has room, one per call: passt loses its position if it
    /// receives a part of a frame, and the kernel takes a small message whole or not at all.
    fn send_out(&mut self, now: Instant) -> Result<(), End> {
        let before = self.dropped;
        let moved = self.send_admitted(now);
        if self.dropped != before {
            // The count is for people; frames are sent without it.
            let _ = self.sockets.count.write_all_at(&self.dropped.to_le_bytes(), 0);
        }
        moved
    }

    fn send_admitted(&mut self, now: Instant) -> Result<(), End> {
        loop {
            if !self.outgoing.send(&self.sockets.passt).map_err(|_| End::Passt)? {
                return Ok(());
            }
            let Some(frame) = self.outgoing.next_frame().map_err(|_| End::CardBroken)? else {
                return Ok(());
            };
            match self.listing.freshness(now) {
                Freshness::Usable => {}
                Freshness::Held(_) => return Ok(()),
                Freshness::Stale => {
                    self.ask(now);
                    return Ok(());
                }
            }
            let bytes = LENGTH_BYTES + frame.len();
            if admits(frame, self.listing.barred(), &self.resolvers, &self.peers, now) {
                self.outgoing.pass(bytes);
            } else {
                self.outgoing.skip(bytes);
                self.dropped = self.dropped.wrapping_add(1);
            }
        }
    }

    /// Requests the current list.
    fn ask(&mut self, now: Instant) {
        self.listing.asked(now);
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        // Without a reply the list stays unchanged.
        let _ = send(self.sockets.lists.as_raw_fd(), &[ASK], flags);
    }

    /// Sends passt's frames to the card as far as it has room, and records those that arrive at forwarded UDP
    /// ports.
    fn send_in(&mut self, now: Instant) -> Result<(), End> {
        let notes = self.peers.are_possible();
        while let Some(frame) = self.incoming.next_frame().map_err(|_| End::PasstBroken)? {
            if notes {
                self.peers.note(frame, now);
            }
            let bytes = LENGTH_BYTES + frame.len();
            self.incoming.pass(bytes);
        }
        self.incoming.send(&self.sockets.card).map_err(|_| End::Card)?;
        Ok(())
    }

    /// Waits for events, and reads the available bytes.
    fn wait(&mut self, now: Instant) -> io::Result<Option<End>> {
        let wanted = |is_wanted: bool, flag: PollFlags| if is_wanted { flag } else { PollFlags::empty() };
        let held = match self.listing.freshness(now) {
            Freshness::Held(until) => Some(until),
            Freshness::Usable | Freshness::Stale => None,
        };
        let (out_sent, in_sent) = (self.outgoing.is_sent(), self.incoming.is_sent());
        let card =
            wanted(out_sent && held.is_none(), PollFlags::POLLIN) | wanted(!in_sent, PollFlags::POLLOUT);
        let passt = wanted(in_sent, PollFlags::POLLIN) | wanted(!out_sent, PollFlags::POLLOUT);
        let mut files = [
            PollFd::new(self.sockets.card.as_fd(), card),
            PollFd::new(self.sockets.passt.as_fd(), passt),
            PollFd::new(self.sockets.lists.as_fd(), PollFlags::POLLIN),
        ];
        let watched = if self.has_lists {
            &mut files[..]
        } else {
            &mut files[..2]
        };
        match poll(watched, limit(held, now)) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let [card, passt, lists] = files.map(|file| file.revents().unwrap_or(PollFlags::empty()));
        if lists.intersects(PollFlags::POLLIN | GONE) {
            self.receive_list(Instant::now());
        }
        for (events, end) in [(card, End::Card), (passt, End::Passt)] {
            if events.intersects(GONE) {
                return Ok(Some(end));
            }
        }
        if card.contains(PollFlags::POLLIN) && self.outgoing.receive(&self.sockets.card).is_err() {
            return Ok(Some(End::Card));
        }
        if passt.contains(PollFlags::POLLIN) && self.incoming.receive(&self.sockets.passt).is_err() {
            return Ok(Some(End::Passt));
        }
        Ok(None)
    }

    /// Receives an available list. Without a sender the last one stays.
    fn receive_list(&mut self, now: Instant) {
        match recv(
            self.sockets.lists.as_raw_fd(),
            &mut self.message,
            MsgFlags::MSG_DONTWAIT,
        ) {
            Ok(0) => self.has_lists = false,
            Ok(bytes) => match Message::read(&self.message[..bytes]) {
                Some(Message::Same) => self.listing.is_confirmed(now),
                Some(Message::List(barred)) => self.listing.replace(barred, now),
                // The sender is not the monitor.
                None => self.has_lists = false,
            },
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(_) => self.has_lists = false,
        }
    }
}

/// Events of a socket whose other end has closed.
const GONE: PollFlags = PollFlags::POLLHUP
    .union(PollFlags::POLLERR)
    .union(PollFlags::POLLNVAL);

/// Returns the longest time to wait: until `held` frames are sent without a reply.
fn limit(held: Option<Instant>, now: Instant) -> PollTimeout {
    held.map_or(PollTimeout::NONE, |until| {
        let milliseconds = until.saturating_duration_since(now).as_millis() + 1;
        u16::try_from(milliseconds).map_or(PollTimeout::MAX, PollTimeout::from)
    })
}

#[cfg(test)]
mod tests;
