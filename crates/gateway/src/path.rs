//! The path of a frame: outputs of networks and of the translator.
//!
//! The translator is called while a network handles a frame. Its packets to guests wait until the network is
//! done.

use std::collections::HashMap;
use std::time::Instant;

use subnet::nat::{self, Nat};
use subnet::network::{CardId, Delivery, Output, Query, Target, dns};
use subnet::offload::Offload;
use subnet::resolver::{QueryId, Resolver};

use crate::capture::Frames;
use crate::card::CardSocket;
use crate::dns_stream::StreamId;

/// Greatest number of DNS queries that wait for the host's resolver, which has a smaller bound of its own.
const QUERIES_MAX: usize = 1024;

/// Sockets of cards, the way out, and the packets between two steps.
#[derive(Debug)]
pub(crate) struct Paths {
    pub(crate) sockets: HashMap<CardId, CardSocket>,
    pub(crate) nat: Nat,
    pub(crate) resolver: Resolver,
    pub(crate) captured: Frames,
    /// DNS queries at the host's resolver, with their messages.
    queries: HashMap<u64, (Origin, Box<[u8]>)>,
    next_query: u64,
    /// Packets and answers of the outside for guests.
    pub(crate) inward: Vec<Inward>,
    /// Whether a guest has used the outside since the last facts.
    pub(crate) is_outside_used: bool,
}

/// Where a DNS query came from.
#[derive(Clone, Copy, Debug)]
enum Origin {
    /// A datagram.
    Datagram(Query),
    /// A connection of a card's guest.
    Stream(StreamId, CardId),
}

impl Origin {
    fn card(self) -> CardId {
        match self {
            Self::Datagram(query) => query.card,
            Self::Stream(_, card) => card,
        }
    }

    fn answered(self, answer: Box<[u8]>) -> Inward {
        match self {
            Self::Datagram(query) => Inward::Answer(query, answer),
            Self::Stream(stream, _) => Inward::StreamAnswer(stream, answer),
        }
    }
}

/// Item that goes to a guest through its network.
#[derive(Debug)]
pub(crate) enum Inward {
    /// An IP packet.
    Packet(CardId, Box<[u8]>),
    /// An answer to a DNS query.
    Answer(Query, Box<[u8]>),
    /// An answer to a query of a connection.
    StreamAnswer(StreamId, Box<[u8]>),
}

/// Output of the translator.
pub(crate) struct FromNat<'a> {
    sockets: &'a mut HashMap<CardId, CardSocket>,
    inward: &'a mut Vec<Inward>,
}

impl nat::Output for FromNat<'_> {
    fn has_room(&mut self, card: CardId) -> bool {
        let Some(socket) = self.sockets.get_mut(&card) else {
            return true;
        };
        let has_room = socket.has_room();
        socket.has_held_up |= !has_room;
        has_room
    }

    fn send(&mut self, card: CardId, packet: &[u8]) {
        if let Some(socket) = self.sockets.get_mut(&card) {
            socket.reserved_bytes += packet.len();
            self.inward.push(Inward::Packet(card, packet.into()));
        }
    }
}

/// Output of a network.
pub(crate) struct FromNetwork<'a> {
    paths: &'a mut Paths,
    now: Instant,
}

impl Output for FromNetwork<'_> {
    fn send(&mut self, target: Target, bytes: &[u8]) -> Delivery {
        match target {
            Target::Card(card) => {
                self.paths.captured.record(card, bytes);
                let socket = self.paths.sockets.get_mut(&card);
                match socket.is_some_and(|socket| socket.push(bytes)) {
                    true => Delivery::Taken,
                    false => Delivery::Full,
                }
            }
            Target::Outside(card) => {
                self.paths.is_outside_used = true;
                let (nat, mut output) = self.paths.outside();
                nat.receive(card, bytes, self.now, &mut output);
                Delivery::Taken
            }
            Target::Query(query) => match self.paths.ask(Origin::Datagram(query), bytes, self.now) {
                true => Delivery::Taken,
                false => Delivery::Full,
            },
        }
    }

    fn send_unfinished(&mut self, card: CardId, frame: &[u8], offload: &Offload) -> Delivery {
        let Some(socket) = self.paths.sockets.get_mut(&card) else {
            return Delivery::Full;
        };
        if !socket.has_headers() {
            return self.finish(card, frame, offload);
        }
        self.paths.captured.record(card, frame);
        match socket.push_with(&offload.header(), frame) {
            true => Delivery::Taken,
            false => Delivery::Full,
        }
    }
}

impl Paths {
    pub(crate) fn new(nat: Nat, resolver: Resolver) -> Self {
        Self {
            sockets: HashMap::new(),
            nat,
            resolver,
            captured: Frames::default(),
            queries: HashMap::new(),
            next_query: 0,
            inward: Vec::new(),
            is_outside_used: false,
        }
    }

    /// Returns the output for a network.
    pub(crate) fn of_network(&mut self, now: Instant) -> FromNetwork<'_> {
        FromNetwork { paths: self, now }
    }

    /// Returns the translator and its output.
    fn outside(&mut self) -> (&mut Nat, FromNat<'_>) {
        let output = FromNat {
            sockets: &mut self.sockets,
            inward: &mut self.inward,
        };
        (&mut self.nat, output)
    }

    /// Sends a query of a connection to the host's resolver. Returns whether an answer follows.
    pub(crate) fn ask_for_stream(
        &mut self,
        stream: StreamId,
        card: CardId,
        message: &[u8],
        now: Instant,
    ) -> bool {
        self.ask(Origin::Stream(stream, card), message, now)
    }

    /// Sends a query to the host's resolver. A query that it does not take is answered by a failure. Returns
    /// whether there was room for it.
    fn ask(&mut self, origin: Origin, message: &[u8], now: Instant) -> bool {
        self.is_outside_used = true;
        if self.queries.len() >= QUERIES_MAX {
            return false;
        }
        self.next_query += 1;
        let id = self.next_query;
        match self.resolver.ask(QueryId(id), origin.card().0, message, now) {
            Ok(()) => {
                self.queries.insert(id, (origin, message.into()));
            }
            Err(_) => {
                let Some(failure) = dns::server_failure(message) else {
                    return false;
                };
                self.inward.push(origin.answered(failure.into()));
            }
        }
        true
    }

    /// Handles events of the outside.
    pub(crate) fn turn(&mut self, now: Instant) {
        let (nat, mut output) = self.outside();
        nat.turn(now, &mut output);
        let Self {
            resolver,
            queries,
            inward,
            ..
        } = self;
        resolver.turn(now, &mut |id, reply| {
            let Some((origin, message)) = queries.remove(&id.0) else {
                return;
            };
            let answer = match reply {
                Some(reply) => Some(reply.into()),
                None => dns::server_failure(&message).map(Vec::into_boxed_slice),
            };
            inward.extend(answer.map(|answer| origin.answered(answer)));
        });
    }

    /// Returns the time at which [`Self::turn`] must be called without events.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let both = self.nat.deadline().into_iter().chain(self.resolver.deadline());
        both.min()
    }

    /// Forgets a card.
    pub(crate) fn remove(&mut self, card: CardId) {
        self.nat.remove_card(card);
        self.sockets.remove(&card);
        self.queries.retain(|_, (origin, _)| origin.card() != card);
    }
}
