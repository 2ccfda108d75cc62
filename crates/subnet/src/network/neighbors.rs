//! Neighbor discovery of IPv6: messages of a guest, and those of its gateway.

use std::net::Ipv6Addr;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::time::Duration;
use smoltcp::wire::{
    EthernetAddress, Icmpv6Packet, Icmpv6Repr, NdiscNeighborFlags, NdiscPrefixInfoFlags,
    NdiscPrefixInformation, NdiscRepr, NdiscRouterFlags,
};

use super::dns::DOMAIN;
use super::settings::{Gateway, Settings};

/// Types of ICMPv6.
pub mod kind {
    /// Echo request.
    pub const ECHO_REQUEST: u8 = 128;
    /// Echo reply.
    pub const ECHO_REPLY: u8 = 129;
    /// Types about membership of multicast groups.
    pub const MEMBERSHIP: [u8; 4] = [130, 131, 132, 143];
    /// Router solicitation.
    pub const ROUTER_SOLICITATION: u8 = 133;
    /// Router advertisement.
    pub const ROUTER_ADVERTISEMENT: u8 = 134;
    /// Neighbor solicitation.
    pub const NEIGHBOR_SOLICITATION: u8 = 135;
    /// Neighbor advertisement.
    pub const NEIGHBOR_ADVERTISEMENT: u8 = 136;
    /// Redirect.
    pub const REDIRECT: u8 = 137;
}

/// Address of all hosts of a link.
pub const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Seconds for which a guest keeps its router: many times the interval of advertisements.
const ROUTER_SECONDS: u64 = 9000;
/// Seconds for which a guest keeps the prefix and the name server.
const PREFIX_SECONDS: u64 = 86_400;
const OPTION_NAME_SERVERS: u8 = 25;
const OPTION_SEARCH_LIST: u8 = 31;

/// Returns the target of a neighbor solicitation or advertisement.
pub fn target(message: &[u8]) -> Option<Ipv6Addr> {
    Some(Ipv6Addr::from(*message.get(8..)?.first_chunk::<16>()?))
}

/// Returns an advertisement of `owner`'s address; `solicited` by a guest that has an address.
pub fn neighbor_advertisement(
    address: Ipv6Addr,
    owner: [u8; 6],
    is_router: bool,
    solicited: bool,
) -> Vec<u8> {
    let mut flags = NdiscNeighborFlags::OVERRIDE;
    flags.set(NdiscNeighborFlags::ROUTER, is_router);
    flags.set(NdiscNeighborFlags::SOLICITED, solicited);
    message(NdiscRepr::NeighborAdvert {
        flags,
        target_addr: address,
        lladdr: Some(EthernetAddress(owner).into()),
    })
}

/// Returns the gateway's router advertisement to a card that does or does not reach the outside. Guests form
/// their addresses from the prefix themselves, so there is no DHCPv6.
pub fn router_advertisement(settings: &Settings, gateway: &Gateway, outside: bool) -> Vec<u8> {
    let is_router = outside && settings.outside_ipv6;
    let mut advertisement = message(NdiscRepr::RouterAdvert {
        hop_limit: 64,
        flags: NdiscRouterFlags::empty(),
        // Zero: guests take the prefix, and no default route.
        router_lifetime: Duration::from_secs(if is_router { ROUTER_SECONDS } else { 0 }),
        reachable_time: Duration::ZERO,
        retrans_time: Duration::ZERO,
        lladdr: Some(EthernetAddress(gateway.mac).into()),
        mtu: Some(settings.mtu.into()),
        prefix_info: Some(NdiscPrefixInformation {
            prefix_len: 64,
            flags: NdiscPrefixInfoFlags::ON_LINK | NdiscPrefixInfoFlags::ADDRCONF,
            valid_lifetime: Duration::from_secs(PREFIX_SECONDS),
            preferred_lifetime: Duration::from_secs(PREFIX_SECONDS),
            prefix: settings.ipv6_prefix(),
        }),
    });
    // Options of RFC 8106, which `smoltcp` does not write. Lengths count 8 bytes.
    let lifetime = (PREFIX_SECONDS as u32).to_be_bytes();
    advertisement.extend([OPTION_NAME_SERVERS, 3, 0, 0]);
    advertisement.extend(lifetime);
    advertisement.extend(gateway.addresses.ipv6.octets());
    let mut domain: Vec<u8> = DOMAIN
        .split('.')
        .flat_map(|label| std::iter::once(label.len() as u8).chain(label.bytes()))
        .collect();
    domain.push(0);
    domain.resize(domain.len().next_multiple_of(8), 0);
    advertisement.extend([OPTION_SEARCH_LIST, (1 + domain.len() / 8) as u8, 0, 0]);
    advertisement.extend(lifetime);
    advertisement.extend(domain);
    advertisement
}

/// Encodes a message. Its checksum is computed when the packet is known.
fn message(message: NdiscRepr<'_>) -> Vec<u8> {
    let message = Icmpv6Repr::Ndisc(message);
    let mut bytes = vec![0; message.buffer_len()];
    let any = Ipv6Addr::UNSPECIFIED;
    let checksums = ChecksumCapabilities::ignored();
    message.emit(
        &any,
        &any,
        &mut Icmpv6Packet::new_unchecked(&mut bytes[..]),
        &checksums,
    );
    bytes
}
