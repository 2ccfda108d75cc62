use proptest::prelude::*;

use super::*;
use crate::samples::{ACK, ICMP, ICMPV6, SYN, TCP, UDP, address, ethernet, frame, tcp, udp};

const OWN: [&str; 3] = ["192.0.2.2", "192.0.2.255", "2001:db8::2"];
const CLUSTER: [&str; 4] = ["192.0.2.2", "198.51.100.3", "2001:db8::3", "203.0.113.9"];
const GUEST: &str = "10.0.2.15";
const GUEST_V6: &str = "2001:db8::15";

fn barred() -> Barred {
    let set = |addresses: &[&str]| addresses.iter().map(|text| address(text)).collect();
    Barred {
        own: set(&OWN),
        cluster: set(&CLUSTER),
    }
}

fn is_admitted(frame: &[u8]) -> bool {
    let (resolvers, peers) = (Resolvers::default(), Peers::default());
    admits(frame, &barred(), &resolvers, &peers, Instant::now())
}

fn guest_of(to: IpAddr) -> IpAddr {
    address(if to.is_ipv4() { GUEST } else { GUEST_V6 })
}

fn to(destination: &str, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let destination = address(destination);
    frame(guest_of(destination), destination, protocol, payload)
}

/// Returns a frame of each kind that would begin a connection or exchange with `destination`.
fn beginnings(destination: &str) -> [Vec<u8>; 5] {
    let icmp = if address(destination).is_ipv4() {
        ICMP
    } else {
        ICMPV6
    };
    let echo = if icmp == ICMP { 8 } else { 128 };
    [
        to(destination, TCP, &tcp(40_000, 2379, SYN)),
        to(destination, TCP, &tcp(40_000, 53, SYN)),
        to(destination, UDP, &udp(40_000, 53, b"?")),
        to(destination, icmp, &[echo, 0, 0, 0, 0, 0, 0, 0]),
        to(destination, 132, &[0; 12]),
    ]
}

#[test]
fn guest_opens_nothing_to_the_host_or_the_cluster() {
    for destination in OWN.into_iter().chain(CLUSTER) {
        for (kind, frame) in beginnings(destination).iter().enumerate() {
            assert!(!is_admitted(frame), "{destination}, {kind}");
        }
    }
}

#[test]
fn guest_opens_nothing_to_loopback_link_local_or_unspecified_addresses() {
    for destination in [
        "127.0.0.1",
        "127.255.0.9",
        "0.0.0.0",
        "0.1.2.3",
        "169.254.169.254",
        "10.0.2.2",
        "255.255.255.255",
        "224.0.0.251",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "64:ff9b::127.0.0.1",
        "64:ff9b::198.51.100.3",
        "fe80::1",
        "febf::1",
        "ff02::fb",
    ] {
        for (kind, frame) in beginnings(destination).iter().enumerate() {
            assert!(!is_admitted(frame), "{destination}, {kind}");
        }
    }
}

#[test]
fn a_guest_reaches_the_rest_of_the_world() {
    for destination in [
        "192.0.2.3",
        "8.8.8.8",
        "10.0.2.3",
        "2001:db8::4",
        "64:ff9b::8.8.8.8",
    ] {
        for (kind, frame) in beginnings(destination).iter().enumerate() {
            assert!(is_admitted(frame), "{destination}, {kind}");
        }
    }
}

#[test]
fn a_guest_configures_its_card() {
    let discover = frame(
        address("0.0.0.0"),
        address("255.255.255.255"),
        UDP,
        &udp(68, 67, &[1]),
    );
    assert!(is_admitted(&discover));
    assert!(is_admitted(&to("10.0.2.2", UDP, &udp(68, 67, &[1]))));
    assert!(!is_admitted(&to("10.0.2.2", UDP, &udp(40_000, 67, &[1]))));
    assert!(!is_admitted(&to("192.0.2.2", UDP, &udp(68, 67, &[1]))));
    assert!(is_admitted(&ethernet(0x0806, &[0; 28])));
    assert!(is_admitted(&to("ff02::1:2", UDP, &udp(546, 547, &[1]))));
    assert!(!is_admitted(&to("fe80::1", UDP, &udp(546, 547, &[1]))));
    for (destination, kind) in [
        ("ff02::2", 133),
        ("fe80::1", 135),
        ("fe80::1", 136),
        ("ff02::16", 143),
    ] {
        assert!(
            is_admitted(&to(destination, ICMPV6, &[kind, 0])),
            "{destination}, {kind}"
        );
    }
    // The search for duplicate addresses precedes the address.
    let probe = frame(address("::"), address("ff02::1:ff00:1"), ICMPV6, &[135, 0]);
    assert!(is_admitted(&probe));
    assert!(!is_admitted(&to("fe80::1", ICMPV6, &[143, 0])));
}

#[test]
fn resolvers_of_passt_are_reachable_at_their_port_only() {
    let conf = "# none\nnameserver 127.0.0.53\nnameserver 192.0.2.2\nnameserver 2001:db8::3\nnameserver \
        fe80::1%eth0\n\
                nameserver 0.0.0.0\nnameserver fd00::1\nnameserver nonsense\n";
    let resolvers = Resolvers::of(conf, &[address("fd00::1")]);
    assert_eq!(
        resolvers,
        Resolvers {
            direct: vec![address("192.0.2.2"), address("2001:db8::3")],
            at_gateway: true,
        }
    );
    let is_admitted =
        |frame: Vec<u8>| admits(&frame, &barred(), &resolvers, &Peers::default(), Instant::now());
    for server in ["192.0.2.2", "2001:db8::3"] {
        assert!(is_admitted(to(server, UDP, &udp(40_000, 53, b"?"))));
        assert!(is_admitted(to(server, TCP, &tcp(40_000, 53, SYN))));
        assert!(!is_admitted(to(server, UDP, &udp(40_000, 54, b"?"))));
        assert!(!is_admitted(to(server, TCP, &tcp(40_000, 22, SYN))));
    }
    assert!(is_admitted(to("10.0.2.2", UDP, &udp(40_000, 53, b"?"))));
    assert!(!is_admitted(to("10.0.2.2", TCP, &tcp(40_000, 53, SYN))));
    assert!(!is_admitted(to("127.0.0.53", UDP, &udp(40_000, 53, b"?"))));
}

#[test]
fn connections_from_a_forwarded_port_continue() {
    for peer in ["10.0.2.2", "192.0.2.2", "198.51.100.3"] {
        for flags in [SYN | ACK, ACK, ACK | 1, 4] {
            assert!(is_admitted(&to(peer, TCP, &tcp(80, 40_000, flags))), "{peer}");
        }
    }
}

#[test]
fn guest_replies_only_to_peers_of_forwarded_udp_ports() {
    let now = Instant::now();
    let mut peers = Peers::new(vec![53]);
    assert!(peers.are_possible() && !Peers::new(Vec::new()).are_possible());
    let incoming = |port, guest| frame(address("10.0.2.2"), address(GUEST), UDP, &udp(port, guest, b"?"));
    peers.note(&incoming(5000, 53), now);
    // Not forwarded: a reply to the guest's own exchange, or a forgery.
    peers.note(&incoming(5001, 54), now);
    let is_admitted = |peers: &Peers, from, port, later| {
        let answer = to("10.0.2.2", UDP, &udp(from, port, b"!"));
        admits(&answer, &barred(), &Resolvers::default(), peers, now + later)
    };
    assert!(is_admitted(&peers, 53, 5000, Duration::ZERO));
    assert!(!is_admitted(&peers, 53, 5001, Duration::ZERO));
    assert!(!is_admitted(&peers, 54, 5001, Duration::ZERO));
    assert!(!is_admitted(&peers, 54, 5000, Duration::ZERO));
    assert!(!is_admitted(&peers, 53, 5000, ANSWER_LIMIT));
    // The oldest entries are removed first, and the limit is never exceeded.
    for port in 0..2 * PEERS_MAX as u16 {
        peers.note(
            &incoming(10_000 + port, 53),
            now + Duration::from_millis(1 + u64::from(port)),
        );
    }
    assert_eq!(peers.seen.len(), PEERS_MAX);
    let last = 10_000 + 2 * PEERS_MAX as u16 - 1;
    assert!(is_admitted(&peers, 53, last, Duration::from_secs(5)));
    assert!(!is_admitted(&peers, 53, 5000, Duration::ZERO));
}

#[test]
fn guest_cannot_forge_the_address_of_another_host() {
    let from = |source: &str, destination: &str| {
        is_admitted(&frame(
            address(source),
            address(destination),
            UDP,
            &udp(1, 2, &[]),
        ))
    };
    for source in [
        "198.51.100.3",
        "127.0.0.1",
        "169.254.1.1",
        "10.0.2.2",
        "224.0.0.1",
    ] {
        assert!(!from(source, "8.8.8.8"), "{source}");
    }
    for source in ["2001:db8::3", "::1", "::ffff:198.51.100.3", "ff02::1"] {
        assert!(!from(source, "2001:db8::4"), "{source}");
    }
    // passt gives the guest the host's IPv6 address, and a lab host has the guest's IPv4 address.
    assert!(from("2001:db8::2", "2001:db8::4"));
    assert!(from("192.0.2.2", "8.8.8.8"));
}

#[test]
fn frames_that_cannot_be_judged_are_refused() {
    let whole = to("8.8.8.8", TCP, &tcp(1, 2, SYN));
    assert!(is_admitted(&whole));
    assert!(!is_admitted(
        &[&whole[..12], &[0x81, 0, 0, 5], &whole[12..]].concat()
    ));
    assert!(!is_admitted(&to("2001:db8::4", 44, &[6, 0, 0, 1, 0, 0, 0, 0])));
    assert!(!is_admitted(&[]));
}

proptest! {
    #[test]
    fn no_payload_opens_a_barred_address(
        destination in prop::sample::select([&OWN[..], &CLUSTER, &["127.0.0.1", "::1", "fe80::9"]].concat()),
        protocol in any::<u8>(), payload in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        // Frames that pass belong to a connection, find neighbours, or request an address.
        let sent = to(destination, protocol, &payload);
        if is_admitted(&sent) {
            let Some(Packet::Ip(datagram)) = parse(&sent) else { panic!("admitted unread") };
            let is_harmless = match datagram.payload {
                Payload::Tcp { opens, .. } => !opens,
                Payload::Icmp { kind } => {
                    datagram.destination.is_ipv6() && NEIGHBOR_DISCOVERY.contains(&kind)
                }
                Payload::Udp { .. } | Payload::Other => false,
            };
            prop_assert!(is_harmless, "{datagram:?}");
        }
    }
}
