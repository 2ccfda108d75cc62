use proptest::prelude::*;
use smoltcp::wire::{IpAddress, Ipv4Packet, Ipv6Packet, TcpPacket, UdpPacket};

use super::*;

const EVERYTHING: Accepted = Accepted {
    checksums: true,
    tcp_v4: true,
    tcp_v6: true,
    ecn: true,
};
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;

/// Flags of the large segments: CWR, ACK, PSH and FIN.
const FLAGS: u8 = 0x80 | 0x10 | 0x08 | 0x01;

fn ip_header(is_ipv6: bool, protocol: u8, body_bytes: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    if is_ipv6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend((body_bytes as u16).to_be_bytes());
        frame.extend([protocol, 64]);
        frame.extend([0xfd; 32]);
    } else {
        frame.extend([0x08, 0x00, 0x45, 0]);
        frame.extend(((IPV4_BYTES + body_bytes) as u16).to_be_bytes());
        frame.extend([
            0xff, 0xff, 0x40, 0, 64, protocol, 0, 0, 10, 213, 0, 2, 10, 213, 0, 3,
        ]);
        let sum = !checksum::sum(&frame[ETHERNET_BYTES..]);
        frame[ETHERNET_BYTES + 10..ETHERNET_BYTES + 12].copy_from_slice(&sum.to_be_bytes());
    }
    frame
}

/// Adds a message above IP, with the sum of its pseudo-header at `at`, as a guest's kernel leaves it.
fn with_body(is_ipv6: bool, protocol: u8, mut body: Vec<u8>, at: usize) -> Vec<u8> {
    let mut frame = ip_header(is_ipv6, protocol, body.len());
    let addresses = if is_ipv6 { 22..54 } else { 26..34 };
    let words = [(body.len() as u32).to_be_bytes(), [0, 0, 0, protocol]].concat();
    let pseudo = checksum::add(checksum::sum(&frame[addresses]), checksum::sum(&words));
    body[at..at + 2].copy_from_slice(&pseudo.to_be_bytes());
    frame.extend(body);
    frame
}

/// A frame with one TCP segment of 12 bytes of options.
fn tcp(is_ipv6: bool, payload: &[u8]) -> Vec<u8> {
    let mut body = vec![
        0x9c, 0x40, 0x14, 0x51, 0xff, 0xff, 0xff, 0x00, 0, 0, 0, 9, 0x80, FLAGS, 0xff, 0xff,
    ];
    body.extend([0; 4]);
    body.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
    body.extend(payload);
    with_body(is_ipv6, protocol::TCP, body, TCP_CHECKSUM)
}

fn udp(is_ipv6: bool, data: &[u8]) -> Vec<u8> {
    let mut body = vec![0x9c, 0x40, 0, 7];
    body.extend(((UDP_BYTES + data.len()) as u16).to_be_bytes());
    body.extend([0, 0]);
    body.extend(data);
    with_body(is_ipv6, protocol::UDP, body, UDP_CHECKSUM)
}

fn start(is_ipv6: bool) -> usize {
    ETHERNET_BYTES + if is_ipv6 { IPV6_BYTES } else { IPV4_BYTES }
}

fn header(kind: u8, segment_bytes: u16, start: usize, checksum: usize) -> Header {
    let mut header = WHOLE;
    header[0] = NEEDS_CHECKSUM;
    header[1] = kind;
    header[4..6].copy_from_slice(&segment_bytes.to_le_bytes());
    header[6..8].copy_from_slice(&(start as u16).to_le_bytes());
    header[8..10].copy_from_slice(&(checksum as u16).to_le_bytes());
    header
}

fn tcp_header(is_ipv6: bool, segment_bytes: u16) -> Header {
    let kind = ECN | if is_ipv6 { TCP_V6 } else { TCP_V4 };
    header(kind, segment_bytes, start(is_ipv6), TCP_CHECKSUM)
}

fn finished(offload: &Offload, frame: &[u8]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    offload.finish(frame, &mut Vec::new(), |whole| frames.push(whole.to_vec()));
    frames
}

/// Checks lengths and sums of a frame; returns the addresses and the message above IP.
fn checked(frame: &[u8], is_ipv6: bool) -> (IpAddress, IpAddress, Vec<u8>) {
    let packet = &frame[ETHERNET_BYTES..];
    if is_ipv6 {
        let packet = Ipv6Packet::new_checked(packet).unwrap();
        assert_eq!(packet.total_len(), packet.as_ref().len());
        let addresses = (packet.src_addr(), packet.dst_addr());
        (addresses.0.into(), addresses.1.into(), packet.payload().to_vec())
    } else {
        let packet = Ipv4Packet::new_checked(packet).unwrap();
        assert!(packet.verify_checksum(), "IPv4");
        assert_eq!(usize::from(packet.total_len()), packet.as_ref().len());
        let addresses = (packet.src_addr(), packet.dst_addr());
        (addresses.0.into(), addresses.1.into(), packet.payload().to_vec())
    }
}

proptest! {
    #[test]
    fn segments_have_right_sums_and_hold_the_payload_once_in_order(
        is_ipv6: bool,
        payload in prop::collection::vec(any::<u8>(), 0..20_000),
        segment_bytes in 1_u16..9000,
    ) {
        let frame = tcp(is_ipv6, &payload);
        let work = Offload::read(&tcp_header(is_ipv6, segment_bytes), &frame).unwrap().unwrap();
        let frames = finished(&work, &frame);
        let size = usize::from(segment_bytes.max(SEGMENT_BYTES_MIN));
        prop_assert_eq!(frames.len(), payload.len().div_ceil(size).max(1));
        let mut joined: Vec<u8> = Vec::new();
        for (number, whole) in frames.iter().enumerate() {
            prop_assert!(whole.len() <= work.largest_frame_bytes());
            prop_assert_eq!(Offload::read(&WHOLE, whole), Ok(None));
            let (source, destination, body) = checked(whole, is_ipv6);
            let segment = TcpPacket::new_checked(&body[..]).unwrap();
            prop_assert!(segment.verify_checksum(&source, &destination));
            let place = 0xffff_ff00_u32.wrapping_add(joined.len() as u32);
            prop_assert_eq!(segment.seq_number().0 as u32, place);
            let (is_first, is_last) = (number == 0, number + 1 == frames.len());
            prop_assert_eq!(segment.cwr(), is_first);
            prop_assert_eq!((segment.fin(), segment.psh()), (is_last, is_last));
            prop_assert!(segment.ack());
            if !is_ipv6 {
                let packet = Ipv4Packet::new_checked(&whole[ETHERNET_BYTES..]).unwrap();
                prop_assert_eq!(packet.ident(), 0xffff_u16.wrapping_add(number as u16));
            }
            joined.extend(segment.payload());
        }
        prop_assert_eq!(joined, payload);
    }

    #[test]
    fn datagrams_get_right_sums(is_ipv6: bool, data in prop::collection::vec(any::<u8>(), 0..3000)) {
        let frame = udp(is_ipv6, &data);
        let work = Offload::read(&header(NOT_SEGMENTED, 0, start(is_ipv6), UDP_CHECKSUM), &frame);
        let frames = finished(&work.unwrap().unwrap(), &frame);
        prop_assert_eq!(frames.len(), 1);
        let (source, destination, body) = checked(&frames[0], is_ipv6);
        let datagram = UdpPacket::new_checked(&body[..]).unwrap();
        prop_assert!(datagram.verify_checksum(&source, &destination));
        prop_assert!(datagram.checksum() != 0);
        prop_assert_eq!(datagram.payload(), &data[..]);
    }

    /// A receiver reads what the header says of the frame again, and only the checksum changes in a frame
    /// that was checked before.
    #[test]
    fn hostile_headers_change_nothing_but_the_checksum(
        header: Header,
        names_place: bool,
        is_tcp: bool,
        is_ipv6: bool,
        payload in prop::collection::vec(any::<u8>(), 0..2000),
        cut in 0_usize..2100,
    ) {
        let (frame, place) = match is_tcp {
            true => (tcp(is_ipv6, &payload), TCP_CHECKSUM),
            false => (udp(is_ipv6, &payload), UDP_CHECKSUM),
        };
        let frame = &frame[..frame.len() - cut.min(frame.len())];
        let mut header = header;
        if names_place {
            header[6..8].copy_from_slice(&(start(is_ipv6) as u16).to_le_bytes());
            header[8..10].copy_from_slice(&(place as u16).to_le_bytes());
        }
        let Ok(Some(work)) = Offload::read(&header, frame) else {
            return Ok(());
        };
        prop_assert_eq!(Offload::read(&work.header(), frame), Ok(Some(work)));
        for whole in finished(&work, frame) {
            let same = start(is_ipv6);
            prop_assert_eq!(&whole[ETHERNET_BYTES + 20..same], &frame[ETHERNET_BYTES + 20..same]);
            prop_assert_eq!(&whole[..ETHERNET_BYTES], &frame[..ETHERNET_BYTES]);
            prop_assert_eq!(&whole[same..same + 4], &frame[same..same + 4], "ports");
            if !is_ipv6 {
                prop_assert_eq!(&whole[26..34], &frame[26..34], "addresses");
            }
        }
    }
}

#[test]
fn headers_that_contradict_their_frames_are_refused() {
    let v4 = start(false);
    let good = tcp(false, &[1; 3000]);
    let refused = |header: &Header, frame: &[u8], why: &str| {
        assert_eq!(Offload::read(header, frame), Err(HeaderError), "{why}");
    };
    let sane = header(TCP_V4, 1448, v4, TCP_CHECKSUM);
    assert!(Offload::read(&sane, &good).unwrap().is_some());
    refused(&header(TCP_V6, 1448, v4, TCP_CHECKSUM), &good, "another version");
    refused(&header(3, 1448, v4, TCP_CHECKSUM), &good, "segments of UDP");
    refused(&header(5, 1448, v4, TCP_CHECKSUM), &good, "datagrams");
    refused(
        &header(ECN, 1448, v4, TCP_CHECKSUM),
        &good,
        "a notification alone",
    );
    refused(&header(TCP_V4, 0, v4, TCP_CHECKSUM), &good, "empty segments");
    // The source address would become what the guest likes.
    refused(
        &header(NOT_SEGMENTED, 0, ETHERNET_BYTES, 12),
        &good,
        "a sum in the header of IP",
    );
    refused(&header(NOT_SEGMENTED, 0, v4, 0), &good, "a sum in the ports");
    refused(
        &header(NOT_SEGMENTED, 0, v4, UDP_CHECKSUM),
        &good,
        "the place of UDP's sum",
    );
    refused(
        &header(NOT_SEGMENTED, 0, good.len() - 1, 0),
        &good,
        "the last byte",
    );
    refused(
        &header(NOT_SEGMENTED, 0, usize::from(u16::MAX), TCP_CHECKSUM),
        &good,
        "behind the end",
    );
    let mut without_sum = sane;
    without_sum[0] = 0;
    refused(&without_sum, &good, "segments with the sum of the whole");
    let mut short = good.clone();
    short[v4 + 12] = 0x40;
    refused(&sane, &short, "a TCP header of 16 bytes");
    short[v4 + 12] = 0xf0;
    refused(&sane, &tcp(false, &[])[..v4 + 20], "a packet that is cut off");
    assert!(Offload::read(&sane, &short).unwrap().is_some());
    let mut fragment = good.clone();
    fragment[ETHERNET_BYTES + 6] = 0x20;
    refused(
        &header(NOT_SEGMENTED, 0, v4, TCP_CHECKSUM),
        &fragment,
        "a first fragment",
    );
    fragment[ETHERNET_BYTES + 7] = 1;
    refused(
        &header(NOT_SEGMENTED, 0, v4, TCP_CHECKSUM),
        &fragment,
        "a later fragment",
    );
    let mut datagram = udp(false, &[1; 100]);
    let of_udp = header(NOT_SEGMENTED, 0, v4, UDP_CHECKSUM);
    refused(
        &header(TCP_V4, 10, v4, UDP_CHECKSUM),
        &datagram,
        "a datagram in segments",
    );
    datagram[v4 + 5] -= 1;
    refused(&of_udp, &datagram, "a datagram that is shorter than its packet");
    let icmp = with_body(false, protocol::ICMP, vec![8; 64], 2);
    refused(&header(NOT_SEGMENTED, 0, v4, 2), &icmp, "an echo");
    let mut other = good.clone();
    other[12] = 0x81;
    refused(&sane, &other, "neither version of IP");
    refused(&sane, &[], "no frame");
}

#[test]
fn receiver_gets_only_the_work_that_it_accepts() {
    let accepts = |accepted: Accepted, is_ipv6: bool| {
        let frame = tcp(is_ipv6, &[1; 3000]);
        let mut header = tcp_header(is_ipv6, 1000);
        header[1] &= !ECN;
        let work = Offload::read(&header, &frame).unwrap().unwrap();
        let with_ecn = Offload::read(&tcp_header(is_ipv6, 1000), &frame)
            .unwrap()
            .unwrap();
        (work.is_accepted(accepted), with_ecn.is_accepted(accepted))
    };
    for is_ipv6 in [false, true] {
        assert_eq!(accepts(EVERYTHING, is_ipv6), (true, true));
        assert_eq!(accepts(Accepted::default(), is_ipv6), (false, false));
        let changed = |change: fn(&mut Accepted)| {
            let mut accepted = EVERYTHING;
            change(&mut accepted);
            accepts(accepted, is_ipv6)
        };
        assert_eq!(changed(|accepted| accepted.checksums = false), (false, false));
        assert_eq!(changed(|accepted| accepted.ecn = false), (true, false));
        assert_eq!(changed(|accepted| accepted.tcp_v4 = false), (is_ipv6, is_ipv6));
        assert_eq!(changed(|accepted| accepted.tcp_v6 = false), (!is_ipv6, !is_ipv6));
    }
    let frame = udp(false, &[1; 30]);
    let work = Offload::read(&header(NOT_SEGMENTED, 0, start(false), UDP_CHECKSUM), &frame);
    let sums_alone = Accepted {
        checksums: true,
        ..Accepted::default()
    };
    assert!(work.unwrap().unwrap().is_accepted(sums_alone));
}

#[test]
fn padding_is_cut_off_and_small_segments_are_one_frame() {
    let mut frame = tcp(false, &[7; 10]);
    let bytes = frame.len();
    frame.extend([0xaa; 9]);
    let work = Offload::read(&tcp_header(false, 5), &frame).unwrap().unwrap();
    assert_eq!((work.frame_bytes(), work.largest_frame_bytes()), (bytes, bytes));
    assert_eq!(work.header()[1], NOT_SEGMENTED);
    let frames = finished(&work, &frame);
    assert_eq!((frames.len(), frames[0].len()), (1, bytes));
    checked(&frames[0], false);
}

#[test]
fn checksum_is_that_of_the_standard() {
    // RFC 1071, section 3.
    assert_eq!(
        checksum::sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]),
        0xddf2
    );
    assert_eq!(checksum::sum(&[0xff, 0xff, 0x12]), 0x1200);
    assert_eq!(checksum::sum(&[]), 0);
}
