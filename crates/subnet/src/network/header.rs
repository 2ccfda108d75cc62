//! Headers of hostile frames, read without trust in any length.
//!
//! Unlike [`crate::frame`], which judges whole packets, these functions let fragments pass: both are between
//! guests, whose kernels assemble them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of an Ethernet header.
pub const ETHERNET_BYTES: usize = 14;
/// Protocols in an Ethernet header.
pub const ARP: u16 = 0x0806;
/// IPv4, likewise.
pub const IPV4: u16 = 0x0800;
/// IPv6, likewise.
pub const IPV6: u16 = 0x86dd;

const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
/// Greatest number of IPv6 extension headers: more than senders use.
const EXTENSIONS_MAX: usize = 8;

/// Numbers of protocols above IP.
pub mod protocol {
    /// ICMP of IPv4.
    pub const ICMP: u8 = 1;
    /// Membership of IPv4 multicast groups.
    pub const IGMP: u8 = 2;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// ICMP of IPv6.
    pub const ICMPV6: u8 = 58;
}

/// An Ethernet frame.
#[derive(Clone, Copy, Debug)]
pub struct Ethernet<'a> {
    /// Destination hardware address.
    pub destination: [u8; 6],
    /// Source hardware address.
    pub source: [u8; 6],
    /// Number of the protocol.
    pub kind: u16,
    /// Payload, padding included.
    pub payload: &'a [u8],
}

impl<'a> Ethernet<'a> {
    /// Reads a frame; returns none if it is too short.
    pub fn parse(frame: &'a [u8]) -> Option<Self> {
        let (header, payload) = frame.split_first_chunk::<ETHERNET_BYTES>()?;
        Some(Self {
            destination: *header.first_chunk()?,
            source: *header[6..].first_chunk()?,
            kind: u16_at(header, 12)?,
            payload,
        })
    }
}

/// Returns whether the hardware address is that of a group, or of all.
pub fn is_group(mac: [u8; 6]) -> bool {
    mac[0] & 1 != 0
}

/// An IP packet.
#[derive(Clone, Copy, Debug)]
pub struct Ip<'a> {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Time to live, or hop limit.
    pub hops: u8,
    /// Payload, behind all headers.
    pub content: Content<'a>,
    /// Header above IP; none in a fragment other than the first.
    pub transport: Option<Transport>,
    /// Whole packet, without the frame's padding.
    pub packet: &'a [u8],
}

/// Place of the header above IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Number of the protocol.
    pub protocol: u8,
    /// Place in the packet.
    pub offset: usize,
    /// Whether the packet is a fragment.
    pub is_fragment: bool,
}

/// Payload of an IP packet.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// A UDP datagram, or the first fragment of one.
    Udp {
        /// The sender's port.
        source: u16,
        /// The receiver's port.
        destination: u16,
        /// Data, as far as the packet has them.
        data: &'a [u8],
    },
    /// A TCP segment.
    Tcp,
    /// An ICMP message of the packet's IP version.
    Icmp {
        /// Type of the message.
        kind: u8,
        /// The whole message.
        message: &'a [u8],
        /// Whether the packet is a fragment.
        is_fragment: bool,
    },
    /// A message about membership of multicast groups.
    Igmp,
    /// A packet of another protocol, or a fragment other than the first.
    Other,
}

impl<'a> Ip<'a> {
    /// Reads an IPv4 packet; returns none if its lengths contradict one another.
    pub fn ipv4(bytes: &'a [u8]) -> Option<Self> {
        let header: &[u8; IPV4_BYTES] = bytes.first_chunk()?;
        let header_bytes = usize::from(header[0] & 0x0f) * 4;
        if header[0] >> 4 != 4 || header_bytes < IPV4_BYTES {
            return None;
        }
        let packet = bytes.get(..usize::from(u16_at(header, 2)?))?;
        let payload = packet.get(header_bytes..)?;
        let fragment = u16_at(header, 6)?;
        let address = |at: usize| Some(Ipv4Addr::from(*header.get(at..)?.first_chunk::<4>()?));
        let (content, transport) = if fragment & 0x1fff != 0 {
            (Content::Other, None)
        } else {
            let is_fragment = fragment & 0x2000 != 0;
            let content = match header[9] {
                protocol::ICMP => icmp(payload, is_fragment)?,
                protocol::IGMP => Content::Igmp,
                other => transport(other, payload)?,
            };
            let transport = Transport {
                protocol: header[9],
                offset: header_bytes,
                is_fragment,
            };
            (content, Some(transport))
        };
        Some(Self {
            source: address(12)?.into(),
            destination: address(16)?.into(),
            hops: header[8],
            content,
            transport,
            packet,
        })
    }

    /// Reads an IPv6 packet; returns none if its lengths contradict one another, or if the first fragment
    /// does not hold all headers.
    pub fn ipv6(bytes: &'a [u8]) -> Option<Self> {
        let header: &[u8; IPV6_BYTES] = bytes.first_chunk()?;
        if header[0] >> 4 != 6 {
            return None;
        }
        let packet = bytes.get(..IPV6_BYTES + usize::from(u16_at(header, 4)?))?;
        let address = |at: usize| Some(Ipv6Addr::from(*header.get(at..)?.first_chunk::<16>()?));
        let (content, transport) = ipv6_content(header[6], packet)?;
        Some(Self {
            source: address(8)?.into(),
            destination: address(24)?.into(),
            hops: header[7],
            content,
            transport,
            packet,
        })
    }
}

/// Walks over extension headers, so that a message of a router can't hide behind them (RFC 7113).
fn ipv6_content(first: u8, packet: &[u8]) -> Option<(Content<'_>, Option<Transport>)> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const DESTINATION_OPTIONS: u8 = 60;
    let (mut next, mut rest, mut is_fragment) = (first, packet.get(IPV6_BYTES..)?, false);
    for _ in 0..EXTENSIONS_MAX {
        match next {
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                let bytes = (usize::from(*rest.get(1)?) + 1) * 8;
                next = *rest.first()?;
                rest = rest.get(bytes..)?;
            }
            FRAGMENT => {
                let header: &[u8; 8] = rest.first_chunk()?;
                if u16_at(header, 2)? & 0xfff8 != 0 {
                    return Some((Content::Other, None));
                }
                // A whole packet may have the header, too.
                is_fragment = true;
                next = header[0];
                rest = rest.get(8..)?;
            }
            number => {
                let content = match number {
                    protocol::ICMPV6 => icmp(rest, is_fragment)?,
                    other => transport(other, rest)?,
                };
                let transport = Transport {
                    protocol: number,
                    offset: packet.len() - rest.len(),
                    is_fragment,
                };
                return Some((content, Some(transport)));
            }
        }
    }
    None
}

fn icmp(message: &[u8], is_fragment: bool) -> Option<Content<'_>> {
    Some(Content::Icmp {
        kind: *message.first()?,
        message,
        is_fragment,
    })
}

fn transport(protocol: u8, payload: &[u8]) -> Option<Content<'_>> {
    Some(match protocol {
        protocol::UDP => {
            let bytes = usize::from(u16_at(payload, 4)?);
            // A first fragment holds a part of the data; a packet may have bytes behind them.
            let end = bytes.min(payload.len());
            Content::Udp {
                source: u16_at(payload, 0)?,
                destination: u16_at(payload, 2)?,
                data: payload.get(UDP_BYTES..end)?,
            }
        }
        protocol::TCP => Content::Tcp,
        _ => Content::Other,
    })
}

/// Reads a number in network byte order.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}
