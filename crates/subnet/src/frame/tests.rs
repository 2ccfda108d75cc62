use proptest::prelude::*;

use super::*;
use crate::samples::{ACK, MAC, SYN, address, ethernet, frame, tcp, udp};

fn read(frame: &[u8]) -> Option<Datagram> {
    match parse(frame)? {
        Packet::Ip(datagram) => Some(datagram),
        Packet::Arp => None,
    }
}

#[test]
fn both_versions_of_ip_are_read() {
    for (source, destination) in [("10.0.2.15", "192.0.2.7"), ("2001:db8::1", "2001:db8::2")] {
        let (source, destination) = (address(source), address(destination));
        let payload = |protocol, bytes: &[u8]| {
            let datagram = read(&frame(source, destination, protocol, bytes)).unwrap();
            assert_eq!((datagram.source, datagram.destination), (source, destination));
            datagram.payload
        };
        let opens = |flags| {
            let segment = Payload::Tcp {
                source: 5000,
                destination: 80,
                opens: flags & (SYN | ACK) == SYN,
            };
            assert_eq!(payload(TCP, &tcp(5000, 80, flags)), segment);
        };
        for flags in [SYN, SYN | ACK, ACK, SYN | 1, 0] {
            opens(flags);
        }
        let datagram = Payload::Udp {
            source: 68,
            destination: 67,
        };
        assert_eq!(payload(UDP, &udp(68, 67, b"x")), datagram);
        assert_eq!(payload(132, &[]), Payload::Other);
        let icmp = if source.is_ipv4() { ICMP } else { ICMPV6 };
        assert_eq!(payload(icmp, &[8, 0]), Payload::Icmp { kind: 8 });
    }
    assert_eq!(parse(&ethernet(0x0806, &[0; 46])), Some(Packet::Arp));
}

#[test]
fn options_and_padding_do_not_hide_the_ports() {
    let mut padded = frame(address("10.0.2.15"), address("192.0.2.7"), UDP, &udp(1, 2, &[]));
    padded.resize(60, 0);
    assert!(read(&padded).is_some());
    let mut with_options = padded;
    with_options[14] = 0x46;
    with_options[17] = 20 + 4 + 8;
    let ports = [3, 4, 0, 5, 0, 6, 0, 8, 0, 0];
    with_options[14 + 22..14 + 32].copy_from_slice(&ports);
    assert_eq!(
        read(&with_options).unwrap().payload,
        Payload::Udp {
            source: 5,
            destination: 6
        }
    );
}

#[test]
fn frames_that_cannot_be_judged_are_not_read() {
    let whole = frame(address("10.0.2.15"), address("192.0.2.7"), TCP, &tcp(1, 2, SYN));
    let tagged = [&whole[..12], &[0x81, 0, 0, 5], &whole[12..]].concat();
    assert_eq!(parse(&tagged), None);
    let with = |at: usize, byte: u8| {
        let mut changed = whole.clone();
        changed[at] = byte;
        parse(&changed)
    };
    // A later fragment, a first one, another version, a short header, and lengths beyond the frame.
    let wrong = [
        (21, 1),
        (20, 0x20),
        (14, 0x55),
        (14, 0x44),
        (17, 41),
        (17, 19),
        (14, 0x4f),
    ];
    for (at, byte) in wrong {
        assert_eq!(with(at, byte), None, "{byte:#x} at {at}");
    }
    // "Do not fragment" does not make a fragment.
    assert!(with(20, 0x40).is_some());
    for header in EXTENSIONS {
        let extended = frame(
            address("fd00::1"),
            address("fd00::2"),
            header,
            &[6, 0, 0, 0, 0, 0, 0, 0],
        );
        assert_eq!(parse(&extended), None, "{header}");
    }
}

#[test]
fn a_part_of_a_frame_is_not_read() {
    for (source, destination) in [("10.0.2.15", "192.0.2.7"), ("fd00::1", "fd00::2")] {
        let (source, destination) = (address(source), address(destination));
        for payload in [
            frame(source, destination, TCP, &tcp(1, 2, SYN)),
            frame(source, destination, UDP, &udp(1, 2, &[])),
        ] {
            for length in 0..payload.len() {
                assert_eq!(parse(&payload[..length]), None, "{length} bytes");
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(
        kind in prop_oneof![Just(0x0800_u16), Just(0x86dd), Just(0x0806), any::<u16>()],
        first in any::<u8>(),
        bytes in prop::collection::vec(any::<u8>(), 0..120)
    ) {
        for start in [first, 0x45, 0x60] {
            let frame = ethernet(kind, &[&[start][..], &bytes].concat());
            if let Some(datagram) = read(&frame) {
                prop_assert_eq!(datagram.source.is_ipv4(), kind == 0x0800);
                prop_assert_eq!(&frame[6..12], &MAC);
            }
        }
    }
}
