//! Frames at random: a network neither fails nor lets one guest speak for another.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::network::header::{ETHERNET_BYTES, Ethernet, IPV4, IPV6, Ip};

/// A frame that is right in most parts, so that it passes the first checks.
#[derive(Clone, Debug)]
enum Forgery {
    Bytes(Vec<u8>),
    Udp {
        ends: Ends,
        ports: (u16, u16),
        data: Vec<u8>,
    },
    Icmp {
        ends: Ends,
        message: Vec<u8>,
    },
}

/// Places of a guest's addresses in the list of all addresses.
#[derive(Clone, Copy, Debug)]
struct Ends {
    from_mac: usize,
    to_mac: usize,
    from: usize,
    to: usize,
}

fn ends() -> impl Strategy<Value = Ends> {
    // The sender's own addresses often.
    let own = prop_oneof![3 => Just(0), 1 => 0..64_usize];
    (own.clone(), 0..64_usize, own, 0..64_usize).prop_map(|(from_mac, to_mac, from, to)| Ends {
        from_mac,
        to_mac,
        from,
        to,
    })
}

fn forgery() -> impl Strategy<Value = Forgery> {
    let port = prop_oneof![
        Just(53_u16),
        Just(67),
        Just(68),
        Just(546),
        Just(547),
        any::<u16>()
    ];
    let data = prop::collection::vec(any::<u8>(), 0..400);
    let kind = prop_oneof![Just(8_u8), Just(5), 128..=143_u8, any::<u8>()];
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..100).prop_map(Forgery::Bytes),
        (ends(), (port.clone(), port), data.clone()).prop_map(|(ends, ports, data)| Forgery::Udp {
            ends,
            ports,
            data
        }),
        (ends(), kind, data).prop_map(|(ends, kind, data)| Forgery::Icmp {
            ends,
            message: [&[kind, 0, 0, 0][..], &data].concat(),
        }),
    ]
}

/// Encodes a forgery of `guests[0]`; flips bits where `damage` says.
fn encode(forgery: &Forgery, guests: &[Guest], damage: &[(usize, u8)]) -> Vec<u8> {
    let mut macs: Vec<_> = guests.iter().map(|guest| guest.mac).collect();
    macs.extend([[0xff; 6], [0x33, 0x33, 0, 0, 0, 1], mac(77)]);
    let strange = [
        "0.0.0.0",
        "8.8.8.8",
        "255.255.255.255",
        "::",
        "2001:db8::1",
        "ff02::1",
        "fe80::9",
    ];
    let mut addresses: Vec<_> = guests
        .iter()
        .flat_map(|guest| [guest.ipv4, guest.ipv6, guest.link_local])
        .collect();
    addresses.extend(strange.map(address));
    let route = |ends: &Ends| Route {
        from_mac: macs[ends.from_mac % macs.len()],
        to_mac: macs[ends.to_mac % macs.len()],
        from: addresses[ends.from % addresses.len()],
        to: addresses[ends.to % addresses.len()],
    };
    let mut frame = Vec::new();
    // Addresses of two versions make no frame.
    match forgery {
        Forgery::Bytes(bytes) => {
            compose::ethernet(&mut frame, guests[0].mac, guests[1].mac, IPV6);
            frame.extend(bytes);
        }
        Forgery::Udp { ends, ports, data } => {
            compose::udp(&mut frame, route(ends), *ports, data);
        }
        Forgery::Icmp { ends, message } => {
            compose::icmp(&mut frame, route(ends), message, 255);
        }
    }
    for (at, bits) in damage {
        if let Some(byte) = frame.get_mut(*at) {
            *byte ^= bits;
        }
    }
    frame
}

/// Checks that a frame to another card has its sender's addresses.
fn check_sender(frame: &[u8], sender: Guest, gateway: Guest, others: &[Guest]) {
    let ethernet = Ethernet::parse(frame).unwrap();
    if ethernet.source == gateway.mac {
        return;
    }
    let ip = match ethernet.kind {
        IPV4 => Ip::ipv4(ethernet.payload).unwrap(),
        IPV6 => Ip::ipv6(ethernet.payload).unwrap(),
        kind => panic!("a frame of the protocol {kind:#x}"),
    };
    assert_eq!(ethernet.source, sender.mac);
    for other in others.iter().chain([&gateway]) {
        assert!(
            ![other.ipv4, other.ipv6, other.link_local].contains(&ip.source),
            "{ip:?}"
        );
    }
    match ip.source {
        IpAddr::V4(_) => assert_eq!(ip.source, sender.ipv4),
        IpAddr::V6(source) => {
            let is_local = [sender.ipv6, sender.link_local].into_iter().any(|own| match own {
                IpAddr::V6(own) => own.octets()[..8] == source.octets()[..8],
                IpAddr::V4(_) => false,
            });
            assert!(is_local, "{ip:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_guest_speaks_for_another(
        forgeries in prop::collection::vec(
            (forgery(), prop::collection::vec((0..120_usize, any::<u8>()), 0..3)), 1..30),
        peers in any::<bool>(),
        outside in any::<bool>(),
    ) {
        let (mut world, guests) = World::of_three(|settings| {
            settings.peers = peers;
            settings.outside = outside;
        });
        let gateway = world.gateway();
        let known = [guests[0], guests[1], guests[2], gateway];
        let mut expected = 0;
        for (forgery, damage) in &forgeries {
            world.now += Duration::from_millis(3);
            let frame = encode(forgery, &known, damage);
            expected += 1;
            for (target, bytes) in world.receive(guests[0], &frame) {
                match target {
                    Target::Card(id) if id == guests[0].id => {
                        // Only the gateway, and the switch for others, send to the sender.
                        let source = Ethernet::parse(&bytes).unwrap().source;
                        prop_assert_ne!(source, guests[0].mac);
                    }
                    Target::Card(_) => {
                        prop_assert!(peers);
                        prop_assert_eq!(&bytes, &frame);
                        check_sender(&bytes, guests[0], gateway, &guests[1..]);
                    }
                    Target::Outside(id) => {
                        prop_assert_eq!(id, guests[0].id);
                        let is_whole = frame[ETHERNET_BYTES..].starts_with(&bytes);
                        prop_assert!(is_whole);
                    }
                    Target::Query(query) => {
                        prop_assert!(outside);
                        prop_assert_eq!(query.card, guests[0].id);
                    }
                }
            }
        }
        let counts = world.network.counts(guests[0].id).unwrap();
        prop_assert_eq!(counts.from_guest.frames, expected);
    }

    #[test]
    fn services_take_any_message(message in prop::collection::vec(any::<u8>(), 0..600)) {
        let (mut world, [a, ..]) = World::of_three(|_| {});
        let gateway = world.gateway();
        for ports in [(68, 67), (1000, 53)] {
            for sent in world.receive(a, &udp(route(a, gateway), ports, &message)) {
                let (Target::Card(id) | Target::Outside(id) | Target::Query(Query { card: id, .. })) = sent.0;
                prop_assert_eq!(id, a.id);
            }
        }
    }
}
