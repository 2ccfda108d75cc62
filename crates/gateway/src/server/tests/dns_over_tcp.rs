//! A guest that speaks TCP by hand asks its gateway for names.

use super::*;

const PORT: u16 = 53;
const SYN: u8 = 2;
const PUSH: u8 = 8;
const ACK: u8 = 16;
const HEADERS: usize = 14 + 20;

/// A connection of a guest.
struct Tcp<'a> {
    guest: &'a Guest,
    gateway: ([u8; 6], Ipv4Addr),
    port: u16,
    /// Numbers of the next byte of the guest, and of the gateway.
    next: [u32; 2],
}

impl<'a> Tcp<'a> {
    fn open(guest: &'a Guest, port: u16) -> Self {
        let mut tcp = Self {
            guest,
            gateway: (guest.gateway_mac(), [10, 213, 0, 1].into()),
            port,
            next: [100, 0],
        };
        tcp.send(SYN, &[]);
        let reply = tcp
            .receive(|segment| segment[13] == SYN | ACK)
            .expect("a connection");
        tcp.next = [101, number(&reply[4..8]).wrapping_add(1)];
        tcp
    }

    fn send(&mut self, flags: u8, payload: &[u8]) {
        let mut segment = [self.port, PORT].map(u16::to_be_bytes).concat();
        segment.extend(self.next.map(u32::to_be_bytes).concat());
        // The checksum is left to the receiver, which takes it as it is.
        segment.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        segment.extend(payload);
        self.guest.send(&self.guest.packet(self.gateway, 6, &segment));
        self.next[0] += payload.len() as u32;
    }

    /// The next segment of the connection that `is_wanted`.
    fn receive(&self, is_wanted: impl Fn(&[u8]) -> bool) -> Option<Vec<u8>> {
        let ports = [PORT, self.port].map(u16::to_be_bytes).concat();
        let frame = self.guest.receive_within(SOON, |frame| {
            let segment = frame.get(HEADERS..).filter(|_| frame.get(23) == Some(&6));
            segment.is_some_and(|segment| segment.starts_with(&ports) && is_wanted(segment))
        });
        frame.map(|frame| frame[HEADERS..].to_vec())
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes.try_into().unwrap())
}

fn query(name: &str) -> Vec<u8> {
    let mut message = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        message.push(label.len() as u8);
        message.extend(label.bytes());
    }
    message.extend([0, 0, 1, 0, 1]);
    [&(message.len() as u16).to_be_bytes()[..], &message].concat()
}

fn payload(segment: &[u8]) -> &[u8] {
    &segment[usize::from(segment[12] >> 4) * 4..]
}

#[test]
fn names_of_the_network_are_answered_by_tcp() {
    let gateway = Served::start("tcp");
    let a = gateway.join(card("n", "a", 1)).unwrap();
    let b = gateway.join(card("n", "b", 2)).unwrap();
    let mut tcp = Tcp::open(&a, 5001);
    tcp.send(ACK | PUSH, &query("b.vm.internal"));
    let reply = tcp
        .receive(|segment| !payload(segment).is_empty())
        .expect("an answer");
    let answer = payload(&reply);
    assert_eq!(answer[..4], [0, (answer.len() - 2) as u8, 0xab, 0xcd]);
    assert!(answer.ends_with(&b.address.octets()), "{answer:?}");
    tcp.next[1] += answer.len() as u32;
    // A name of the outside: the facts name no server, which is the resolver's failure.
    tcp.send(ACK | PUSH, &query("example.org"));
    let reply = tcp
        .receive(|segment| payload(segment).len() > 2)
        .expect("a failure");
    assert_eq!(payload(&reply)[5] & 0x0f, 2, "{reply:?}");
    // A message that is no query ends the connection.
    tcp.next[1] += payload(&reply).len() as u32;
    tcp.send(ACK | PUSH, &[0, 3, 1, 2, 3]);
    tcp.receive(|segment| segment[13] & 5 != 0).expect("an end");
}

#[test]
fn isolated_network_has_no_names_of_the_outside_by_tcp_either() {
    let gateway = Served::start("tcp-isolated");
    let settings = NetworkSettings {
        range: None,
        isolated: true,
        peers: true,
    };
    let a = gateway.join(Join {
        settings: Some(settings),
        ..card("n", "a", 1)
    });
    let a = a.unwrap();
    let mut tcp = Tcp::open(&a, 5002);
    tcp.send(ACK | PUSH, &query("example.org"));
    let reply = tcp
        .receive(|segment| payload(segment).len() > 2)
        .expect("an answer");
    assert_eq!(payload(&reply)[5] & 0x0f, 3, "{reply:?}");
}
