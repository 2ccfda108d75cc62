//! Frames that a gateway sends.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, Icmpv4Packet, Icmpv6Packet, IpAddress, IpProtocol,
    IpRepr, UDP_HEADER_LEN, UdpPacket, UdpRepr,
};

use super::header::{ARP, ETHERNET_BYTES, IPV4, IPV6};

const HOPS: u8 = 64;
/// Hop limit of neighbor discovery, which shows that no router passed the packet on.
pub const HOPS_ON_LINK: u8 = 255;

/// Source and destination of a frame: hardware addresses and IP addresses.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Hardware address of the sender.
    pub from_mac: [u8; 6],
    /// Hardware address of the receiver.
    pub to_mac: [u8; 6],
    /// IP address of the sender.
    pub from: IpAddr,
    /// IP address of the receiver, of the same version.
    pub to: IpAddr,
}

/// Writes an Ethernet header.
pub fn ethernet(frame: &mut Vec<u8>, from: [u8; 6], to: [u8; 6], kind: u16) {
    frame.clear();
    frame.extend(to);
    frame.extend(from);
    frame.extend(kind.to_be_bytes());
}

/// Writes an ARP reply: `address` is that of `owner`.
pub fn arp_reply(frame: &mut Vec<u8>, owner: ([u8; 6], Ipv4Addr), asker: ([u8; 6], Ipv4Addr)) {
    ethernet(frame, owner.0, asker.0, ARP);
    let reply = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(owner.0),
        source_protocol_addr: owner.1,
        target_hardware_addr: EthernetAddress(asker.0),
        target_protocol_addr: asker.1,
    };
    frame.resize(ETHERNET_BYTES + reply.buffer_len(), 0);
    reply.emit(&mut ArpPacket::new_unchecked(&mut frame[ETHERNET_BYTES..]));
}

/// Writes a UDP datagram. Returns whether its data fit into an IP packet.
pub fn udp(frame: &mut Vec<u8>, route: Route, ports: (u16, u16), data: &[u8]) -> bool {
    let bytes = UDP_HEADER_LEN + data.len();
    let Some(start) = ip(frame, route, IpProtocol::Udp, bytes, HOPS) else {
        return false;
    };
    let datagram = UdpRepr {
        src_port: ports.0,
        dst_port: ports.1,
    };
    datagram.emit(
        &mut UdpPacket::new_unchecked(&mut frame[start..]),
        &IpAddress::from(route.from),
        &IpAddress::from(route.to),
        data.len(),
        |buffer| buffer.copy_from_slice(data),
        &ChecksumCapabilities::default(),
    );
    true
}

/// Writes an ICMP message of the route's version of IP, and computes its checksum. Returns whether it fits
/// into an IP packet. The message has 4 bytes at least.
pub fn icmp(frame: &mut Vec<u8>, route: Route, message: &[u8], hops: u8) -> bool {
    let number = match route.to {
        IpAddr::V4(_) => IpProtocol::Icmp,
        IpAddr::V6(_) => IpProtocol::Icmpv6,
    };
    let Some(start) = ip(frame, route, number, message.len(), hops) else {
        return false;
    };
    let target = &mut frame[start..];
    target.copy_from_slice(message);
    match (route.from, route.to) {
        (IpAddr::V6(from), IpAddr::V6(to)) => Icmpv6Packet::new_unchecked(target).fill_checksum(&from, &to),
        _ => Icmpv4Packet::new_unchecked(target).fill_checksum(),
    }
    true
}

/// Returns the reply to an echo request: another type, the same data.
pub fn echo_reply(kind: u8, request: &[u8]) -> Vec<u8> {
    let mut reply = request.to_vec();
    if let Some(first) = reply.first_mut() {
        *first = kind;
    }
    reply
}

/// Writes the headers of Ethernet and IP, and zeroes for the payload. Returns the payload's place; none if it
/// is too large, or if the addresses are of two versions.
fn ip(
    frame: &mut Vec<u8>,
    route: Route,
    protocol: IpProtocol,
    payload_bytes: usize,
    hops: u8,
) -> Option<usize> {
    let kind = match (route.from, route.to) {
        (IpAddr::V4(_), IpAddr::V4(_)) => IPV4,
        (IpAddr::V6(_), IpAddr::V6(_)) => IPV6,
        _ => return None,
    };
    let (from, to) = (IpAddress::from(route.from), IpAddress::from(route.to));
    let header = IpRepr::new(from, to, protocol, payload_bytes, hops);
    if header.buffer_len() > usize::from(u16::MAX) {
        return None;
    }
    ethernet(frame, route.from_mac, route.to_mac, kind);
    frame.resize(ETHERNET_BYTES + header.buffer_len(), 0);
    header.emit(&mut frame[ETHERNET_BYTES..], &ChecksumCapabilities::default());
    Some(ETHERNET_BYTES + header.header_len())
}

/// Returns the hardware address of an IPv6 multicast group.
pub fn group_mac(group: Ipv6Addr) -> [u8; 6] {
    let [.., a, b, c, d] = group.octets();
    [0x33, 0x33, a, b, c, d]
}
