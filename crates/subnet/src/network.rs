//! Virtual networks: a switch with its gateway's services, as pure decisions.
//!
//! A [`Network`] has no I/O, no clock and no threads. The caller passes it frames and the time, and gets back
//! frames through an [`Output`]. Every frame is hostile.
//!
//! # Use in an event loop
//!
//! - [`Network::attach`] and [`Network::detach`] for each card that joins and leaves.
//! - [`Network::receive`] for each Ethernet frame of a card. It sends frames to cards, IP packets to the
//!   outside (for [`crate::nat::Nat::receive`]), and DNS queries for the host's resolver.
//! - [`Network::receive_outside`] for each IP packet of the translator to a card.
//! - [`Network::answer`] for each answer of the resolver. A resolver that fails sends
//!   [`dns::server_failure`].
//! - [`Network::turn`] at [`Network::deadline`], for periodic messages.
//!
//! # Checks of senders
//!
//! A frame passes only with the card's own hardware address and IP addresses as its source. The IPv4 address
//! is the one that DHCP hands out. The IPv6 addresses are those that the guest forms from its hardware
//! address, and up to [`LEARNT_MAX`] others of the network's prefix and of the link-local one. Such an
//! address belongs to the first guest that uses it. An address made from a card's hardware address never
//! belongs to another card.
//!
//! The switch answers ARP requests and neighbor solicitations itself, so guests can't redirect frames of one
//! another. It drops messages of routers and DHCP servers from guests.
//!
//! # Services
//!
//! The gateway serves DHCPv4, router advertisements with name servers (guests configure IPv6 without DHCPv6),
//! echo, and DNS over UDP for the network's names.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

mod card;
mod compose;
mod dhcp;
pub mod dns;
mod error;
pub(crate) mod header;
mod members;
mod neighbors;
mod rate;
mod services;
mod settings;
mod switch;

pub use self::card::{Addresses, Card, Counts, DropReason, Limits, Traffic};
pub use self::error::{AttachError, RangeError};
pub use self::rate::Rate;
pub use self::settings::{Gateway, Ipv4Range, MTU_DEFAULT, MTU_MIN, Settings};
pub use crate::nat::CardId;

use self::members::Members;
use crate::offload::{self, Header, Offload};

/// Greatest number of cards of a network.
pub const CARDS_MAX: usize = 1024;
/// Greatest number of a card's IPv6 addresses that are not made from its hardware address.
pub const LEARNT_MAX: usize = 8;

/// Interval of router advertisements: guests that have not asked for long keep their router.
const ADVERTISEMENT_INTERVAL: Duration = Duration::from_secs(600);

/// Destination of what a network sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// An Ethernet frame for a card's guest.
    Card(CardId),
    /// An IP packet of this card for the outside.
    Outside(CardId),
    /// A DNS message for the host's resolver.
    Query(Query),
}

/// Origin of a DNS query. [`Network::answer`] takes it back with the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Query {
    /// Card of the guest.
    pub card: CardId,
    /// Address and port of the guest.
    pub client: SocketAddr,
    /// Address of the gateway that the guest queried.
    pub server: IpAddr,
    /// Bytes of an answer that the guest accepts. A longer one is truncated.
    pub bytes_max: u16,
}

/// Whether a target took what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The target has it.
    Taken,
    /// The target has no room; it is lost, and counted as [`DropReason::Full`].
    Full,
}

/// Receives what a network sends.
pub trait Output {
    /// Takes a frame, packet or message.
    fn send(&mut self, target: Target, bytes: &[u8]) -> Delivery;

    /// Takes a frame for a card, with the work that its sender has left to the receiver. An output without
    /// such receivers does the work.
    fn send_unfinished(&mut self, card: CardId, frame: &[u8], offload: &Offload) -> Delivery {
        self.finish(card, frame, offload)
    }

    /// Does the work on a frame, and takes the frames that it becomes.
    fn finish(&mut self, card: CardId, frame: &[u8], offload: &Offload) -> Delivery {
        let mut delivery = Delivery::Taken;
        offload.finish(frame, &mut Vec::new(), |whole| {
            if self.send(Target::Card(card), whole) == Delivery::Full {
                delivery = Delivery::Full;
            }
        });
        delivery
    }
}

impl<F: FnMut(Target, &[u8]) -> Delivery> Output for F {
    fn send(&mut self, target: Target, bytes: &[u8]) -> Delivery {
        self(target, bytes)
    }
}

/// A named network.
#[derive(Debug)]
pub struct Network {
    settings: Settings,
    gateway: Gateway,
    prefix: Ipv6Addr,
    members: Members,
    /// Frame that is being composed.
    buffer: Vec<u8>,
    next_advertisement: Instant,
}

impl Network {
    /// Creates a network without cards. An MTU below [`MTU_MIN`] is raised to it.
    pub fn new(mut settings: Settings, now: Instant) -> Self {
        settings.mtu = settings.mtu.max(MTU_MIN);
        Self {
            gateway: settings.gateway(),
            prefix: settings.ipv6_prefix(),
            members: Members::new(&settings),
            settings,
            buffer: Vec::new(),
            next_advertisement: now + ADVERTISEMENT_INTERVAL,
        }
    }

    /// Returns the settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the gateway's addresses.
    pub fn gateway(&self) -> Gateway {
        self.gateway
    }

    /// Adds a card. The caller never uses a number twice, or an answer to an earlier card's query would reach
    /// the later one.
    ///
    /// # Errors
    /// Fails if the name, the hardware address or the requested address is another card's, or if no address
    /// is free.
    pub fn attach(&mut self, id: CardId, card: Card, now: Instant) -> Result<Addresses, AttachError> {
        self.members.attach(id, card, &self.settings, now)
    }

    /// Removes a card. Returns its counters.
    pub fn detach(&mut self, id: CardId) -> Option<Counts> {
        self.members.detach(id).map(|member| member.counts)
    }

    /// Lists the cards.
    pub fn cards(&self) -> impl Iterator<Item = (CardId, &Card, Addresses)> {
        let members = self.members.iter();
        members.map(|(id, member)| (id, &member.card, member.addresses))
    }

    /// Returns the counters of a card.
    pub fn counts(&self, id: CardId) -> Option<Counts> {
        self.members.get(id).map(|member| member.counts)
    }

    /// Handles an Ethernet frame of a card's guest.
    pub fn receive(&mut self, id: CardId, frame: &[u8], now: Instant, output: &mut dyn Output) {
        self.receive_unfinished(id, &offload::WHOLE, frame, now, output);
    }

    /// Handles an Ethernet frame of a card's guest, and the header before it, by which the guest leaves work
    /// to the receiver.
    pub fn receive_unfinished(
        &mut self,
        id: CardId,
        header: &Header,
        frame: &[u8],
        now: Instant,
        output: &mut dyn Output,
    ) {
        if let Some(member) = self.members.get_mut(id) {
            member.counts.from_guest.add(frame.len());
        }
        if let Err(reason) = self.pass(id, header, frame, now, output)
            && let Some(member) = self.members.get_mut(id)
        {
            member.counts.from_guest.drop(reason);
        }
    }

    /// Handles an IP packet from the outside to a card's guest.
    pub fn receive_outside(&mut self, id: CardId, packet: &[u8], now: Instant, output: &mut dyn Output) {
        let Some(member) = self.members.get_mut(id) else {
            return;
        };
        let kind = match packet.first().map(|first| first >> 4) {
            Some(4) => header::IPV4,
            Some(6) => header::IPV6,
            _ => return,
        };
        let bytes = header::ETHERNET_BYTES + packet.len();
        let to = member.card.mac;
        if bytes > self.frame_bytes_max() {
            if let Some(member) = self.members.get_mut(id) {
                member.counts.to_guest.add(bytes);
                member.counts.to_guest.drop(DropReason::Oversized);
            }
            return;
        }
        let mut frame = std::mem::take(&mut self.buffer);
        compose::ethernet(&mut frame, self.gateway.mac, to, kind);
        frame.extend_from_slice(packet);
        self.deliver(id, &frame, None, now, output);
        self.buffer = frame;
    }

    /// Decides about a card's DNS query, which came by a stream. One of a card that has left is ignored.
    pub fn decide_query(&self, id: CardId, message: &[u8]) -> dns::Decision {
        match self.members.get(id) {
            Some(_) => self.decide_query_of(id, message),
            None => dns::Decision::Ignore,
        }
    }

    /// Sends the answer of a DNS query to the guest, if its card is still a member. One that is longer than
    /// the guest accepts is truncated.
    pub fn answer(&mut self, query: Query, message: &[u8], output: &mut dyn Output) {
        self.send_answer(query, message, output);
    }

    /// Returns the time at which [`Network::turn`] must be called; none without cards.
    pub fn deadline(&self) -> Option<Instant> {
        (self.members.count() > 0).then_some(self.next_advertisement)
    }

    /// Sends the periodic messages that are due: router advertisements.
    pub fn turn(&mut self, now: Instant, output: &mut dyn Output) {
        if now < self.next_advertisement {
            return;
        }
        self.next_advertisement = now + ADVERTISEMENT_INTERVAL;
        let mut next = self.members.next_after(None);
        while let Some(id) = next {
            self.advertise(id, None, output);
            next = self.members.next_after(Some(id));
        }
    }
}

#[cfg(test)]
mod tests;
