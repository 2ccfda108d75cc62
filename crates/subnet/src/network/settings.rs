//! Settings of a virtual network, and the addresses that follow from them.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use super::error::RangeError;
use crate::mac_address;
use crate::nat::Gateways;

/// Smallest MTU, as IPv6 demands it.
pub const MTU_MIN: u16 = 1280;
/// MTU of a network without a setting: a TCP segment of 64 KiB less its headers fits into one frame.
pub const MTU_DEFAULT: u16 = 65_520;

/// Range of a network's IPv4 addresses, such as `10.213.0.0/16`. The first address is the gateway's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Range {
    base: u32,
    prefix_bits: u8,
}

impl Default for Ipv4Range {
    /// Returns `10.213.0.0/16`, a private range that common tools don't use.
    fn default() -> Self {
        Self {
            base: u32::from_be_bytes([10, 213, 0, 0]),
            prefix_bits: 16,
        }
    }
}

impl Ipv4Range {
    /// Returns the network's mask.
    pub fn mask(self) -> Ipv4Addr {
        // The prefix has 8 to 29 bits.
        (u32::MAX << (32 - u32::from(self.prefix_bits))).into()
    }

    /// Returns the number of bits of the prefix.
    pub fn prefix_bits(self) -> u8 {
        self.prefix_bits
    }

    /// Returns the gateway's address, the first of the range.
    pub fn gateway(self) -> Ipv4Addr {
        (self.base + 1).into()
    }

    /// Returns the address to which broadcasts go, the last of the range.
    pub fn broadcast(self) -> Ipv4Addr {
        (self.base | !u32::from(self.mask())).into()
    }

    /// Returns whether the address is in the range.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        u32::from(address) & u32::from(self.mask()) == self.base
    }

    /// Returns whether a card can have the address.
    pub fn fits_card(self, address: Ipv4Addr) -> bool {
        self.contains(address) && address > self.gateway() && address < self.broadcast()
    }

    /// Returns the number of addresses for cards.
    pub fn cards(self) -> u32 {
        // Without the network's own address, the gateway's and the last.
        !u32::from(self.mask()) - 2
    }

    /// Returns the address of a card with this name, in lower case, unless another card has it. It is the
    /// same in each release.
    pub fn preferred(self, name: &str) -> Ipv4Addr {
        self.card(self.first_number(name))
    }

    /// Returns the number of the first address to try for a card with this name.
    pub(super) fn first_number(self, name: &str) -> u32 {
        (hash(name.as_bytes()) % u64::from(self.cards())) as u32
    }

    /// Returns an address for a card. Numbers beyond [`Self::cards`] start over.
    pub(super) fn card(self, number: u32) -> Ipv4Addr {
        (self.base + 2 + number % self.cards()).into()
    }
}

impl FromStr for Ipv4Range {
    type Err = RangeError;

    /// Parses `ADDRESS/BITS`.
    fn from_str(text: &str) -> Result<Self, RangeError> {
        let wrong = |what| RangeError {
            text: text.to_owned(),
            what,
        };
        let (address, bits) = text
            .split_once('/')
            .ok_or_else(|| wrong("the length of the prefix is missing"))?;
        let address: Ipv4Addr = address.parse().map_err(|_| wrong("its address is malformed"))?;
        let prefix_bits: u8 = bits.parse().map_err(|_| wrong("its prefix is no number"))?;
        if !(8..=29).contains(&prefix_bits) || bits.starts_with('+') {
            return Err(wrong("a prefix has 8 to 29 bits"));
        }
        let range = Self {
            base: address.into(),
            prefix_bits,
        };
        if range.base & !u32::from(range.mask()) != 0 {
            return Err(wrong("the address has bits behind the prefix"));
        }
        if !address.is_private() {
            return Err(wrong("it is not private"));
        }
        // A short prefix of a private address may reach beyond the private range.
        if !range.broadcast().is_private() {
            return Err(wrong("a part of it is not private"));
        }
        Ok(range)
    }
}

impl fmt::Display for Ipv4Range {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", Ipv4Addr::from(self.base), self.prefix_bits)
    }
}

/// Settings of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Name of the network, unique among its owner's.
    pub name: String,
    /// Range of IPv4 addresses.
    pub ipv4: Ipv4Range,
    /// Largest IP packet, at least [`MTU_MIN`].
    pub mtu: u16,
    /// Whether guests reach the outside. Otherwise the network is isolated: packets to other than the
    /// gateway's own addresses are dropped, and only names of the network are resolved.
    pub outside: bool,
    /// Whether IPv6 leads to the outside, too: guests get a default route for it.
    pub outside_ipv6: bool,
    /// Whether cards reach one another.
    pub peers: bool,
}

impl Settings {
    /// Returns the settings of a network that is not configured.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ipv4: Ipv4Range::default(),
            mtu: MTU_DEFAULT,
            outside: true,
            outside_ipv6: false,
            peers: true,
        }
    }

    /// Returns the gateway's addresses.
    pub fn gateway(&self) -> Gateway {
        let mac = mac_address(&format!("gateway {}", self.name), 0);
        let prefix = self.ipv6_prefix();
        Gateway {
            mac,
            link_local: interface_address(LINK_LOCAL, mac),
            addresses: Gateways {
                ipv4: self.ipv4.gateway(),
                ipv6: (u128::from(prefix) | 1).into(),
            },
        }
    }

    /// Returns the network's IPv6 prefix of 64 bits, a unique local one (RFC 4193) made from the name.
    pub fn ipv6_prefix(&self) -> Ipv6Addr {
        let global = hash(self.name.as_bytes()).to_be_bytes();
        let [a, b, c, d, e, ..] = global;
        Ipv6Addr::from([0xfd, a, b, c, d, e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    }
}

/// Prefix of link-local addresses.
pub(super) const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0);

/// Addresses of a network's gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Hardware address.
    pub mac: [u8; 6],
    /// Link-local IPv6 address, at which guests find their router.
    pub link_local: Ipv6Addr,
    /// Addresses of the network's ranges.
    pub addresses: Gateways,
}

/// Returns the address that a guest forms from a prefix of 64 bits and its hardware address (EUI-64).
pub(super) fn interface_address(prefix: Ipv6Addr, mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    let interface = u64::from_be_bytes([a ^ 0x02, b, c, 0xff, 0xfe, d, e, f]);
    (u128::from(prefix) | u128::from(interface)).into()
}

/// Returns whether both addresses have the same prefix of 64 bits.
pub(super) fn has_prefix(address: Ipv6Addr, prefix: Ipv6Addr) -> bool {
    u128::from(address) >> 64 == u128::from(prefix) >> 64
}

/// Returns the FNV-1a hash of the bytes: it is the same in each release.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    // The high bits of a short text's hash vary little.
    hash ^ (hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
