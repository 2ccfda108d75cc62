//! Frames whose senders leave checksums and segmentation to the receiver.

use smoltcp::wire::{IpAddress, Ipv4Packet, TcpPacket, UdpPacket};

use super::*;
use crate::network::header::ETHERNET_BYTES;
use crate::offload::HEADER_BYTES;

const TCP_START: usize = ETHERNET_BYTES + 20;

/// Output that keeps the work with its frame, as cards do whose guests accept it.
#[derive(Default)]
struct Unfinished {
    frames: Vec<(CardId, Vec<u8>, Header)>,
    other: usize,
}

impl Output for Unfinished {
    fn send(&mut self, _: Target, _: &[u8]) -> Delivery {
        self.other += 1;
        Delivery::Taken
    }

    fn send_unfinished(&mut self, card: CardId, frame: &[u8], offload: &Offload) -> Delivery {
        self.frames.push((card, frame.to_vec(), offload.header()));
        Delivery::Full
    }
}

fn header(kind: u8, segment_bytes: u16, checksum: u8) -> Header {
    let [low, high] = segment_bytes.to_le_bytes();
    let mut header = [0; HEADER_BYTES];
    header[..9].copy_from_slice(&[1, kind, 0, 0, low, high, TCP_START as u8, 0, checksum]);
    header
}

/// A TCP segment without a right checksum.
fn tcp(route: Route, payload_bytes: usize) -> Vec<u8> {
    // The lengths and sum of IP are right in a datagram of the same size.
    let mut frame = udp(route, (0, 0), &vec![7; payload_bytes + 12]);
    frame[ETHERNET_BYTES + 9] = 6;
    let mut ip = Ipv4Packet::new_unchecked(&mut frame[ETHERNET_BYTES..]);
    ip.fill_checksum();
    let tcp = &mut frame[TCP_START..];
    tcp[..20].copy_from_slice(&[1, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    // Of the sum for the pseudo-header, the length alone matters here: it is replaced.
    frame
}

#[test]
fn segments_of_64_kib_pass_whole_to_cards_that_accept_them() {
    let (mut world, [a, b, _]) = World::of_three(|settings| settings.mtu = 1500);
    let frame = tcp(route(a, b), 65_000);
    let work = header(1, 1448, 16);
    let mut output = Unfinished::default();
    let network = &mut world.network;
    network.receive_unfinished(a.id, &work, &frame, world.now, &mut output);
    let [(card, sent, header)] = &output.frames[..] else {
        panic!("{:?}", output.frames);
    };
    assert_eq!((*card, sent), (b.id, &frame));
    // The header is written anew: with the right length of headers.
    assert_eq!(header[..9], [1, 1, 54, 0, 0xa8, 5, 34, 0, 16]);
    assert_eq!(output.other, 0);
    let counts = world.network.counts(b.id).unwrap().to_guest;
    assert_eq!((counts.frames, counts.dropped(DropReason::Full)), (1, 1));
}

#[test]
fn other_cards_get_segments_of_the_senders_size() {
    let (mut world, [a, b, _]) = World::of_three(|settings| settings.mtu = 1500);
    let sent = world.receive_unfinished(a, &header(1, 1448, 16), &tcp(route(a, b), 4000));
    let sizes: Vec<usize> = sent
        .iter()
        .map(|(_, frame)| frame.len() - TCP_START - 20)
        .collect();
    assert_eq!(sizes, [1448, 1448, 1104]);
    for (target, frame) in &sent {
        assert_eq!(*target, Target::Card(b.id));
        let packet = Ipv4Packet::new_checked(&frame[ETHERNET_BYTES..]).unwrap();
        assert!(packet.verify_checksum());
        TcpPacket::new_checked(packet.payload()).unwrap();
    }
    let counts = world.network.counts(a.id).unwrap().from_guest;
    assert_eq!((counts.frames, counts.dropped_in_all()), (1, 0));
}

#[test]
fn segments_and_whole_frames_keep_to_the_mtu() {
    let (mut world, [a, b, _]) = World::of_three(|settings| settings.mtu = 1500);
    let large = tcp(route(a, b), 4000);
    world.assert_dropped(a, &large, DropReason::Oversized);
    for work in [header(1, 1461, 16), header(0, 0, 16)] {
        assert_eq!(world.receive_unfinished(a, &work, &large), []);
    }
    assert_eq!(world.dropped(a, DropReason::Oversized), 3);
    assert_eq!(world.receive_unfinished(a, &header(1, 1460, 16), &large).len(), 3);
    let beyond = vec![0; ETHERNET_BYTES + 65_536];
    assert_eq!(world.receive_unfinished(a, &header(1, 1460, 16), &beyond), []);
    assert_eq!(world.dropped(a, DropReason::Oversized), 4);
}

#[test]
fn headers_that_contradict_their_frame_are_malformed() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let frame = tcp(route(a, b), 100);
    // The sum would be in the source address.
    let mut forged = header(0, 0, 12);
    forged[6] = ETHERNET_BYTES as u8;
    let mut without_sum = header(1, 50, 16);
    without_sum[0] = 0;
    for (number, work) in [forged, without_sum, header(4, 50, 16), header(7, 50, 16)]
        .iter()
        .enumerate()
    {
        assert_eq!(world.receive_unfinished(a, work, &frame), []);
        assert_eq!(world.dropped(a, DropReason::Malformed), number as u64 + 1);
    }
    let mut arp = vec![0xff; 6];
    arp.extend(a.mac);
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    arp.extend(a.mac);
    arp.extend([10, 213, 0, 2, 0, 0, 0, 0, 0, 0, 10, 213, 0, 1]);
    assert_eq!(world.receive_unfinished(a, &header(0, 0, 16), &arp), []);
    assert_eq!(world.dropped(a, DropReason::Malformed), 5);
}

#[test]
fn checks_of_senders_hold_for_unfinished_frames() {
    let (mut world, [a, b, c]) = World::of_three(|_| {});
    let frame = tcp(route(b, c), 4000);
    let work = header(1, 1448, 16);
    assert_eq!(world.receive_unfinished(a, &work, &frame), []);
    assert_eq!(world.dropped(a, DropReason::SourceMac), 1);
    let mut frame = frame;
    frame[6..12].copy_from_slice(&a.mac);
    assert_eq!(world.receive_unfinished(a, &work, &frame), []);
    assert_eq!(world.dropped(a, DropReason::SourceAddress), 1);
}

#[test]
fn outside_gets_whole_datagrams_and_uncut_segments() {
    let (mut world, [a, ..]) = World::of_three(|settings| settings.mtu = 1500);
    let outside = Guest {
        ipv4: address("198.51.100.7"),
        ..world.gateway()
    };
    let mut datagram = udp(route(a, outside), (1000, 2000), b"data");
    // The sum of the pseudo-header, as a guest's kernel leaves it.
    let (source, destination): (IpAddress, IpAddress) = (a.ipv4.into(), outside.ipv4.into());
    let whole = datagram.clone();
    let checksum = TCP_START + 6;
    let pseudo = smoltcp::wire::IpRepr::new(source, destination, smoltcp::wire::IpProtocol::Udp, 12, 64);
    let words: Vec<u8> = match pseudo {
        smoltcp::wire::IpRepr::Ipv4(ip) => {
            [&ip.src_addr.octets()[..], &ip.dst_addr.octets(), &[0, 17, 0, 12]].concat()
        }
        smoltcp::wire::IpRepr::Ipv6(_) => unreachable!("the addresses are of IPv4"),
    };
    let sum = words
        .chunks(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum::<u32>();
    let sum = (sum >> 16) + (sum & 0xffff);
    datagram[checksum..checksum + 2].copy_from_slice(&(sum as u16).to_be_bytes());
    let sent = world.receive_unfinished(a, &header(0, 0, 6), &datagram);
    let [(Target::Outside(card), packet)] = &sent[..] else {
        panic!("{sent:?}");
    };
    assert_eq!((*card, &packet[..]), (a.id, &whole[ETHERNET_BYTES..]));
    let body = UdpPacket::new_checked(&packet[20..]).unwrap();
    assert!(body.verify_checksum(&source, &destination));
    let segment = tcp(route(a, outside), 4000);
    let sent = world.receive_unfinished(a, &header(1, 1448, 16), &segment);
    assert_eq!(
        sent,
        [(Target::Outside(a.id), segment[ETHERNET_BYTES..].to_vec())]
    );
}
