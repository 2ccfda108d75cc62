//! Cards of a network, and their counters.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::rate::Rate;

/// Settings of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Name of the VM, by which the others find it. A VM with two cards on a network has two names.
    pub name: String,
    /// Hardware address.
    pub mac: [u8; 6],
    /// Address that the VM's file asks for. Without one, the name decides.
    pub address: Option<Ipv4Addr>,
    /// Whether the guest reaches the outside, if its network leads there.
    pub outside: bool,
    /// Limits of the guest's frames, and of those to the guest.
    pub limits: Limits,
}

/// Limits of a card in each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Limit of frames from the guest.
    pub from_guest: Rate,
    /// Limit of frames to the guest.
    pub to_guest: Rate,
}

/// Addresses of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// IPv4 address, which DHCP hands out.
    pub ipv4: Ipv4Addr,
    /// IPv6 address that the guest forms from its hardware address. Guests that form another one are known
    /// by that.
    pub ipv6: Ipv6Addr,
    /// Link-local IPv6 address that the guest forms from its hardware address.
    pub link_local: Ipv6Addr,
}

/// Reason why a frame was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// The frame is shorter than its headers say.
    Malformed,
    /// The frame is larger than the network's MTU allows.
    Oversized,
    /// The frame has a protocol other than ARP, IPv4 and IPv6, or a VLAN tag.
    Protocol,
    /// The source is another hardware address than the card's.
    SourceMac,
    /// The source is another address than the card's.
    SourceAddress,
    /// The guest poses as a router or a DHCP server.
    RogueServer,
    /// No card of the network has the destination.
    NoSuchCard,
    /// The packet went to the gateway, and its destination is not the outside.
    Unroutable,
    /// The gateway has no such service.
    NoSuchService,
    /// The network does not lead to the outside, or not this card.
    Isolated,
    /// Cards of the network don't reach one another.
    PeersBarred,
    /// The card exceeds its limit of bytes or packets.
    RateLimit,
    /// The card sends more broadcasts than a network bears.
    FloodLimit,
    /// The receiver has no room.
    Full,
}

impl DropReason {
    /// Every reason.
    pub const ALL: [Self; 14] = [
        Self::Malformed,
        Self::Oversized,
        Self::Protocol,
        Self::SourceMac,
        Self::SourceAddress,
        Self::RogueServer,
        Self::NoSuchCard,
        Self::Unroutable,
        Self::NoSuchService,
        Self::Isolated,
        Self::PeersBarred,
        Self::RateLimit,
        Self::FloodLimit,
        Self::Full,
    ];

    /// Returns the name of the reason in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Oversized => "oversized",
            Self::Protocol => "protocol",
            Self::SourceMac => "source_mac",
            Self::SourceAddress => "source_address",
            Self::RogueServer => "rogue_server",
            Self::NoSuchCard => "no_such_card",
            Self::Unroutable => "unroutable",
            Self::NoSuchService => "no_such_service",
            Self::Isolated => "isolated",
            Self::PeersBarred => "peers_barred",
            Self::RateLimit => "rate_limit",
            Self::FloodLimit => "flood_limit",
            Self::Full => "full",
        }
    }
}

/// Counters of one direction of a card. They saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames, dropped ones included.
    pub frames: u64,
    /// Bytes of these frames.
    pub bytes: u64,
    dropped: [u64; DropReason::ALL.len()],
}

impl Traffic {
    /// Returns the number of frames that were dropped for this reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.dropped[reason as usize]
    }

    /// Returns the number of frames that were dropped.
    pub fn dropped_in_all(&self) -> u64 {
        self.dropped
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    pub(super) fn add(&mut self, bytes: usize) {
        self.frames = self.frames.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    pub(super) fn drop(&mut self, reason: DropReason) {
        let count = &mut self.dropped[reason as usize];
        *count = count.saturating_add(1);
    }
}

/// Counters of a card since it was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames from the guest.
    pub from_guest: Traffic,
    /// Frames to the guest.
    pub to_guest: Traffic,
}
