//! Cuts a frame with a large TCP segment into frames with small ones.

use super::{Segments, TCP_CHECKSUM, checksum};
use crate::network::header::{ETHERNET_BYTES, u16_at};

/// Flags of TCP: FIN and PSH are the last segment's, CWR the first one's.
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;
/// Places in the headers of TCP, IPv4 and IPv6.
const SEQUENCE: usize = 4;
const FLAGS: usize = 13;
const IPV4_LENGTH: usize = 2;
const IPV4_ID: usize = 4;
const IPV4_CHECKSUM: usize = 10;
const IPV6_LENGTH: usize = 4;
const IPV6_BYTES: usize = 40;

/// Calls `each` with a frame for each segment, in `segment`. TCP's header is at `start` of the frame.
pub(super) fn cut(
    frame: &[u8],
    start: usize,
    segments: Segments,
    segment: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]),
) {
    let Some((headers, payload)) = frame.split_at_checked(segments.header_bytes) else {
        return;
    };
    let tcp_bytes = segments.header_bytes - start;
    let (Some(sequence), Some(pseudo)) = (
        headers[start..].get(SEQUENCE..).and_then(<[u8]>::first_chunk),
        u16_at(headers, start + TCP_CHECKSUM),
    ) else {
        return;
    };
    let sequence = u32::from_be_bytes(*sequence);
    // The sum of the pseudo-header without the length.
    let pseudo = checksum::add(pseudo, !length_word(tcp_bytes + payload.len()));
    let pieces = payload.chunks(usize::from(segments.payload_bytes));
    let last = pieces.len().saturating_sub(1);
    let mut done = 0_u32;
    for (number, piece) in pieces.enumerate() {
        segment.clear();
        segment.extend_from_slice(headers);
        segment.extend_from_slice(piece);
        put_ip(
            &mut segment[ETHERNET_BYTES..],
            start - ETHERNET_BYTES,
            segments.is_ipv6,
            number,
        );
        let tcp = &mut segment[start..];
        tcp[SEQUENCE..SEQUENCE + 4].copy_from_slice(&sequence.wrapping_add(done).to_be_bytes());
        if number > 0 {
            tcp[FLAGS] &= !CWR;
        }
        if number < last {
            tcp[FLAGS] &= !(FIN | PSH);
        }
        let pseudo = checksum::add(pseudo, length_word(tcp.len()));
        tcp[TCP_CHECKSUM..TCP_CHECKSUM + 2].copy_from_slice(&pseudo.to_be_bytes());
        checksum::complete(tcp, TCP_CHECKSUM);
        each(segment);
        // A frame has less than 2^32 bytes.
        done = done.wrapping_add(piece.len() as u32);
    }
}

/// Writes length, identifier and checksum of the IP header of a packet, whose headers have `header_bytes`.
fn put_ip(packet: &mut [u8], header_bytes: usize, is_ipv6: bool, number: usize) {
    if is_ipv6 {
        let length = length_word(packet.len() - IPV6_BYTES);
        packet[IPV6_LENGTH..IPV6_LENGTH + 2].copy_from_slice(&length.to_be_bytes());
        return;
    }
    let length = length_word(packet.len());
    let id = u16_at(packet, IPV4_ID).unwrap_or(0).wrapping_add(number as u16);
    for (at, value) in [(IPV4_LENGTH, length), (IPV4_ID, id), (IPV4_CHECKSUM, 0)] {
        packet[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }
    let checksum = !checksum::sum(&packet[..header_bytes]);
    packet[IPV4_CHECKSUM..IPV4_CHECKSUM + 2].copy_from_slice(&checksum.to_be_bytes());
}

/// A length as a word of a header. A packet has less than 64 KiB.
fn length_word(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}
