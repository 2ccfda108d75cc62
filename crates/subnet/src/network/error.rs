//! Errors of a virtual network, each in one line with its help.

use std::net::Ipv4Addr;

use super::settings::Ipv4Range;

/// A text is no range of addresses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no range for a network: {what}; write a private one, as in 10.213.0.0/16")]
pub struct RangeError {
    /// The range as the user wrote it.
    pub text: String,
    /// The error in it.
    pub what: &'static str,
}

/// Reason why a card can't be a member of a network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The number of the card is in use.
    #[error("the number of card {0} is in use")]
    NumberTaken(String),
    /// Another card has the name.
    #[error("the name {0} is taken on this network; rename the VM, or choose another network")]
    NameTaken(String),
    /// The name can't be a host's name.
    #[error("{0:?} can't name a host; use letters, digits, `-`, `_` and `.`, 63 at most")]
    Name(String),
    /// Another card, or the gateway, has the hardware address.
    #[error("the hardware address {0} is taken on this network; give this card another mac")]
    MacTaken(String),
    /// The hardware address is a group's, or zero.
    #[error("{0} is no hardware address of a card; the first byte is even, and not all are zero")]
    Mac(String),
    /// Another card, or the gateway, has the address.
    #[error("the address {0} is taken on this network; choose another, or none")]
    AddressTaken(Ipv4Addr),
    /// The address is not in the network's range.
    #[error("the address {address} is not one for a card of {range}; choose another, or none")]
    AddressOutside {
        /// The requested address.
        address: Ipv4Addr,
        /// The network's range.
        range: Ipv4Range,
    },
    /// The network has no address left.
    #[error("the network has {0} cards and room for no other; choose another network, or a larger range")]
    Full(usize),
}
