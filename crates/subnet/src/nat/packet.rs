//! Reads packets of guests, and writes packets to them. Pure.

use std::net::{IpAddr, SocketAddr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    Icmpv4DstUnreachable, Icmpv4Message, Icmpv4Packet, Icmpv6DstUnreachable, Icmpv6Message, Icmpv6Packet,
    IpAddress, IpProtocol, IpRepr, Ipv4Packet, Ipv6Packet, UdpPacket,
};

use crate::frame::{self, Payload};

/// Bytes of an ICMP header of both versions, for echoes and unreachable destinations.
const ICMP_BYTES: usize = 8;
const UDP_BYTES: usize = 8;
/// Hop limit of packets to guests.
const HOP_LIMIT: u8 = 64;
/// Largest packet that names an unreachable destination: the smallest MTU of IPv4.
const UNREACHABLE_BYTES_MAX: usize = 548;

/// A packet of a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parsed<'a> {
    /// Address and port of the guest. The port is the identifier, of an echo.
    pub(super) guest: SocketAddr,
    /// Address and port of the destination. The port is 0, of an echo.
    pub(super) remote: SocketAddr,
    /// Its payload.
    pub(super) content: Content<'a>,
}

/// Payload of a guest's packet.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content<'a> {
    /// A TCP segment.
    Tcp {
        /// Whether it requests a connection.
        opens: bool,
        /// Whether it resets a connection.
        resets: bool,
    },
    /// The payload of a UDP datagram.
    Udp(&'a [u8]),
    /// A request for an echo, with its header.
    Echo(&'a [u8]),
}

/// Reads a packet; returns none if it is malformed, a fragment, or of another protocol.
pub(super) fn parse(packet: &[u8]) -> Option<Parsed<'_>> {
    let datagram = frame::parse_ip(packet)?;
    let body = match datagram.source {
        IpAddr::V4(_) => {
            let packet = Ipv4Packet::new_checked(packet).ok()?;
            packet.verify_checksum().then_some(packet.payload())?
        }
        IpAddr::V6(_) => Ipv6Packet::new_checked(packet).ok()?.payload(),
    };
    let (source, destination) = (datagram.source.into(), datagram.destination.into());
    let (guest, remote, content) = match datagram.payload {
        Payload::Tcp {
            source,
            destination,
            opens,
        } => {
            // RST is bit 2.
            let resets = body.get(13)? & 0x04 != 0;
            // A port 0 is none, and smoltcp does not bear it.
            let has_ports = source != 0 && destination != 0;
            has_ports.then_some((source, destination, Content::Tcp { opens, resets }))?
        }
        Payload::Udp { .. } => {
            let udp = UdpPacket::new_checked(body).ok()?;
            let is_whole = udp.verify_checksum(&source, &destination) && udp.dst_port() != 0;
            is_whole.then_some((udp.src_port(), udp.dst_port(), Content::Udp(udp.payload())))?
        }
        Payload::Icmp { .. } => (
            echo_identifier(body, &source, &destination)?,
            0,
            Content::Echo(body),
        ),
        Payload::Other => return None,
    };
    Some(Parsed {
        guest: SocketAddr::new(datagram.source, guest),
        remote: SocketAddr::new(datagram.destination, remote),
        content,
    })
}

/// Returns the identifier of a request for an echo; none of another message.
fn echo_identifier(message: &[u8], source: &IpAddress, destination: &IpAddress) -> Option<u16> {
    match (source, destination) {
        (IpAddress::Ipv6(source), IpAddress::Ipv6(destination)) => {
            let packet = Icmpv6Packet::new_checked(message).ok()?;
            let is_echo = packet.msg_type() == Icmpv6Message::EchoRequest && packet.msg_code() == 0;
            (is_echo && packet.verify_checksum(source, destination)).then(|| packet.echo_ident())
        }
        _ => {
            let packet = Icmpv4Packet::new_checked(message).ok()?;
            let is_echo = packet.msg_type() == Icmpv4Message::EchoRequest && packet.msg_code() == 0;
            (is_echo && packet.verify_checksum()).then(|| packet.echo_ident())
        }
    }
}

/// Returns the bytes of an IP header of the address's version.
pub(super) fn ip_bytes(address: IpAddr) -> usize {
    match address {
        IpAddr::V4(_) => 20,
        IpAddr::V6(_) => 40,
    }
}

/// Returns the bytes before the payload of a UDP datagram.
pub(super) fn udp_header_bytes(address: IpAddr) -> usize {
    ip_bytes(address) + UDP_BYTES
}

/// Writes the headers of a UDP datagram before its payload, which ends the buffer.
pub(super) fn write_udp(packet: &mut [u8], from: SocketAddr, to: SocketAddr) {
    let (source, destination) = (from.ip().into(), to.ip().into());
    let body = write_ip(packet, source, destination, IpProtocol::Udp);
    let mut udp = UdpPacket::new_unchecked(body);
    udp.set_src_port(from.port());
    udp.set_dst_port(to.port());
    let length = u16::try_from(udp.as_ref().len()).unwrap_or(u16::MAX);
    udp.set_len(length);
    udp.fill_checksum(&source, &destination);
}

/// Writes the header of IP, and the identifier of `to`, to an echo, which ends the buffer.
pub(super) fn write_echo(packet: &mut [u8], from: IpAddr, to: SocketAddr) {
    match (from, to.ip()) {
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let body = write_ip(packet, from.into(), to.ip().into(), IpProtocol::Icmpv6);
            let mut echo = Icmpv6Packet::new_unchecked(body);
            echo.set_echo_ident(to.port());
            echo.fill_checksum(&source, &destination);
        }
        _ => {
            let body = write_ip(packet, from.into(), to.ip().into(), IpProtocol::Icmp);
            let mut echo = Icmpv4Packet::new_unchecked(body);
            echo.set_echo_ident(to.port());
            echo.fill_checksum();
        }
    }
}

/// Returns whether a message of a host's echo socket is a reply to an echo.
pub(super) fn is_echo_reply(message: &[u8], address: IpAddr) -> bool {
    let kind = match address {
        IpAddr::V4(_) => u8::from(Icmpv4Message::EchoReply),
        IpAddr::V6(_) => u8::from(Icmpv6Message::EchoReply),
    };
    message.len() >= ICMP_BYTES && message[0] == kind && message[1] == 0
}

/// Reason why a destination is not reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreachable {
    /// No program has the port.
    Port,
    /// There is no way to the host.
    Host,
    /// The guest may not reach it.
    Prohibited,
}

/// Writes the message that a guest's packet did not reach its destination. Returns its bytes; none if the
/// packet has no whole header.
pub(super) fn write_unreachable(
    buffer: &mut [u8],
    gateway: IpAddr,
    packet: &[u8],
    reason: Unreachable,
) -> Option<usize> {
    let source = frame::parse_ip(packet)?.source;
    let start = ip_bytes(gateway) + ICMP_BYTES;
    let quoted = &packet[..packet.len().min(UNREACHABLE_BYTES_MAX - start)];
    let bytes = start + quoted.len();
    let message = buffer.get_mut(..bytes)?;
    message[start..].copy_from_slice(quoted);
    match (gateway, source) {
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let code = match reason {
                Unreachable::Port => Icmpv6DstUnreachable::PortUnreachable,
                Unreachable::Host => Icmpv6DstUnreachable::AddrUnreachable,
                Unreachable::Prohibited => Icmpv6DstUnreachable::AdminProhibit,
            };
            let body = write_ip(message, gateway.into(), source.into(), IpProtocol::Icmpv6);
            body[..ICMP_BYTES].fill(0);
            let mut icmp = Icmpv6Packet::new_unchecked(body);
            icmp.set_msg_type(Icmpv6Message::DstUnreachable);
            icmp.set_msg_code(code.into());
            icmp.fill_checksum(&from, &to);
        }
        (IpAddr::V4(_), IpAddr::V4(_)) => {
            let code = match reason {
                Unreachable::Port => Icmpv4DstUnreachable::PortUnreachable,
                Unreachable::Host => Icmpv4DstUnreachable::HostUnreachable,
                Unreachable::Prohibited => Icmpv4DstUnreachable::CommProhibited,
            };
            let body = write_ip(message, gateway.into(), source.into(), IpProtocol::Icmp);
            body[..ICMP_BYTES].fill(0);
            let mut icmp = Icmpv4Packet::new_unchecked(body);
            icmp.set_msg_type(Icmpv4Message::DstUnreachable);
            icmp.set_msg_code(code.into());
            icmp.fill_checksum();
        }
        _ => return None,
    }
    Some(bytes)
}

/// Writes an IP header, and returns what follows it.
fn write_ip(packet: &mut [u8], source: IpAddress, destination: IpAddress, protocol: IpProtocol) -> &mut [u8] {
    let header = ip_bytes(source.into());
    let repr = IpRepr::new(source, destination, protocol, packet.len() - header, HOP_LIMIT);
    repr.emit(&mut *packet, &ChecksumCapabilities::default());
    &mut packet[header..]
}

#[cfg(test)]
mod tests;
