//! The gateway: its services, and the way to the outside.

use std::net::SocketAddr;
use std::time::Duration;

use super::*;
use crate::network::header::ETHERNET_BYTES;

fn outside(guest: Guest, gateway: Guest, to: &str) -> Route {
    let to = address(to);
    Route {
        from: if to.is_ipv4() { guest.ipv4 } else { guest.ipv6 },
        to,
        ..route(guest, gateway)
    }
}

#[test]
fn packets_to_the_outside_lose_their_ethernet_header_and_padding() {
    let (mut world, [a, ..]) = World::of_three(|_| {});
    let gateway = world.gateway();
    for to in ["8.8.8.8", "10.0.0.1", "2001:db8::1"] {
        let frame = udp(outside(a, gateway, to), (1, 2), b"data");
        let padded = [&frame[..], &[0; 30]].concat();
        let packet = frame[ETHERNET_BYTES..].to_vec();
        assert_eq!(world.receive(a, &padded), [(Target::Outside(a.id), packet)]);
    }
    world.full.push(Target::Outside(a.id));
    let frame = udp(outside(a, gateway, "8.8.8.8"), (1, 2), b"data");
    world.assert_dropped(a, &frame, DropReason::Full);
}

#[test]
fn packets_that_are_not_for_the_outside_are_dropped() {
    let (mut world, [a, ..]) = World::of_three(|_| {});
    let gateway = world.gateway();
    for to in [
        "10.213.3.3",
        "10.213.255.255",
        "255.255.255.255",
        "224.0.0.251",
        "127.0.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "fe80::77",
        "ff02::1",
        "::1",
        "::",
    ] {
        let frame = udp(outside(a, gateway, to), (1, 2), b"");
        world.assert_dropped(a, &frame, DropReason::Unroutable);
    }
    let other = icmp(route(a, gateway), &[13, 0, 0, 0, 0, 0, 0, 0]);
    world.assert_dropped(a, &other, DropReason::NoSuchService);
}

#[test]
fn isolated_network_reaches_only_its_gateway() {
    let (mut world, [a, ..]) = World::of_three(|settings| settings.outside = false);
    let gateway = world.gateway();
    for to in ["8.8.8.8", "2001:db8::1"] {
        let frame = udp(outside(a, gateway, to), (1, 2), b"");
        world.assert_dropped(a, &frame, DropReason::Isolated);
    }
    // Replies of forwarded ports go to the gateway's address.
    let reply = udp(route(a, gateway), (80, 40_000), b"");
    assert_eq!(world.receive(a, &reply)[0].0, Target::Outside(a.id));
    // Names of the outside don't exist, and no query leaves the host.
    let sent = world.receive(a, &udp(route(a, gateway), (5000, 53), &query("example.org", 1)));
    assert_eq!(sent[0].0, Target::Card(a.id));
    let answer = &sent[0].1[ETHERNET_BYTES + 28..];
    assert_eq!(answer[3] & 0x0f, 3, "NXDOMAIN");
}

#[test]
fn card_without_the_outside_is_refused_where_another_of_its_network_passes() {
    let mut world = World::new(Settings {
        outside_ipv6: true,
        ..Settings::new("test")
    });
    let a = world.attach(card("a", 1));
    let b = world.attach(Card {
        outside: false,
        ..card("b", 2)
    });
    let gateway = world.gateway();
    for to in ["8.8.8.8", "2001:db8::1"] {
        let frame = |guest| udp(outside(guest, gateway, to), (1, 2), b"");
        let (passes, barred) = (frame(a), frame(b));
        assert_eq!(world.receive(a, &passes)[0].0, Target::Outside(a.id));
        world.assert_dropped(b, &barred, DropReason::Isolated);
    }
    let asks = |guest| udp(route(guest, gateway), (5000, 53), &query("example.org", 1));
    let (asks_a, asks_b) = (asks(a), asks(b));
    assert!(matches!(world.receive(a, &asks_a)[0].0, Target::Query(_)));
    let sent = world.receive(b, &asks_b);
    assert_eq!(sent[0].1[ETHERNET_BYTES + 28 + 3] & 0x0f, 3, "NXDOMAIN");
    // The cards reach each other.
    let frame = udp(route(b, a), (1, 2), b"");
    assert_eq!(world.receive(b, &frame)[0].0, Target::Card(a.id));
    // A router's lifetime, behind the headers of Ethernet and IPv6 and 6 bytes of the message.
    let solicitation = [133, 0, 0, 0, 0, 0, 0, 0];
    for (guest, is_router) in [(a, true), (b, false)] {
        let to = Guest {
            ipv6: gateway.link_local,
            ..gateway
        };
        let sent = world.receive(guest, &icmp(route_v6(guest, to), &solicitation));
        let lifetime = &sent[0].1[ETHERNET_BYTES + 40 + 6..][..2];
        assert_eq!(lifetime != [0, 0], is_router);
    }
}

fn query(name: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        message.push(label.len() as u8);
        message.extend(label.bytes());
    }
    message.push(0);
    message.extend(kind.to_be_bytes());
    message.extend([0, 1]);
    message
}

#[test]
fn queries_for_the_outside_go_to_the_resolver_and_their_answers_come_back() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let gateway = world.gateway();
    for (guest, to) in [(a.ipv4, gateway.ipv4), (a.ipv6, gateway.ipv6)] {
        let way = Route {
            from: guest,
            to,
            ..route(a, gateway)
        };
        let message = query("example.org", 1);
        let expected = Query {
            card: a.id,
            client: SocketAddr::new(guest, 5000),
            server: to,
            bytes_max: 512,
        };
        let sent = world.receive(a, &udp(way, (5000, 53), &message));
        assert_eq!(sent, [(Target::Query(expected), message)]);
        let mut answers = Vec::new();
        let mut output = |target: Target, bytes: &[u8]| {
            answers.push((target, bytes.to_vec()));
            Delivery::Taken
        };
        world.network.answer(expected, b"the answer", &mut output);
        let back = Route {
            from_mac: gateway.mac,
            to_mac: a.mac,
            from: to,
            to: guest,
        };
        let expected_frame = udp(back, (53, 5000), b"the answer");
        assert_eq!(answers, [(Target::Card(a.id), expected_frame)]);
    }
    // The card left, and another one is there.
    let stale = Query {
        card: a.id,
        client: SocketAddr::new(a.ipv4, 5000),
        server: gateway.ipv4,
        bytes_max: 512,
    };
    world.network.detach(a.id).unwrap();
    let mut output = |target: Target, _: &[u8]| panic!("a frame to {target:?}");
    world.network.answer(stale, b"the answer", &mut output);
    // Names of the network are not sent out.
    let sent = world.receive(
        b,
        &udp(route(b, gateway), (5000, 53), &query("missing.vm.internal", 1)),
    );
    assert_eq!(sent[0].0, Target::Card(b.id));
}

#[test]
fn answer_that_is_longer_than_the_guest_accepts_is_truncated() {
    let (mut world, [a, ..]) = World::of_three(|settings| settings.mtu = 1500);
    let gateway = world.gateway();
    let question = query("example.org", 1);
    // A response, with more records than pass.
    let mut long = [
        &question[..2],
        &[0x81, 0x80, 0, 1, 0, 90, 0, 0, 0, 0],
        &question[12..],
    ]
    .concat();
    long.resize(1460, 7);
    let mut extended = question.clone();
    extended[11] = 1;
    extended.extend([0, 0, 41, 0xff, 0xff, 0, 0, 0, 0, 0, 0]);
    for (asked, bytes, passes) in [
        (&question, 512, true),
        (&question, 513, false),
        // The guest's bound, and that of the network's MTU.
        (&extended, 1452, true),
        (&extended, 1453, false),
    ] {
        let sent = world.receive(a, &udp(route(a, gateway), (5000, 53), asked));
        let Target::Query(origin) = sent[0].0 else {
            panic!("{sent:?}");
        };
        let mut frames = Vec::new();
        let mut output = |_: Target, bytes: &[u8]| {
            frames.push(bytes.to_vec());
            Delivery::Taken
        };
        world.network.answer(origin, &long[..bytes], &mut output);
        let answer = &frames[0][14 + 20 + 8..];
        if passes {
            assert_eq!(answer, &long[..bytes]);
        } else {
            // The question without an answer, and with the bit of truncation.
            assert_eq!(answer.len(), question.len());
            assert_eq!(answer[2..12], [0x83, 0x80, 0, 1, 0, 0, 0, 0, 0, 0]);
            assert_eq!(answer[12..], question[12..]);
        }
    }
}

#[test]
fn packets_from_the_outside_reach_their_card() {
    let (mut world, [a, b, _]) = World::of_three(|settings| settings.mtu = 1500);
    let gateway = world.gateway();
    let from_outside = |to: Guest, bytes: usize| {
        let way = Route {
            from_mac: gateway.mac,
            to_mac: to.mac,
            from: address("8.8.8.8"),
            to: to.ipv4,
        };
        udp(way, (1, 2), &vec![0; bytes])
    };
    let mut sent = Vec::new();
    let mut output = |target: Target, bytes: &[u8]| {
        sent.push((target, bytes.to_vec()));
        Delivery::Taken
    };
    let frame = from_outside(b, 10);
    let large = from_outside(b, 1473);
    let now = world.now;
    let mut receive = |packet: &[u8], id| world.network.receive_outside(id, packet, now, &mut output);
    receive(&frame[ETHERNET_BYTES..], b.id);
    receive(&large[ETHERNET_BYTES..], b.id);
    receive(&[], b.id);
    receive(&[0x10; 40], b.id);
    receive(&frame[ETHERNET_BYTES..], CardId(77));
    assert_eq!(sent, [(Target::Card(b.id), frame)]);
    let counts = world.network.counts(b.id).unwrap().to_guest;
    assert_eq!((counts.frames, counts.dropped(DropReason::Oversized)), (2, 1));
    assert_eq!(world.network.counts(a.id).unwrap().to_guest.frames, 0);
}

#[test]
fn routers_advertise_themselves_from_time_to_time() {
    let (mut world, guests) = World::of_three(|settings| settings.outside_ipv6 = true);
    let deadline = world.network.deadline().unwrap();
    let mut sent = Vec::new();
    let mut turn = |network: &mut Network, now| {
        let mut output = |target: Target, bytes: &[u8]| {
            sent.push((target, bytes.to_vec()));
            Delivery::Taken
        };
        network.turn(now, &mut output);
        std::mem::take(&mut sent)
    };
    assert_eq!(turn(&mut world.network, deadline - Duration::from_millis(1)), []);
    let advertised = turn(&mut world.network, deadline);
    let targets: Vec<_> = advertised.iter().map(|(target, _)| *target).collect();
    assert_eq!(targets, guests.map(|guest| Target::Card(guest.id)));
    for (_, frame) in advertised {
        assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 1]);
        // The lifetime of the router, 9000 s.
        assert_eq!(frame[ETHERNET_BYTES + 40 + 6..][..2], 9000_u16.to_be_bytes());
    }
    assert_eq!(turn(&mut world.network, deadline), []);
    assert!(world.network.deadline().unwrap() > deadline);
    let empty = Network::new(Settings::new("empty"), world.now);
    assert_eq!(empty.deadline(), None);
}
