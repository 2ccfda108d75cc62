//! Work that a guest leaves to the receivers of its frames: a checksum, and cutting into TCP segments.
//!
//! The header of virtio-net (Virtio 1.2, 5.1.6) before a frame describes the work. Every header is hostile:
//! it is read against the frame behind it, and what is passed on is written anew. Only TCP and UDP have such
//! work, at the place of their own checksum, so that finishing a frame changes nothing that was checked.

use crate::network::header::{ETHERNET_BYTES, Ethernet, IPV4, IPV6, Ip, Transport, protocol, u16_at};

mod checksum;
mod segment;

/// Bytes of the header before a frame: `virtio_net_hdr_v1`.
pub const HEADER_BYTES: usize = 12;
/// Smallest payload of the segments that are cut here, bytes. It bounds the segments that a frame becomes;
/// any host of IPv4 takes a packet of this size with its headers.
pub const SEGMENT_BYTES_MIN: u16 = 512;

/// Greatest number of bytes before the payload of segments: more than senders use, as each segment has them.
const SEGMENT_HEADER_BYTES_MAX: usize = 256;

/// Flag: the checksum is not complete.
const NEEDS_CHECKSUM: u8 = 1;
/// Kinds of segmentation: none, TCP over IPv4, TCP over IPv6; and the bit of TCP's congestion notification.
const NOT_SEGMENTED: u8 = 0;
const TCP_V4: u8 = 1;
const TCP_V6: u8 = 4;
const ECN: u8 = 0x80;
/// Places of the checksum in the headers of TCP and UDP.
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;
/// Bytes of a TCP header without options, and of a UDP header.
const TCP_BYTES: usize = 20;
const UDP_BYTES: usize = 8;

/// A header as it is before a frame.
pub type Header = [u8; HEADER_BYTES];

/// The header of a frame without work.
pub const WHOLE: Header = [0; HEADER_BYTES];

/// A header that contradicts its frame, or describes work that is not offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the header contradicts its frame")]
pub struct HeaderError;

/// Checked work on one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offload {
    /// Bytes of the frame, without padding.
    frame_bytes: usize,
    /// Place of the header above IP in the frame.
    start: usize,
    /// Place of the checksum behind `start`.
    checksum: usize,
    segments: Option<Segments>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segments {
    /// Payload of each segment but the last.
    payload_bytes: u16,
    /// Bytes before the payload in the frame.
    header_bytes: usize,
    is_ipv6: bool,
    has_ecn: bool,
}

/// Work that a receiver does itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// It takes frames without a checksum.
    pub checksums: bool,
    /// It takes TCP over IPv4 without segmentation.
    pub tcp_v4: bool,
    /// It takes TCP over IPv6 without segmentation.
    pub tcp_v6: bool,
    /// Such a frame may have a notification of congestion.
    pub ecn: bool,
}

/// Whether a header describes segments, right or wrong: its frame may exceed the MTU.
pub(crate) fn is_segmented(header: &Header) -> bool {
    header[1] != NOT_SEGMENTED
}

impl Offload {
    /// Reads a header; returns none if the frame is whole.
    ///
    /// # Errors
    /// If the header contradicts the frame.
    pub fn read(header: &Header, frame: &[u8]) -> Result<Option<Self>, HeaderError> {
        if is_whole(header) {
            return Ok(None);
        }
        let ethernet = Ethernet::parse(frame).ok_or(HeaderError)?;
        let ip = match ethernet.kind {
            IPV4 => Ip::ipv4(ethernet.payload),
            IPV6 => Ip::ipv6(ethernet.payload),
            _ => None,
        };
        Self::of_packet(header, &ip.ok_or(HeaderError)?)
    }

    /// Reads the header of a frame with this packet; returns none if the frame is whole.
    ///
    /// # Errors
    /// If the header contradicts the packet.
    pub(crate) fn of_packet(header: &Header, ip: &Ip<'_>) -> Result<Option<Self>, HeaderError> {
        if is_whole(header) {
            return Ok(None);
        }
        if header[0] & NEEDS_CHECKSUM == 0 {
            // Segments have new checksums.
            return Err(HeaderError);
        }
        let Some(Transport {
            protocol,
            offset,
            is_fragment: false,
        }) = ip.transport
        else {
            return Err(HeaderError);
        };
        let (checksum, least_bytes) = match protocol {
            protocol::TCP => (TCP_CHECKSUM, TCP_BYTES),
            protocol::UDP => (UDP_CHECKSUM, UDP_BYTES),
            _ => return Err(HeaderError),
        };
        let start = ETHERNET_BYTES + offset;
        let named = (field(header, 6), field(header, 8));
        let body = ip.packet.get(offset..).ok_or(HeaderError)?;
        if body.len() < least_bytes || (usize::from(named.0), usize::from(named.1)) != (start, checksum) {
            return Err(HeaderError);
        }
        // The sum over a datagram that is shorter than its packet would be wrong.
        let is_udp = protocol == protocol::UDP;
        if is_udp && u16_at(body, 4).map(usize::from) != Some(body.len()) {
            return Err(HeaderError);
        }
        let segments = match header[1] {
            NOT_SEGMENTED => None,
            kind if protocol == protocol::TCP => Segments::read(header, kind, ip, start, body)?,
            _ => return Err(HeaderError),
        };
        Ok(Some(Self {
            frame_bytes: ETHERNET_BYTES + ip.packet.len(),
            start,
            checksum,
            segments,
        }))
    }

    /// Returns the bytes of the frame, without padding.
    pub fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// Returns the bytes of the largest frame that this one becomes.
    pub fn largest_frame_bytes(&self) -> usize {
        let segmented = |segments: Segments| segments.header_bytes + usize::from(segments.payload_bytes);
        self.segments.map_or(self.frame_bytes, segmented)
    }

    /// Returns whether a receiver does this work itself.
    pub fn is_accepted(&self, accepted: Accepted) -> bool {
        let takes_segments = |segments: Segments| {
            let takes_version = if segments.is_ipv6 {
                accepted.tcp_v6
            } else {
                accepted.tcp_v4
            };
            takes_version && (accepted.ecn || !segments.has_ecn)
        };
        accepted.checksums && self.segments.is_none_or(takes_segments)
    }

    /// Returns the header for a receiver that does the work.
    pub fn header(&self) -> Header {
        let mut header = WHOLE;
        header[0] = NEEDS_CHECKSUM;
        let mut put = |at: usize, value: usize| {
            // Places in a frame of 64 KiB, which were read from such fields.
            let value = u16::try_from(value).unwrap_or(u16::MAX);
            header[at..at + 2].copy_from_slice(&value.to_le_bytes());
        };
        put(6, self.start);
        put(8, self.checksum);
        if let Some(segments) = self.segments {
            put(2, segments.header_bytes);
            put(4, usize::from(segments.payload_bytes));
            let kind = if segments.is_ipv6 { TCP_V6 } else { TCP_V4 };
            header[1] = if segments.has_ecn { kind | ECN } else { kind };
        }
        header
    }

    /// Does the work: calls `each` with every frame that `frame` becomes, which is written to `buffer`.
    /// `frame` is the one for which the header was read.
    pub fn finish(&self, frame: &[u8], buffer: &mut Vec<u8>, mut each: impl FnMut(&[u8])) {
        let Some(frame) = frame.get(..self.frame_bytes) else {
            return;
        };
        if let Some(segments) = self.segments {
            return segment::cut(frame, self.start, segments, buffer, each);
        }
        buffer.clear();
        buffer.extend_from_slice(frame);
        checksum::complete(&mut buffer[self.start..], self.checksum);
        each(buffer);
    }
}

impl Segments {
    /// Reads the segmentation of a TCP segment `body`, which begins at `start` in the frame. Returns none if
    /// one segment holds all.
    fn read(
        header: &Header,
        kind: u8,
        ip: &Ip<'_>,
        start: usize,
        body: &[u8],
    ) -> Result<Option<Self>, HeaderError> {
        let is_ipv6 = match kind & !ECN {
            TCP_V4 => false,
            TCP_V6 => true,
            _ => return Err(HeaderError),
        };
        let payload_bytes = field(header, 4);
        let tcp_bytes = usize::from(*body.get(12).ok_or(HeaderError)? >> 4) * 4;
        if is_ipv6 != ip.source.is_ipv6()
            || payload_bytes == 0
            || tcp_bytes < TCP_BYTES
            || body.len() < tcp_bytes
            || start + tcp_bytes > SEGMENT_HEADER_BYTES_MAX
        {
            return Err(HeaderError);
        }
        let payload_bytes = payload_bytes.max(SEGMENT_BYTES_MIN);
        let is_one = body.len() - tcp_bytes <= usize::from(payload_bytes);
        Ok((!is_one).then_some(Self {
            payload_bytes,
            header_bytes: start + tcp_bytes,
            is_ipv6,
            has_ecn: kind & ECN != 0,
        }))
    }
}

/// Whether a header leaves no work.
pub(crate) fn is_whole(header: &Header) -> bool {
    header[0] & NEEDS_CHECKSUM == 0 && !is_segmented(header)
}

fn field(header: &Header, at: usize) -> u16 {
    u16::from_le_bytes([header[at], header[at + 1]])
}

#[cfg(test)]
mod tests;
