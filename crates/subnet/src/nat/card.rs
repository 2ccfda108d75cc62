//! Cards of guests, as the translator knows them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Number of a card, unique among all cards of a translator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CardId(pub u64);

/// Addresses of the gateway on a card's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gateways {
    /// IPv4 address.
    pub ipv4: Ipv4Addr,
    /// IPv6 address.
    pub ipv6: Ipv6Addr,
}

impl Gateways {
    /// Returns whether the address is the gateway's.
    pub fn contains(&self, address: IpAddr) -> bool {
        address == self.ipv4 || address == self.ipv6
    }
}

/// Settings of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// The guest's IPv4 address, to which ports of the host are forwarded.
    pub address: Ipv4Addr,
    /// Addresses of the gateway, from which forwarded connections come.
    pub gateways: Gateways,
    /// Whether the guest reaches this host and its cluster. The gateway's address is the host's loopback
    /// then.
    pub host: bool,
}

/// Counters of a card since it was added. They saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Open TCP connections.
    pub connections: u64,
    /// Current exchanges of UDP and ICMP.
    pub exchanges: u64,
    /// Connections and exchanges that were opened.
    pub opened: u64,
    /// Packets to addresses that the guest may not reach.
    pub barred: u64,
    /// Packets that are malformed, fragments, or of an unknown protocol.
    pub malformed: u64,
    /// Connections and exchanges that the limits refused.
    pub limited: u64,
    /// Packets that were dropped because the guest's queue or the host's socket had no room.
    pub full: u64,
    /// Echo requests that the host does not permit to send.
    pub unsent_echoes: u64,
    /// Connections and exchanges that the host could not open.
    pub unreachable: u64,
}

impl Counts {
    /// Adds one to a counter.
    pub(super) fn add(counter: &mut u64) {
        *counter = counter.saturating_add(1);
    }
}
