use proptest::prelude::*;

use super::*;

struct Names;

impl Zone for Names {
    fn host(&self, name: &str) -> Option<HostAddresses> {
        let ipv4 = Ipv4Addr::new(10, 213, 0, 9);
        let ipv6 = Some("fd00::9".parse().unwrap());
        match name {
            "web" => Some(HostAddresses { ipv4, ipv6 }),
            "old.web" => Some(HostAddresses { ipv4, ipv6: None }),
            _ => None,
        }
    }

    fn name_of(&self, address: IpAddr) -> Option<&str> {
        let is_web = [IpAddr::from([10, 213, 0, 9]), "fd00::9".parse().unwrap()].contains(&address);
        is_web.then_some("web")
    }

    fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => address.octets()[..2] == [10, 213],
            IpAddr::V6(address) => address.segments()[0] == 0xfd00,
        }
    }
}

fn query(name: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    message.extend(encode_name(name));
    message.extend(kind.to_be_bytes());
    message.extend([0, 1]);
    message
}

/// Returns the code and the records of the network's own answer.
fn own_answer(name: &str, kind: u16) -> (u8, Vec<u8>) {
    let message = query(name, kind);
    let Decision::Answer(answer) = decide(&message, &Names, true) else {
        panic!("{name} is not the network's");
    };
    assert_eq!(answer[..2], message[..2]);
    // A response, authoritative, recursion desired; recursion available.
    assert_eq!((answer[2], answer[3] & 0xf0), (0x85, 0x80));
    assert!(answer[HEADER_BYTES..].starts_with(&message[HEADER_BYTES..]));
    let records = answer[message.len()..].to_vec();
    assert_eq!(answer[6..12], [0, u8::from(!records.is_empty()), 0, 0, 0, 0]);
    (answer[3] & 0x0f, records)
}

fn record(kind: u8, data: &[u8]) -> Vec<u8> {
    let head = [0xc0, 12, 0, kind, 0, 1, 0, 0, 0, 5, 0, data.len() as u8];
    [&head, data].concat()
}

#[test]
fn names_of_the_network_have_addresses() {
    let ipv6 = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
    for name in ["web", "WEB", "web.vm.internal", "Web.VM.Internal"] {
        assert_eq!(own_answer(name, 1), (0, record(1, &[10, 213, 0, 9])));
        assert_eq!(own_answer(name, 28), (0, record(28, &ipv6)));
        // The name exists, and has no mail server.
        assert_eq!(own_answer(name, 15), (0, vec![]));
    }
    assert_eq!(own_answer("old.web.vm.internal", 1).1.len(), 16);
    assert_eq!(own_answer("old.web.vm.internal", 28), (0, vec![]));
    assert_eq!(own_answer("vm.internal", 1), (0, vec![]));
}

#[test]
fn missing_names_of_the_network_do_not_exist() {
    for name in [
        "missing",
        "missing.vm.internal",
        "a.web.vm.internal",
        "w b.vm.internal",
    ] {
        assert_eq!(own_answer(name, 1), (3, vec![]), "{name}");
    }
    for name in [
        "example.org",
        "old.web",
        "web.internal",
        "xvm.internal",
        "vm.internal.org",
        "",
    ] {
        assert_eq!(
            decide(&query(name, 1), &Names, true),
            Decision::Upstream,
            "{name}"
        );
        let Decision::Answer(answer) = decide(&query(name, 1), &Names, false) else {
            panic!("{name} left an isolated network");
        };
        assert_eq!(answer[3] & 0x0f, 3, "{name}");
    }
}

#[test]
fn addresses_of_the_network_have_names() {
    let ipv6 = format!("9.{}0.0.d.f.ip6.arpa", "0.".repeat(27));
    let name = b"\x03web\x02vm\x08internal\x00";
    for reverse in ["9.0.213.10.in-addr.arpa", &ipv6] {
        assert_eq!(own_answer(reverse, 12), (0, record(12, name)), "{reverse}");
        assert_eq!(own_answer(reverse, 1), (0, vec![]), "{reverse}");
    }
    assert_eq!(own_answer("8.0.213.10.in-addr.arpa", 12), (3, vec![]));
    for outside in [
        "1.0.0.127.in-addr.arpa",
        "0.213.10.in-addr.arpa",
        "1.9.0.213.10.in-addr.arpa",
        "x.0.213.10.in-addr.arpa",
        "256.0.213.10.in-addr.arpa",
        "9.0.0.0.d.f.ip6.arpa",
        "10.0.d.f.ip6.arpa",
        &format!("0.{ipv6}"),
    ] {
        assert_eq!(
            decide(&query(outside, 12), &Names, true),
            Decision::Upstream,
            "{outside}"
        );
    }
}

#[test]
fn extended_query_has_an_extended_answer() {
    let mut message = query("web", 1);
    message[11] = 1;
    message.extend([0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    let Decision::Answer(answer) = decide(&message, &Names, true) else {
        panic!("the name is not the network's");
    };
    assert_eq!(answer[11], 1);
    assert!(answer.ends_with(&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]));
}

#[test]
fn messages_that_are_no_queries_get_no_records() {
    let good = query("web", 1);
    for end in 0..HEADER_BYTES {
        assert_eq!(decide(&good[..end], &Names, true), Decision::Ignore);
    }
    let changed = |at: usize, byte: u8| {
        let mut message = good.clone();
        message[at] = byte;
        decide(&message, &Names, true)
    };
    assert_eq!(changed(2, 0x81), Decision::Ignore, "a response");
    let code = |decision: Decision| match decision {
        Decision::Answer(answer) if answer.len() == HEADER_BYTES => answer[3] & 0x0f,
        other => panic!("{other:?}"),
    };
    assert_eq!(code(changed(2, 0x28)), 4, "an update");
    assert_eq!(code(changed(5, 2)), 1, "two questions");
    assert_eq!(code(changed(5, 0)), 1, "no question");
    assert_eq!(code(changed(good.len() - 1, 3)), 1, "another class");
    for end in HEADER_BYTES..good.len() {
        assert_eq!(code(decide(&good[..end], &Names, true)), 1);
    }
    // A name that points at itself.
    let looped = [&good[..HEADER_BYTES], &[0xc0, 12, 0, 1, 0, 1]].concat();
    assert_eq!(code(decide(&looped, &Names, true)), 1);
}

#[test]
fn query_accepts_what_it_announces_and_512_bytes_at_least() {
    let plain = query("example.org", 1);
    let announcing = |bytes: u16| {
        let mut message = plain.clone();
        message[11] = 1;
        message.extend([0, 0, 41]);
        message.extend(bytes.to_be_bytes());
        message.extend([0; 6]);
        datagram_bytes_max(&message)
    };
    assert_eq!(datagram_bytes_max(&plain), 512);
    assert_eq!([0, 511, 1232, 65_535].map(announcing), [512, 512, 1232, 65_535]);
    assert_eq!(datagram_bytes_max(b"nonsense"), 512);
}

#[test]
fn failure_of_the_resolver_is_an_answer_to_the_question() {
    let message = query("example.org", 1);
    let answer = server_failure(&message).unwrap();
    assert_eq!(answer[3] & 0x0f, 2);
    assert_eq!(answer[HEADER_BYTES..], message[HEADER_BYTES..]);
    assert_eq!(server_failure(&answer), None);
    assert_eq!(server_failure(&message[..20]), None);
}

proptest! {
    #[test]
    fn answers_are_responses_with_the_querys_number(
        mut message in prop::collection::vec(any::<u8>(), 0..300),
        upstream in any::<bool>(),
    ) {
        if let Some(count) = message.get_mut(4..6) {
            count.copy_from_slice(&[0, 1]);
        }
        match decide(&message, &Names, upstream) {
            Decision::Answer(answer) => {
                prop_assert_eq!(&answer[..2], &message[..2]);
                prop_assert!(answer[2] & 0x80 != 0);
                prop_assert!(answer.len() <= message.len() + 200);
            }
            Decision::Upstream => prop_assert!(upstream),
            Decision::Ignore => {}
        }
        let _ = server_failure(&message);
        prop_assert!(datagram_bytes_max(&message) >= DATAGRAM_BYTES);
        if let Some(short) = truncated(&message) {
            prop_assert!(short.len() <= message.len() && short[2] & 2 != 0);
            prop_assert_eq!(&short[6..HEADER_BYTES], &[0; 6]);
        }
    }
}
