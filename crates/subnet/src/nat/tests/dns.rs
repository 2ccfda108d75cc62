use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use smoltcp::socket::tcp::State;

use super::world::{CARD, World, card, ipv4, ipv6};
use crate::nat::{DnsStream, Limits};

const PORT: u16 = 53;

/// The server's end of the one connection that was opened.
fn taken(world: &mut World) -> DnsStream {
    let mut streams = world.nat.take_dns_streams();
    assert_eq!(streams.len(), 1);
    streams.remove(0)
}

#[test]
fn connection_to_the_gateways_dns_leads_to_the_callers_server_and_not_to_the_host() {
    for gateway in [ipv4(), ipv6()] {
        for host in [false, true] {
            let mut world = World::new();
            world.nat.add_card(CARD, card(host));
            let guest = world.connect(gateway, PORT);
            world.until("connection", |world| world.state(guest) == State::Established);
            let stream = taken(&mut world);
            assert_eq!(stream.card, CARD);
            let mut server = UnixStream::from(stream.socket);
            world.write(guest, b"query");
            let mut bytes = [0; 16];
            world.until("query", |_| server.read(&mut bytes).is_ok_and(|count| count == 5));
            server.write_all(b"answer").unwrap();
            world.until("answer", |world| world.read(guest) == b"answer");
            // Each side ends the other's.
            drop(server);
            assert_eq!(world.read_to_end(guest), b"");
            world.socket(guest).close();
            world.until("end", |world| world.counts().connections == 0);
        }
    }
}

#[test]
fn card_that_leaves_ends_the_servers_end() {
    let mut world = World::new();
    let guest = world.connect(ipv4(), PORT);
    world.until("connection", |world| world.state(guest) == State::Established);
    let mut server = UnixStream::from(taken(&mut world).socket);
    world.nat.remove_card(CARD);
    assert_eq!(server.read(&mut [0; 16]).unwrap(), 0);
}

#[test]
fn connections_that_no_server_takes_are_bounded() {
    let mut world = World::with_limits(Limits::of_descriptors(16_384));
    let guests: Vec<_> = (0..80).map(|_| world.connect(ipv4(), PORT)).collect();
    world.until("replies", |world| {
        guests.iter().all(|guest| world.state(*guest) != State::SynSent)
    });
    let opened = guests
        .iter()
        .filter(|guest| world.state(**guest) == State::Established)
        .count();
    assert_eq!(opened, 64);
    // A guest whose reset was lost sends its request again.
    assert!(world.counts().limited >= 16, "{:?}", world.counts());
    // Streams that are dropped end, and others have room.
    drop(world.nat.take_dns_streams());
    let next = world.connect(ipv4(), PORT);
    world.until("connection", |world| world.state(next) == State::Established);
}
