//! Frames of the guests of a virtual network, and the host's side of its gateway.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use subnet::frame::{Packet, parse};
use subnet::network::{Card, CardId, Delivery, Limits, Network, Output, Query, Rate, Settings, Target, dns};
use subnet::offload::{HEADER_BYTES, Header, Offload, WHOLE};

/// An action: its kind, its choices, and bytes of a guest or of the host's side.
type Action = (u8, u8, Vec<u8>);

const CARDS: u8 = 3;
const ACTIONS_MAX: usize = 64;

pub fn fuzz((choice, actions): (u8, Vec<Action>)) {
    let mut now = Instant::now();
    let mut settings = Settings::new("fuzz");
    settings.peers = choice & 1 == 0;
    settings.outside = choice & 2 == 0;
    settings.outside_ipv6 = choice & 4 == 0;
    let mut network = Network::new(settings, now);
    let cards: Vec<CardId> = (0..CARDS)
        .map(|number| attach(&mut network, number, now))
        .collect();
    let mut queries = Vec::new();
    for (kind, choices, bytes) in actions.into_iter().take(ACTIONS_MAX) {
        now += Duration::from_millis(u64::from(choices));
        let card = cards[usize::from(choices % CARDS)];
        let mut sent = Sent::default();
        match kind % 8 {
            0 => network.receive(card, &bytes, now, &mut sent),
            1 => network.receive_outside(card, &bytes, now, &mut sent),
            2 => {
                if let Some(query) = queries.pop() {
                    network.answer(query, &bytes, &mut sent);
                }
                let _ = dns::server_failure(&bytes);
            }
            3 => network.turn(now + Duration::from_secs(600), &mut sent),
            4.. => {
                let mut frame = dress(&network, card, choices, kind, bytes);
                let mut header = WHOLE;
                if choices & 0x10 != 0 {
                    // The header is the last bytes, with its place of the checksum where TCP's or UDP's is.
                    header = take_header(&mut frame, choices, kind);
                    network.receive_unfinished(card, &header, &frame, now, &mut sent);
                } else {
                    network.receive(card, &frame, now, &mut sent);
                }
                check(&network, card, &header, &frame, &sent);
            }
        }
        queries.extend(sent.queries);
        queries.truncate(8);
    }
    for card in cards {
        let counts = network.counts(card).expect("the card is attached");
        assert!(counts.from_guest.dropped_in_all() <= counts.from_guest.frames);
        assert!(counts.to_guest.dropped_in_all() <= counts.to_guest.frames);
        network.detach(card).expect("the card is attached");
    }
    assert_eq!(network.deadline(), None);
}

fn attach(network: &mut Network, number: u8, now: Instant) -> CardId {
    let id = CardId(u64::from(number));
    let limited = Rate {
        bytes: Some(1 << 20),
        packets: Some(1000),
    };
    let card = Card {
        name: format!("vm-{number}"),
        mac: [2, 0, 0, 0, 0, number],
        address: None,
        outside: number != 1,
        limits: Limits {
            from_guest: limited,
            to_guest: if number == 0 { limited } else { Rate::default() },
        },
    };
    network.attach(id, card, now).expect("names and addresses differ");
    id
}

/// Puts addresses of cards into a frame, so that it passes the first checks.
fn dress(network: &Network, card: CardId, choices: u8, kind: u8, mut bytes: Vec<u8>) -> Vec<u8> {
    let gateway = network.gateway();
    let all: Vec<_> = network
        .cards()
        .map(|(_, card, addresses)| (card.mac, addresses))
        .collect();
    let (mac, own) = all[card.0 as usize];
    let (peer_mac, peer) = all[(card.0 as usize + 1) % all.len()];
    // A forged source, of another card.
    let own = if choices & 0x20 == 0 { own } else { peer };
    if bytes.len() < 14 {
        bytes.resize(14, 0);
    }
    let (to_mac, to_v4, to_v6) = match choices >> 6 {
        0 => (gateway.mac, gateway.addresses.ipv4, gateway.addresses.ipv6),
        1 => (peer_mac, peer.ipv4, peer.ipv6),
        2 => ([0xff; 6], std::net::Ipv4Addr::BROADCAST, gateway.link_local),
        _ => (
            gateway.mac,
            [198, 51, 100, 7].into(),
            [0x2001, 0xdb8, 0, 0, 0, 0, 0, 7].into(),
        ),
    };
    bytes[..6].copy_from_slice(&to_mac);
    bytes[6..12].copy_from_slice(&mac);
    let mut put = |at: usize, value: &[u8]| {
        if let Some(target) = bytes.get_mut(at..at + value.len()) {
            target.copy_from_slice(value);
        }
    };
    match kind % 8 {
        4 => put(12, &[0x08, 0x06]),
        5 => {
            put(12, &[0x08, 0x00, 0x45]);
            put(26, &own.ipv4.octets());
            put(30, &to_v4.octets());
        }
        6 => {
            put(12, &[0x86, 0xdd, 0x60]);
            put(22, &own.ipv6.octets());
            put(38, &to_v6.octets());
        }
        _ => {}
    }
    let length = bytes.len();
    let mut put_length = |at: usize, header_bytes: usize| {
        let value = u16::try_from(length.saturating_sub(header_bytes)).unwrap_or(u16::MAX);
        if let Some(target) = bytes.get_mut(at..at + 2) {
            target.copy_from_slice(&value.to_be_bytes());
        }
    };
    match kind % 8 {
        5 => put_length(16, 14),
        6 => put_length(18, 54),
        _ => {}
    }
    bytes
}

/// Takes a header from the end of a frame, whose length of IP is then that of the rest.
fn take_header(frame: &mut Vec<u8>, choices: u8, kind: u8) -> Header {
    let mut header = WHOLE;
    let rest = frame.len().saturating_sub(HEADER_BYTES).max(14);
    let taken = frame.split_off(rest.min(frame.len()));
    header[..taken.len()].copy_from_slice(&taken);
    let (start, length_at, header_bytes) = match kind % 8 {
        5 => (34, 16, 14),
        6 => (54, 18, 54),
        _ => return header,
    };
    let length = u16::try_from(frame.len().saturating_sub(header_bytes)).unwrap_or(u16::MAX);
    if let Some(target) = frame.get_mut(length_at..length_at + 2) {
        target.copy_from_slice(&length.to_be_bytes());
    }
    if choices & 0x08 != 0 {
        header[6..10].copy_from_slice(&[start, 0, if choices & 1 == 0 { 16 } else { 6 }, 0]);
    }
    header
}

/// Output of a network in one action.
#[derive(Default)]
struct Sent {
    frames: Vec<(CardId, Vec<u8>)>,
    /// Frames that a card of an older release gets for one.
    finished: Vec<Vec<u8>>,
    outside: Vec<CardId>,
    queries: Vec<Query>,
}

impl Output for Sent {
    fn send(&mut self, target: Target, bytes: &[u8]) -> Delivery {
        match target {
            Target::Card(card) => self.frames.push((card, bytes.to_vec())),
            Target::Outside(card) => self.outside.push(card),
            Target::Query(query) => self.queries.push(query),
        }
        if bytes.len().is_multiple_of(7) {
            Delivery::Full
        } else {
            Delivery::Taken
        }
    }

    fn send_unfinished(&mut self, card: CardId, frame: &[u8], offload: &Offload) -> Delivery {
        // The receiver's shard reads the header of the switch again.
        assert_eq!(Offload::read(&offload.header(), frame), Ok(Some(*offload)));
        offload.finish(frame, &mut Vec::new(), |whole| {
            assert!(whole.len() <= offload.largest_frame_bytes());
            self.finished.push(whole.to_vec());
        });
        self.frames.push((card, frame.to_vec()));
        Delivery::Taken
    }
}

fn check(network: &Network, card: CardId, header: &Header, frame: &[u8], sent: &Sent) {
    assert!(*header != WHOLE || sent.finished.is_empty());
    assert!(sent.frames.len() + sent.outside.len() + sent.queries.len() <= usize::from(CARDS));
    assert!(sent.outside.iter().all(|sender| *sender == card));
    assert!(sent.queries.iter().all(|query| query.card == card));
    assert!(network.settings().outside || sent.queries.is_empty());
    for (receiver, received) in &sent.frames {
        if *receiver == card {
            continue;
        }
        assert!(network.settings().peers, "a frame to a card that is not reached");
        // Without its padding, if work is left.
        assert!(frame.starts_with(received), "a changed frame");
        assert!(
            *header != WHOLE || received.len() == frame.len(),
            "a shorter frame"
        );
        check_source(network, card, received);
    }
    for finished in &sent.finished {
        check_source(network, card, finished);
    }
}

fn check_source(network: &Network, card: CardId, frame: &[u8]) {
    let Some(Packet::Ip(datagram)) = parse(frame) else {
        return;
    };
    let others = network.cards().filter(|(other, ..)| *other != card);
    for (_, _, addresses) in others {
        let theirs = [
            IpAddr::from(addresses.ipv4),
            addresses.ipv6.into(),
            addresses.link_local.into(),
        ];
        assert!(!theirs.contains(&datagram.source), "a forged source");
    }
}
