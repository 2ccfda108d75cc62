use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use proptest::prelude::*;
use smoltcp::wire::{IpAddress, Ipv4Packet, TcpPacket};

use super::many::syn;
use super::world::{World, guest_address, ipv4, listener};

/// A change of a valid segment.
#[derive(Clone, Debug)]
struct Segment {
    flags: u8,
    sequence: i32,
    acknowledged: i32,
    window: u16,
    payload: usize,
    skipped: u64,
}

fn segment() -> impl Strategy<Value = Segment> {
    // Near the window, or anywhere.
    let near = || prop_oneof![-3_i32..3, -70_000_i32..70_000, any::<i32>()];
    let parts = (
        any::<u8>(),
        near(),
        near(),
        any::<u16>(),
        0_usize..3000,
        0_u64..20,
    );
    parts.prop_map(
        |(flags, sequence, acknowledged, window, payload, skipped)| Segment {
            flags,
            sequence,
            acknowledged,
            window,
            payload,
            skipped,
        },
    )
}

/// Returns a segment of the guest of a connection, which begins with `first`.
fn build(first: &[u8], segment: &Segment, server_sequence: i32) -> Vec<u8> {
    let mut packet = first[..40].to_vec();
    packet.resize(40 + segment.payload, 9);
    let mut ip = Ipv4Packet::new_unchecked(&mut packet[..]);
    ip.set_total_len(40 + segment.payload as u16);
    ip.fill_checksum();
    let (source, destination) = (IpAddress::from(ip.src_addr()), IpAddress::from(ip.dst_addr()));
    let mut tcp = TcpPacket::new_unchecked(&mut packet[20..]);
    tcp.set_header_len(20);
    tcp.clear_flags();
    tcp.set_fin(segment.flags & 1 != 0);
    tcp.set_syn(segment.flags & 2 != 0);
    tcp.set_rst(segment.flags & 4 != 0);
    tcp.set_psh(segment.flags & 8 != 0);
    // Most segments acknowledge something.
    tcp.set_ack(segment.flags & 0x30 != 0);
    tcp.set_seq_number(smoltcp::wire::TcpSeqNumber(2_i32.wrapping_add(segment.sequence)));
    let acknowledged = server_sequence.wrapping_add(1).wrapping_add(segment.acknowledged);
    tcp.set_ack_number(smoltcp::wire::TcpSeqNumber(acknowledged));
    tcp.set_window_len(segment.window);
    tcp.fill_checksum(&source, &destination);
    packet
}

/// Opens a connection by the guest's packets. Returns its first packet, the server's first number, and the
/// host's end.
fn open(world: &mut World) -> (Vec<u8>, i32, TcpStream) {
    world.keeps_packets = true;
    world.wire.capacity = 100_000;
    let listener = listener(ipv4());
    let to = SocketAddr::new(ipv4(), listener.local_addr().unwrap().port());
    let first = syn(SocketAddr::new(guest_address(ipv4()), 5000), to);
    world.send(&first);
    world.until("reply", |world| !world.wire.packets.is_empty());
    let (_, reply) = world.wire.packets.pop_front().unwrap();
    let sequence = TcpPacket::new_unchecked(&reply[20..]).seq_number().0;
    let (host, _) = listener.accept().unwrap();
    host.set_nonblocking(true).unwrap();
    (first, sequence, host)
}

/// A guest that first acknowledges a part with a window of 0 leaves the stack a timer which it never stops.
#[test]
fn guest_that_acknowledges_all_without_a_window_gets_few_segments() {
    let mut world = World::new();
    let (first, sequence, mut host) = open(&mut world);
    std::io::Write::write_all(&mut host, &[1; 10]).unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    let acknowledge = |world: &mut World, acknowledged, window| {
        let segment = Segment {
            flags: 0x10,
            sequence: 0,
            acknowledged,
            window,
            payload: 0,
            skipped: 0,
        };
        world.send(&build(&first, &segment, sequence));
    };
    acknowledge(&mut world, 0, 1000);
    world.until("bytes and their end", |world| {
        world.wire.packets.iter().any(|(_, packet)| packet[33] & 1 != 0)
    });
    acknowledge(&mut world, 5, 0);
    acknowledge(&mut world, 11, 0);
    world.wire.packets.clear();
    world.skip(Duration::from_secs(60));
    for _ in 0..100 {
        world.step();
        world.skip(Duration::from_millis(10));
    }
    let segments = world.wire.packets.len();
    assert!(segments <= 2, "{segments}");
    assert_eq!(world.counts().connections, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_are_handled(
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..50),
    ) {
        let mut world = World::new();
        world.keeps_packets = true;
        for mut packet in packets {
            world.send(&packet);
            if let Some(first) = packet.first_mut() {
                *first = if *first & 1 == 0 { 0x45 } else { 0x60 };
                world.send(&packet);
            }
        }
        world.step();
    }

    #[test]
    fn any_segments_of_a_connection_are_handled(
        segments in prop::collection::vec(segment(), 1..60), sent in 0_usize..200_000, host_ends: bool,
    ) {
        let mut world = World::new();
        let (first, sequence, mut host) = open(&mut world);
        // The host sends before the guest's first segment.
        let _ = std::io::Write::write(&mut host, &vec![1; sent]).unwrap();
        if host_ends {
            host.shutdown(Shutdown::Write).unwrap();
        }
        let opening = Segment {
            flags: 0x10,
            sequence: 0,
            acknowledged: 0,
            window: 1000,
            payload: 0,
            skipped: 0,
        };
        world.send(&build(&first, &opening, sequence));
        for segment in &segments {
            world.send(&build(&first, segment, sequence));
            world.skip(Duration::from_millis(segment.skipped * segment.skipped * 10));
            world.step();
        }
        prop_assert_eq!(world.nat.stack.failures(), 0);
    }
}
