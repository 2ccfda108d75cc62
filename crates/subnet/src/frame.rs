//! A parser of Ethernet frames for the filter: their addresses and payload.
//!
//! The parser is strict. It refuses frames with VLAN tags, IPv6 extension headers and fragments, because the
//! bytes behind those could be judged wrongly. It never reads past the length that the headers announce,
//! allocates nothing and has no loops.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of an Ethernet header.
const ETHERNET_BYTES: usize = 14;
const ARP_BYTES: usize = 28;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const TCP_BYTES: usize = 20;
const UDP_BYTES: usize = 8;

/// Numbers of protocols above IP.
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
/// Next headers of IPv6 that are extension headers instead of the payload.
const EXTENSIONS: [u8; 11] = [0, 43, 44, 50, 51, 60, 135, 139, 140, 253, 254];

/// The content of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Packet {
    /// An ARP message.
    Arp,
    /// An IP packet.
    Ip(Datagram),
}

/// An IP packet, whole.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Datagram {
    /// Source address, which may be forged.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Payload of the packet.
    pub payload: Payload,
}

/// The payload of an IP packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Payload {
    /// A TCP segment.
    Tcp {
        /// The sender's port.
        source: u16,
        /// The receiver's port.
        destination: u16,
        /// Whether the segment requests a new connection: SYN without ACK.
        opens: bool,
    },
    /// A UDP datagram.
    Udp {
        /// The sender's port.
        source: u16,
        /// The receiver's port.
        destination: u16,
    },
    /// An ICMP message of the packet's IP version.
    Icmp {
        /// Type of the message.
        kind: u8,
    },
    /// A packet of another protocol.
    Other,
}

/// Reads a frame's headers; returns none for frames that cannot be judged.
pub fn parse(frame: &[u8]) -> Option<Packet> {
    let packet = frame.get(ETHERNET_BYTES..)?;
    match u16_at(frame, 12)? {
        0x0806 => (packet.len() >= ARP_BYTES).then_some(Packet::Arp),
        0x0800 => ipv4(packet).map(Packet::Ip),
        0x86dd => ipv6(packet).map(Packet::Ip),
        _ => None,
    }
}

/// Reads the headers of an IP packet; returns none for packets that cannot be judged.
pub fn parse_ip(packet: &[u8]) -> Option<Datagram> {
    match packet.first()? >> 4 {
        4 => ipv4(packet),
        6 => ipv6(packet),
        _ => None,
    }
}

fn ipv4(packet: &[u8]) -> Option<Datagram> {
    let header: &[u8; IPV4_BYTES] = packet.first_chunk()?;
    let header_bytes = usize::from(header[0] & 0x0f) * 4;
    let total_bytes = usize::from(u16_at(header, 2)?);
    // The flag of more fragments, or an offset that is not zero.
    let is_fragment = u16_at(header, 6)? & 0x3fff != 0;
    if header[0] >> 4 != 4 || header_bytes < IPV4_BYTES || is_fragment {
        return None;
    }
    let address = |at: usize| Some(Ipv4Addr::from(*header.get(at..)?.first_chunk::<4>()?));
    // Padding may follow.
    let payload = packet.get(header_bytes..total_bytes)?;
    Some(Datagram {
        source: address(12)?.into(),
        destination: address(16)?.into(),
        payload: transport(header[9], ICMP, payload)?,
    })
}

fn ipv6(packet: &[u8]) -> Option<Datagram> {
    let header: &[u8; IPV6_BYTES] = packet.first_chunk()?;
    let payload_bytes = usize::from(u16_at(header, 4)?);
    if header[0] >> 4 != 6 || EXTENSIONS.contains(&header[6]) {
        return None;
    }
    let address = |at: usize| Some(Ipv6Addr::from(*header.get(at..)?.first_chunk::<16>()?));
    let payload = packet.get(IPV6_BYTES..IPV6_BYTES + payload_bytes)?;
    Some(Datagram {
        source: address(8)?.into(),
        destination: address(24)?.into(),
        payload: transport(header[6], ICMPV6, payload)?,
    })
}

fn transport(protocol: u8, icmp: u8, payload: &[u8]) -> Option<Payload> {
    let holds = |bytes| (payload.len() >= bytes).then_some(());
    Some(match protocol {
        TCP => {
            holds(TCP_BYTES)?;
            // SYN is bit 1, ACK bit 4.
            let opens = payload.get(13)? & 0x12 == 0x02;
            Payload::Tcp {
                source: u16_at(payload, 0)?,
                destination: u16_at(payload, 2)?,
                opens,
            }
        }
        UDP => {
            holds(UDP_BYTES)?;
            Payload::Udp {
                source: u16_at(payload, 0)?,
                destination: u16_at(payload, 2)?,
            }
        }
        other if other == icmp => Payload::Icmp {
            kind: *payload.first()?,
        },
        _ => Payload::Other,
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests;
