//! Frames and privileges for tests.

use std::io;
use std::net::IpAddr;

/// The sender's hardware address.
pub const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMPV6: u8 = 58;
/// Flags of TCP.
pub const SYN: u8 = 0x02;
pub const ACK: u8 = 0x10;

pub fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns an IP packet in a broadcast frame.
pub fn frame(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut packet = vec![0x45, 0];
            packet.extend((20 + payload.len() as u16).to_be_bytes());
            packet.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            let sum: u32 = packet
                .chunks(2)
                .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
                .sum();
            let check = !((sum & 0xffff) + (sum >> 16)) as u16;
            packet[10..12].copy_from_slice(&check.to_be_bytes());
            packet.extend(payload);
            ethernet(0x0800, &packet)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut packet = vec![0x60, 0, 0, 0];
            packet.extend((payload.len() as u16).to_be_bytes());
            packet.extend([protocol, 64]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            packet.extend(payload);
            ethernet(0x86dd, &packet)
        }
        _ => panic!("{from} and {to} are of two versions"),
    }
}

pub fn ethernet(kind: u16, packet: &[u8]) -> Vec<u8> {
    [&[0xff; 6][..], &MAC, &kind.to_be_bytes(), packet].concat()
}

pub fn tcp(from: u16, to: u16, flags: u8) -> Vec<u8> {
    let mut segment = [from.to_be_bytes(), to.to_be_bytes()].concat();
    segment.extend([0, 0, 0, 1, 0, 0, 0, 0, 5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
    segment
}

pub fn udp(from: u16, to: u16, data: &[u8]) -> Vec<u8> {
    let length = 8 + data.len() as u16;
    let mut datagram = [from.to_be_bytes(), to.to_be_bytes(), length.to_be_bytes()].concat();
    datagram.extend([0, 0]);
    datagram.extend(data);
    datagram
}

/// Returns a frame in the format of passt's stream.
pub fn message(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

/// Drops this thread's effective capabilities; it stays root by number.
pub fn drop_capabilities() {
    // Version 3 of the interface, this thread; effective, permitted and inheritable sets, twice 32 bits.
    let header = [0x2008_0522_u32, 0];
    let none = [0_u32; 6];
    // SAFETY: the pointers are to live arrays of the sizes that version 3 reads.
    let done = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}
