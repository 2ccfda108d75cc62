use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn any_bytes_are_judged(bytes: Vec<u8>, version: bool) {
        let mut bytes = bytes;
        parse(&bytes);
        if let Some(first) = bytes.first_mut() {
            *first = if version { 0x45 } else { 0x60 };
        }
        parse(&bytes);
        let mut buffer = [0; 1000];
        for gateway in [IpAddr::from([10, 77, 0, 1]), "fd77::1".parse().unwrap()] {
            if let Some(length) = write_unreachable(&mut buffer, gateway, &bytes, Unreachable::Host) {
                prop_assert!(length <= UNREACHABLE_BYTES_MAX);
            }
        }
    }

    #[test]
    fn written_datagram_is_read_again(
        ports: (u16, u16), v6: bool, a: u32, b: u32, payload in prop::collection::vec(any::<u8>(), 0..2000),
    ) {
        let address = |number: u32| match v6 {
            true => IpAddr::from(std::net::Ipv6Addr::from(u128::from(number) | 0xfd77 << 112)),
            false => IpAddr::from(std::net::Ipv4Addr::from(number)),
        };
        let (from, to) = (SocketAddr::new(address(a), ports.0), SocketAddr::new(address(b), ports.1.max(1)));
        let mut packet = vec![0xff; udp_header_bytes(from.ip())];
        packet.extend(&payload);
        write_udp(&mut packet, from, to);
        let parsed = parse(&packet).unwrap();
        prop_assert_eq!((parsed.guest, parsed.remote), (from, to));
        let Content::Udp(read) = parsed.content else {
            panic!("{parsed:?}");
        };
        prop_assert_eq!(read, &payload);
        // An error in any byte is noticed, but for those that routers change.
        let at = usize::from(ports.0) % packet.len();
        packet[at] ^= 0x80;
        let is_unchecked = v6 && at < 8;
        prop_assert!(is_unchecked || parse(&packet).is_none());
    }
}

#[test]
fn echo_request_is_read_and_other_messages_are_not() {
    let (from, to) = (IpAddr::from([10, 77, 0, 5]), IpAddr::from([192, 0, 2, 1]));
    let mut packet = vec![0; 20];
    packet.extend([8, 0, 0, 0, 0, 0, 0, 1, 5]);
    write_echo(&mut packet, from, SocketAddr::new(to, 300));
    let parsed = parse(&packet).unwrap();
    assert_eq!(parsed.guest, SocketAddr::new(from, 300));
    assert_eq!(parsed.remote, SocketAddr::new(to, 0));
    for kind in [0, 3, 5, 13] {
        packet[20] = kind;
        write_echo(&mut packet, from, SocketAddr::new(to, 300));
        assert!(parse(&packet).is_none(), "{kind}");
    }
}
