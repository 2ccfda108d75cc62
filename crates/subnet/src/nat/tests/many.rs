use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{Backlog, listen};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::socket::tcp::State;
use smoltcp::wire::{IpProtocol, IpRepr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber};

use super::world::{CARD, World, card, guest_address, ipv4, listener};
use crate::nat::{CardId, Limits};

/// Returns a request for a connection.
pub(super) fn syn(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let repr = TcpRepr {
        src_port: from.port(),
        dst_port: to.port(),
        control: TcpControl::Syn,
        seq_number: TcpSeqNumber(1),
        ack_number: None,
        window_len: 65_535,
        window_scale: Some(7),
        max_seg_size: Some(1460),
        sack_permitted: true,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let (source, destination) = (from.ip().into(), to.ip().into());
    let ip = IpRepr::new(source, destination, IpProtocol::Tcp, repr.buffer_len(), 64);
    let mut packet = vec![0; ip.buffer_len()];
    let checksums = ChecksumCapabilities::default();
    ip.emit(&mut packet[..], &checksums);
    let mut segment = TcpPacket::new_unchecked(&mut packet[ip.header_len()..]);
    repr.emit(&mut segment, &source, &destination, &checksums);
    packet
}

/// A listener whose backlog is full, so that the host's connections to it do not open.
fn full_listener() -> (TcpListener, TcpStream) {
    let listener = listener(ipv4());
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let filler = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener, filler)
}

#[test]
fn thousand_connections_of_a_card_work_at_once() {
    // Each has three descriptors in this process.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let mut world = World::new();
    world.wire.capacity = 4096;
    let listener = listener(ipv4());
    let port = listener.local_addr().unwrap().port();
    let mut connections = Vec::new();
    for _ in 0..10 {
        let guests: Vec<_> = (0..100).map(|_| world.connect(ipv4(), port)).collect();
        world.until("connections", |world| {
            guests
                .iter()
                .all(|guest| world.state(*guest) == State::Established)
        });
        for guest in guests {
            connections.push((guest, listener.accept().unwrap().0));
        }
    }
    assert_eq!(world.counts().connections, 1000);
    let (used, _) = world.nat.flows.used(CARD);
    assert!(used.memory <= 96 << 20, "{used:?}");
    for (number, (_, host)) in connections.iter_mut().enumerate() {
        host.write_all(&[number as u8]).unwrap();
    }
    world.run_for(Duration::from_millis(200));
    // Connections are accepted in any order.
    let mut received: Vec<_> = connections
        .iter()
        .flat_map(|(guest, _)| world.read(*guest))
        .collect();
    received.sort_unstable();
    let mut expected: Vec<_> = (0..1000).map(|number| (number % 256) as u8).collect();
    expected.sort_unstable();
    assert_eq!(received, expected);
}

#[test]
fn flood_of_requests_is_bounded_and_leaves_others_their_connections() {
    let mut world = World::new();
    world.keeps_packets = true;
    let (full, _filler) = full_listener();
    let to = SocketAddr::new(ipv4(), full.local_addr().unwrap().port());
    let start = Instant::now();
    for number in 0..100_000_u32 {
        let address = guest_address(ipv4());
        // Each card has one address; a hostile guest may use several through one card.
        let from = SocketAddr::new(address, 1024 + (number % 64_000) as u16);
        world.send(&syn(from, to));
    }
    assert!(start.elapsed() < Duration::from_secs(10));
    let limit = Limits::of_descriptors(16_384).connecting_per_card as u64;
    assert_eq!(world.counts().connections, limit);
    assert!(world.counts().limited > 60_000);
    assert_eq!(world.nat.flows.used(CARD).0.memory, 0);
    // Another card connects.
    let other = CardId(2);
    world.nat.add_card(other, card(true));
    let listener = listener(ipv4());
    let to = SocketAddr::new(ipv4(), listener.local_addr().unwrap().port());
    let now = world.now();
    let request = syn(SocketAddr::new([10, 77, 0, 6].into(), 5000), to);
    world.wire.packets.clear();
    world.nat.receive(other, &request, now, &mut world.wire);
    world.until("reply", |world| {
        world.wire.packets.iter().any(|(card, _)| *card == other)
    });
    // The flood ends by itself.
    world.skip(Duration::from_secs(31));
    world.step();
    assert_eq!(world.counts().connections, 0);
}

#[test]
fn connections_that_guests_leave_half_open_end_after_their_time() {
    let mut world = World::new();
    world.keeps_packets = true;
    world.wire.capacity = 20;
    let listener = listener(ipv4());
    let to = SocketAddr::new(ipv4(), listener.local_addr().unwrap().port());
    for port in 0..50 {
        world.send(&syn(SocketAddr::new(guest_address(ipv4()), 5000 + port), to));
    }
    // The guest's queue is full, so that connections wait for it.
    world.run_for(Duration::from_millis(100));
    assert_eq!(world.counts().connections, 50);
    let waiting = |world: &World| {
        let card = &world.nat.cards[&CARD];
        card.waiting.len() + card.sent.len()
    };
    assert!(waiting(&world) > 10);
    world.skip(Duration::from_secs(31));
    world.run_for(Duration::from_millis(20));
    assert_eq!(world.counts().connections, 0);
    assert_eq!(waiting(&world), 0);
}

#[test]
fn large_request_for_a_connection_is_not_kept() {
    let mut world = World::new();
    let (full, _filler) = full_listener();
    let to = SocketAddr::new(ipv4(), full.local_addr().unwrap().port());
    let request = syn(SocketAddr::new(guest_address(ipv4()), 5000), to);
    let mut ip = smoltcp::wire::Ipv4Packet::new_unchecked(request);
    let bytes = usize::from(ip.total_len()) + 1000;
    ip.set_total_len(bytes as u16);
    ip.fill_checksum();
    let mut packet = ip.into_inner();
    packet.resize(bytes, 0);
    world.send(&packet);
    assert_eq!(world.counts().malformed, 1);
    assert_eq!(world.counts().connections, 0);
}

#[test]
fn connection_beyond_the_limits_is_reset() {
    let limits = Limits {
        memory_per_card: 64 << 10,
        ..Limits::of_descriptors(16_384)
    };
    let mut world = World::with_limits(limits);
    let listener = listener(ipv4());
    let port = listener.local_addr().unwrap().port();
    let first = world.connect(ipv4(), port);
    world.until("connection", |world| world.state(first) == State::Established);
    let second = world.connect(ipv4(), port);
    world.until("connection", |world| world.state(second) == State::Established);
    let third = world.connect(ipv4(), port);
    world.until("reset", |world| world.state(third) == State::Closed);
    assert_eq!(world.counts().limited, 1);
    assert_eq!(world.counts().connections, 2);
}
