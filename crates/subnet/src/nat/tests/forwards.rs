use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use smoltcp::socket::tcp::State;

use super::datagrams::datagram;
use super::world::{CARD, World, gateways, ipv4};
use crate::nat::packet::{self, Content};
use crate::nat::{CardId, Gateways};
use crate::{PortForward, Protocol, SubnetError};

/// Returns a forwarding of an unused port of the host.
fn forward(protocol: Protocol, guest: u16) -> PortForward {
    let host = match protocol {
        Protocol::Tcp => TcpListener::bind("0.0.0.0:0").unwrap().local_addr(),
        Protocol::Udp => UdpSocket::bind("0.0.0.0:0").unwrap().local_addr(),
    };
    PortForward {
        protocol,
        host: host.unwrap().port(),
        guest,
    }
}

fn host(forward: PortForward) -> SocketAddr {
    SocketAddr::new([127, 0, 0, 1].into(), forward.host)
}

#[test]
fn clients_of_a_forwarded_port_reach_the_guest_from_the_gateway() {
    let mut world = World::new();
    let forward = forward(Protocol::Tcp, 80);
    world.nat.add_forward(CARD, forward).unwrap();
    for address in [
        host(forward),
        SocketAddr::new("::1".parse().unwrap(), forward.host),
    ] {
        let guest = world.listen(80);
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        client.write_all(b"request").unwrap();
        world.until("request", |world| world.read(guest) == b"request");
        let remote = world.socket(guest).remote_endpoint().unwrap();
        assert_eq!(remote.addr, ipv4().into());
        world.write(guest, b"answer");
        world.socket(guest).close();
        world.until("end", |world| world.state(guest) == State::FinWait2);
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "answer");
        drop(client);
        world.until("end", |world| world.counts().connections == 0);
    }
}

#[test]
fn port_that_the_guest_refuses_is_reset() {
    let mut world = World::new();
    let forward = forward(Protocol::Tcp, 81);
    world.nat.add_forward(CARD, forward).unwrap();
    let mut client = TcpStream::connect(host(forward)).unwrap();
    client.set_nonblocking(true).unwrap();
    world.until("reset", |_| {
        let error = client.read(&mut [0; 16]).unwrap_err();
        error.kind() == ErrorKind::ConnectionReset
    });
    assert_eq!(world.counts().connections, 0);
}

#[test]
fn silent_guest_is_given_up_after_its_time() {
    let mut world = World::new();
    world.keeps_packets = true;
    let forward = forward(Protocol::Tcp, 81);
    world.nat.add_forward(CARD, forward).unwrap();
    let _client = TcpStream::connect(host(forward)).unwrap();
    world.until("connection", |world| world.counts().connections == 1);
    world.skip(Duration::from_secs(29));
    world.run_for(Duration::from_millis(20));
    assert_eq!(world.counts().connections, 1);
    world.skip(Duration::from_secs(2));
    world.until("end", |world| world.counts().connections == 0);
}

#[test]
fn forwarded_ports_change_at_run_time() {
    let mut world = World::new();
    let forward = forward(Protocol::Tcp, 80);
    assert!(!world.nat.remove_forward(CARD, forward));
    world.nat.add_forward(CARD, forward).unwrap();
    let guest = world.listen(80);
    let mut client = TcpStream::connect(host(forward)).unwrap();
    world.until("connection", |world| world.state(guest) == State::Established);
    assert!(world.nat.remove_forward(CARD, forward));
    let refused = TcpStream::connect(host(forward)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    // The connection stays.
    client.write_all(b"more").unwrap();
    world.until("bytes", |world| world.read(guest) == b"more");
    world.nat.add_forward(CARD, forward).unwrap();
    TcpStream::connect(host(forward)).unwrap();
    world.nat.remove_card(CARD);
    TcpStream::connect(host(forward)).unwrap_err();
}

#[test]
fn port_in_use_or_without_a_card_is_an_error() {
    let mut world = World::new();
    let used = TcpListener::bind("0.0.0.0:0").unwrap();
    let tcp = PortForward {
        protocol: Protocol::Tcp,
        host: used.local_addr().unwrap().port(),
        guest: 80,
    };
    let error = world.nat.add_forward(CARD, tcp).unwrap_err();
    assert!(matches!(error, SubnetError::PortInUse { .. }), "{error}");
    let udp = forward(Protocol::Udp, 80);
    world.nat.add_forward(CARD, udp).unwrap();
    let error = world.nat.add_forward(CARD, udp).unwrap_err();
    assert!(matches!(error, SubnetError::PortInUse { .. }), "{error}");
    let error = world
        .nat
        .add_forward(CardId(9), forward(Protocol::Tcp, 80))
        .unwrap_err();
    assert!(matches!(error, SubnetError::PortWithoutCard { .. }), "{error}");
}

#[test]
fn reply_comes_from_the_address_to_which_the_client_has_sent() {
    let mut world = World::new();
    world.keeps_packets = true;
    let forward = forward(Protocol::Udp, 53);
    world.nat.add_forward(CARD, forward).unwrap();
    for (own, to) in [("127.0.0.1:0", "127.0.0.2"), ("[::1]:0", "::1")] {
        let client = UdpSocket::bind(own).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        // The kernel drops what comes from another address.
        client
            .connect(SocketAddr::new(to.parse().unwrap(), forward.host))
            .unwrap();
        client.send(b"query").unwrap();
        world.until("query", |world| !world.wire.packets.is_empty());
        let (_, bytes) = world.wire.packets.pop_front().unwrap();
        let parsed = packet::parse(&bytes).unwrap();
        world.send(&datagram(parsed.remote, parsed.guest, b"reply"));
        let mut reply = [0; 16];
        let count = client.recv(&mut reply).unwrap();
        assert_eq!(&reply[..count], b"reply");
    }
}

#[test]
fn datagrams_of_each_client_come_from_a_port_of_their_own() {
    let mut world = World::new();
    world.keeps_packets = true;
    let forward = forward(Protocol::Udp, 53);
    world.nat.add_forward(CARD, forward).unwrap();
    let clients = [0; 2].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
    for (number, client) in clients.iter().enumerate() {
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        for _ in 0..2 {
            client.send_to(&[number as u8], host(forward)).unwrap();
        }
    }
    world.until("four datagrams", |world| world.wire.packets.len() == 4);
    assert_eq!(world.counts().exchanges, 2);
    let packets = std::mem::take(&mut world.wire.packets);
    for (_, bytes) in packets {
        let parsed = packet::parse(&bytes).unwrap();
        let Gateways { ipv4, .. } = gateways();
        assert_eq!(parsed.guest.ip(), ipv4);
        assert_eq!(parsed.remote, "10.77.0.5:53".parse().unwrap());
        let Content::Udp(payload) = parsed.content else {
            panic!("{parsed:?}");
        };
        world.send(&datagram(parsed.remote, parsed.guest, &[payload[0], 9]));
    }
    for (number, client) in clients.iter().enumerate() {
        for _ in 0..2 {
            let mut answer = [0; 16];
            let (bytes, from) = client.recv_from(&mut answer).unwrap();
            assert_eq!(answer[..bytes], [number as u8, 9]);
            assert_eq!(from, host(forward));
        }
    }
    assert!(world.nat.remove_forward(CARD, forward));
    assert_eq!(world.counts().exchanges, 0);
}
