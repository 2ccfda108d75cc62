//! A guest speaks for itself only.

use super::*;
use crate::network::dhcp;
use crate::network::header::ETHERNET_BYTES;

#[test]
fn frame_reaches_only_the_card_with_its_destination() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    for route in [route(a, b), route_v6(a, b)] {
        let frame = udp(route, (1000, 2000), b"hello");
        assert_eq!(world.receive(a, &frame), [(Target::Card(b.id), frame.clone())]);
    }
    let counts = [a, b].map(|guest| world.network.counts(guest.id).unwrap());
    assert_eq!(counts[0].from_guest.frames, 2);
    assert_eq!(counts[0].from_guest.bytes, counts[1].to_guest.bytes);
    assert_eq!(counts[1].to_guest.frames, 2);
    assert_eq!(counts[0].from_guest.dropped_in_all(), 0);
}

#[test]
fn forged_hardware_address_is_dropped() {
    let (mut world, [a, b, c]) = World::of_three(|_| {});
    let forged = Route {
        from_mac: b.mac,
        ..route(a, c)
    };
    world.assert_dropped(a, &udp(forged, (1, 2), b""), DropReason::SourceMac);
}

#[test]
fn forged_address_is_dropped() {
    let (mut world, [a, b, c]) = World::of_three(|_| {});
    let others = [
        b.ipv4,
        b.ipv6,
        b.link_local,
        world.gateway().ipv4,
        world.gateway().ipv6,
    ];
    let strange = [
        "10.213.255.254",
        "8.8.8.8",
        "0.0.0.0",
        "255.255.255.255",
        "2001:db8::1",
        "::",
        "::1",
        "ff02::1",
    ];
    for from in others.into_iter().chain(strange.map(address)) {
        let to = if from.is_ipv4() { c.ipv4 } else { c.ipv6 };
        let forged = Route {
            from,
            to,
            ..route(a, c)
        };
        world.assert_dropped(a, &udp(forged, (1, 2), b""), DropReason::SourceAddress);
    }
}

#[test]
fn guest_without_an_address_reaches_only_the_dhcp_server() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let none = Route {
        from: address("0.0.0.0"),
        ..route(a, b)
    };
    let frame = udp(none, (dhcp::CLIENT_PORT, dhcp::SERVER_PORT), b"not DHCP");
    assert_eq!(world.receive(a, &frame), []);
    assert_eq!(world.dropped(a, DropReason::SourceAddress), 0);
    let stolen = Route {
        from: b.ipv4,
        ..route(a, b)
    };
    let frame = udp(stolen, (dhcp::CLIENT_PORT, dhcp::SERVER_PORT), b"not DHCP");
    world.assert_dropped(a, &frame, DropReason::SourceAddress);
}

#[test]
fn routers_and_servers_are_not_guests() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let advertisement = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    let redirect = [&[137, 0, 0, 0][..], &[0; 36]].concat();
    let frames = [
        udp(route(a, b), (67, 68), b"offer"),
        udp(route_v6(a, b), (547, 546), b"advertise"),
        icmp(route(a, b), &[5, 0, 0, 0, 0, 0, 0, 0]),
        icmp(route(a, b), &[9, 0, 0, 0, 0, 0, 0, 0]),
        icmp(route_v6(a, b), &advertisement),
        icmp(route_v6(a, b), &redirect),
    ];
    for frame in frames {
        world.assert_dropped(a, &frame, DropReason::RogueServer);
    }
}

#[test]
fn router_advertisement_can_not_hide_behind_extension_headers() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let advertisement = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    let plain = icmp(route_v6(a, b), &advertisement);
    let hidden = |first: u8, headers: &[u8]| {
        let mut frame = plain.clone();
        let at = ETHERNET_BYTES + 40;
        frame.splice(at..at, headers.iter().copied());
        let bytes = (advertisement.len() + headers.len()) as u16;
        frame[ETHERNET_BYTES + 4..ETHERNET_BYTES + 6].copy_from_slice(&bytes.to_be_bytes());
        frame[ETHERNET_BYTES + 6] = first;
        frame
    };
    let options = [58, 0, 1, 4, 0, 0, 0, 0];
    for first in [0, 43, 60] {
        world.assert_dropped(a, &hidden(first, &options), DropReason::RogueServer);
    }
    let fragment = [58, 0, 0, 1, 0, 0, 0, 7];
    world.assert_dropped(a, &hidden(44, &fragment), DropReason::Malformed);
    // Two extension headers, the second in the first's place of the payload.
    let both = [[44, 0, 1, 4, 0, 0, 0, 0], fragment].concat();
    world.assert_dropped(a, &hidden(60, &both), DropReason::Malformed);
    // A header that reaches beyond the packet, and more headers than anyone needs.
    world.assert_dropped(
        a,
        &hidden(60, &[58, 200, 0, 0, 0, 0, 0, 0]),
        DropReason::Malformed,
    );
    let many = [[60, 0, 1, 4, 0, 0, 0, 0]; 9].concat();
    world.assert_dropped(a, &hidden(60, &many), DropReason::Malformed);
    // A later fragment of another packet passes.
    let later = hidden(44, &[17, 0, 0, 8, 0, 0, 0, 7]);
    assert_eq!(world.receive(a, &later), [(Target::Card(b.id), later.clone())]);
}

#[test]
fn frames_whose_headers_lie_are_dropped() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    for route in [route(a, b), route_v6(a, b)] {
        let whole = udp(route, (1, 2), b"some data");
        let header_bytes = if route.from.is_ipv4() { 20 } else { 40 };
        for end in 0..whole.len() {
            // The frame ends before the packet.
            world.assert_dropped(a, &whole[..end], DropReason::Malformed);
        }
        let version = {
            let mut frame = whole.clone();
            frame[ETHERNET_BYTES] ^= 0x10;
            frame
        };
        world.assert_dropped(a, &version, DropReason::Malformed);
        let short = {
            let mut frame = whole.clone();
            // The datagram is shorter than its header.
            let at = ETHERNET_BYTES + header_bytes + 4;
            frame[at..at + 2].copy_from_slice(&7_u16.to_be_bytes());
            frame
        };
        world.assert_dropped(a, &short, DropReason::Malformed);
    }
    let mut tiny = udp(route(a, b), (1, 2), b"");
    // A header of 16 bytes.
    tiny[ETHERNET_BYTES] = 0x44;
    world.assert_dropped(a, &tiny, DropReason::Malformed);
}

#[test]
fn other_protocols_are_dropped() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    for kind in [0x8100_u16, 0x88a8, 0x88cc, 0x0027] {
        let mut frame = Vec::new();
        compose::ethernet(&mut frame, a.mac, b.mac, kind);
        frame.extend([0; 64]);
        world.assert_dropped(a, &frame, DropReason::Protocol);
    }
}

#[test]
fn frames_beyond_the_mtu_are_dropped_and_those_of_its_size_pass() {
    for mtu in [1500, 65_535] {
        let (mut world, [a, b, _]) = World::of_three(|settings| settings.mtu = mtu);
        let data = vec![7; usize::from(mtu) - 28];
        let frame = udp(route(a, b), (1, 2), &data);
        assert_eq!(frame.len(), ETHERNET_BYTES + usize::from(mtu));
        assert_eq!(world.receive(a, &frame).len(), 1);
        let larger = [&frame[..], &[0]].concat();
        world.assert_dropped(a, &larger, DropReason::Oversized);
    }
}

#[test]
fn cards_of_a_barred_network_reach_only_the_gateway() {
    let (mut world, [a, b, _]) = World::of_three(|settings| settings.peers = false);
    world.assert_dropped(a, &udp(route(a, b), (1, 2), b""), DropReason::PeersBarred);
    let all = Route {
        to_mac: [0xff; 6],
        to: address("255.255.255.255"),
        ..route(a, b)
    };
    world.assert_dropped(a, &udp(all, (1, 2), b""), DropReason::PeersBarred);
    let echo = icmp(route(a, world.gateway()), &[8, 0, 0, 0, 0, 1, 0, 1]);
    assert_eq!(world.receive(a, &echo).len(), 1);
}

#[test]
fn unknown_and_own_destinations_are_dropped() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    for to_mac in [mac(99), a.mac] {
        let to = Route {
            to_mac,
            ..route(a, b)
        };
        world.assert_dropped(a, &udp(to, (1, 2), b""), DropReason::NoSuchCard);
    }
}
