use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use super::world::{CARD, World, card, guest_address, ipv4, ipv6};
use crate::nat::exchange::{Exchange, Path};
use crate::nat::packet::{self, Content};
use crate::nat::table::{FlowKey, Transport};
use crate::nat::{CardId, Limits};

/// Returns a datagram of the guest.
pub(super) fn datagram(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; packet::udp_header_bytes(from.ip())];
    bytes.extend(payload);
    packet::write_udp(&mut bytes, from, to);
    bytes
}

fn guest(gateway: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(guest_address(gateway), port)
}

fn server(gateway: IpAddr) -> (UdpSocket, SocketAddr) {
    let server = match gateway {
        IpAddr::V4(_) => UdpSocket::bind("127.0.0.1:0"),
        IpAddr::V6(_) => UdpSocket::bind("[::1]:0"),
    };
    let server = server.unwrap();
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let port = server.local_addr().unwrap().port();
    (server, SocketAddr::new(gateway, port))
}

/// A world whose test reads the packets to the guest.
fn world() -> World {
    let mut world = World::new();
    world.keeps_packets = true;
    world
}

fn receive(world: &mut World) -> (CardId, Vec<u8>) {
    world.until("a packet", |world| !world.wire.packets.is_empty());
    world.wire.packets.pop_front().unwrap()
}

/// Protocol, type and code of a message of ICMP.
fn icmp(packet: &[u8]) -> (u8, u8, u8) {
    match packet[0] >> 4 {
        4 => (packet[9], packet[20], packet[21]),
        _ => (packet[6], packet[40], packet[41]),
    }
}

#[test]
fn datagrams_pass_in_both_directions_over_both_versions() {
    for gateway in [ipv4(), ipv6()] {
        let mut world = world();
        let (server, remote) = server(gateway);
        let from = guest(gateway, 5000);
        for payload in [&b"query"[..], &[], &[7; 60_000]] {
            world.send(&datagram(from, remote, payload));
            let mut buffer = vec![0; 65_536];
            let (bytes, client) = server.recv_from(&mut buffer).unwrap();
            assert_eq!(&buffer[..bytes], payload);
            server.send_to(&[payload, b"!"].concat(), client).unwrap();
            let (card, packet) = receive(&mut world);
            assert_eq!(card, CARD);
            let expected = datagram(remote, from, &[payload, b"!"].concat());
            assert!(packet == expected);
        }
        assert_eq!(world.counts().exchanges, 1);
        assert_eq!(world.counts().opened, 1);
    }
}

#[test]
fn exchange_ends_after_two_minutes_without_packets() {
    let mut world = world();
    let (server, remote) = server(ipv4());
    let from = guest(ipv4(), 5000);
    world.send(&datagram(from, remote, b"a"));
    world.skip(Duration::from_secs(100));
    world.send(&datagram(from, remote, b"b"));
    world.skip(Duration::from_secs(119));
    world.step();
    assert_eq!(world.counts().exchanges, 1);
    world.skip(Duration::from_secs(1));
    world.step();
    assert_eq!(world.counts().exchanges, 0);
    assert_eq!(world.nat.deadline(), None);
    drop(server);
}

#[test]
fn exchange_with_a_name_server_ends_after_ten_seconds() {
    let mut world = world();
    let to = SocketAddr::new(ipv4(), 53);
    world.send(&datagram(guest(ipv4(), 5000), to, b"query"));
    assert_eq!(world.counts().exchanges, 1);
    world.skip(Duration::from_secs(10));
    world.step();
    assert_eq!(world.counts().exchanges, 0);
}

#[test]
fn closed_port_is_reported_to_the_guest() {
    for (gateway, expected) in [(ipv4(), (1, 3, 3)), (ipv6(), (58, 1, 4))] {
        let mut world = world();
        let (server, remote) = server(gateway);
        drop(server);
        let sent = datagram(guest(gateway, 5000), remote, b"query");
        world.send(&sent);
        let (_, packet) = receive(&mut world);
        assert_eq!(icmp(&packet), expected);
        // The message quotes the addresses and ports.
        let header = packet::udp_header_bytes(gateway);
        let quoted = &packet[packet::ip_bytes(gateway) + 8..];
        let addresses = packet::ip_bytes(gateway) - if gateway.is_ipv4() { 8 } else { 32 };
        assert_eq!(quoted[addresses..header - 4], sent[addresses..header - 4]);
    }
}

#[test]
fn host_and_cluster_are_refused_without_the_setting() {
    let mut world = world();
    world.nat.add_card(CARD, card(false));
    let (server, remote) = server(ipv4());
    server.set_nonblocking(true).unwrap();
    let from = guest(ipv4(), 5000);
    let refused = [
        remote,
        "127.0.0.1:9".parse().unwrap(),
        "169.254.0.9:9".parse().unwrap(),
    ];
    for to in refused {
        world.send(&datagram(from, to, b"query"));
        assert_eq!(icmp(&receive(&mut world).1), (1, 3, 13), "{to}");
    }
    let from = guest(ipv6(), 5000);
    for to in ["[::1]:9", "[fe80::1]:9", "[fd77::1]:9", "[64:ff9b::7f00:1]:9"] {
        world.send(&datagram(from, to.parse().unwrap(), b"query"));
        assert_eq!(icmp(&receive(&mut world).1), (58, 1, 1), "{to}");
    }
    assert_eq!(world.counts().barred, 7);
    assert_eq!(world.counts().opened, 0);
    assert!(server.recv(&mut [0; 16]).is_err());
}

#[test]
fn exchange_ends_when_its_destination_is_barred_later() {
    let mut world = world();
    world.nat.add_card(CARD, card(false));
    let key = FlowKey {
        card: CARD,
        transport: Transport::Udp,
        guest: guest(ipv4(), 5000),
        remote: "192.0.2.9:9".parse().unwrap(),
    };
    let id = world.nat.flows.next_id();
    let (socket, _) = server(ipv4());
    let now = world.now();
    let exchange = Exchange::udp(Path::Own(socket), 9);
    world.nat.add_exchange(id, key, exchange, now);
    world.nat.list_addresses = Box::new(|| {
        let mut barred = crate::filter::Barred::default();
        barred.cluster.insert([192, 0, 2, 9].into());
        Some(barred)
    });
    // A second later, the list is requested for the next exchange.
    world.send(&datagram(
        guest(ipv4(), 5001),
        "127.0.0.1:9".parse().unwrap(),
        b"a",
    ));
    assert_eq!(world.counts().exchanges, 1);
    world.skip(Duration::from_millis(1100));
    world.send(&datagram(
        guest(ipv4(), 5001),
        "127.0.0.1:9".parse().unwrap(),
        b"a",
    ));
    assert_eq!(world.counts().exchanges, 0);
}

#[test]
fn flood_of_exchanges_keeps_the_latest() {
    let mut world = world();
    let (server, remote) = server(ipv4());
    let limit = Limits::of_descriptors(16_384).exchanges_per_card;
    for port in 0..2 * limit as u16 {
        world.send(&datagram(
            guest(ipv4(), 10_000 + port),
            remote,
            &port.to_be_bytes(),
        ));
    }
    assert_eq!(world.counts().exchanges, limit as u64);
    assert_eq!(world.counts().opened, 2 * limit as u64);
    world.step();
    assert_eq!(world.nat.flows.of_card(CARD).len(), limit);
    drop(server);
}

#[test]
fn damaged_packets_and_fragments_are_dropped() {
    let mut world = world();
    let (server, remote) = server(ipv4());
    server.set_nonblocking(true).unwrap();
    let whole = datagram(guest(ipv4(), 5000), remote, b"query");
    for at in [2, 6, 9, 12, 24, 26, 29] {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x20;
        world.send(&damaged);
    }
    world.send(&whole[..whole.len() - 1]);
    assert_eq!(world.counts().malformed, 8);
    assert_eq!(world.counts().opened, 0);
    assert!(server.recv(&mut [0; 16]).is_err());
}

#[test]
fn echo_is_replied_to_where_the_host_permits_it() {
    for gateway in [ipv4(), ipv6()] {
        let mut world = world();
        let mut request = vec![0; packet::ip_bytes(gateway)];
        request.extend([if gateway.is_ipv4() { 8 } else { 128 }, 0, 0, 0, 0, 0, 0, 1]);
        request.extend(b"payload");
        // The function writes what a request has, too; its type is that of a request already.
        packet::write_echo(&mut request, guest_address(gateway), SocketAddr::new(gateway, 77));
        let parsed = packet::parse(&request).unwrap();
        assert!(matches!(parsed.content, Content::Echo(_)));
        assert_eq!(parsed.guest.port(), 77);
        world.send(&request);
        if crate::host_socket::connect_echo(loopback(gateway)).is_err() {
            assert_eq!(world.counts().unsent_echoes, 1);
            continue;
        }
        let (_, reply) = receive(&mut world);
        let header = packet::ip_bytes(gateway);
        assert_eq!(reply[header], if gateway.is_ipv4() { 0 } else { 129 });
        assert_eq!(reply[header + 4..], request[header + 4..]);
    }
}

fn loopback(gateway: IpAddr) -> IpAddr {
    match gateway {
        IpAddr::V4(_) => "127.0.0.1".parse().unwrap(),
        IpAddr::V6(_) => "::1".parse().unwrap(),
    }
}
