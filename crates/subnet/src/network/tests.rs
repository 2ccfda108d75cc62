//! Frames of guests, and their way through a network.

mod checks;
mod guests;
mod hostile;
mod limits;
mod membership;
mod neighbors;
mod offloads;
mod outside;

use std::net::IpAddr;

use super::compose::{self, Route};
use super::*;

/// A network with cards, and what it has sent.
struct World {
    network: Network,
    now: Instant,
    sent: Vec<(Target, Vec<u8>)>,
    /// Targets without room.
    full: Vec<Target>,
}

/// Number, hardware address and IP addresses of a card.
#[derive(Clone, Copy)]
struct Guest {
    id: CardId,
    mac: [u8; 6],
    ipv4: IpAddr,
    ipv6: IpAddr,
    link_local: IpAddr,
}

fn mac(number: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, number]
}

fn card(name: &str, number: u8) -> Card {
    Card {
        name: name.to_owned(),
        mac: mac(number),
        address: None,
        outside: true,
        limits: Limits::default(),
    }
}

impl World {
    fn new(settings: Settings) -> Self {
        let now = Instant::now();
        Self {
            network: Network::new(settings, now),
            now,
            sent: Vec::new(),
            full: Vec::new(),
        }
    }

    /// Creates a network with the cards `a`, `b` and `c`.
    fn of_three(change: impl FnOnce(&mut Settings)) -> (Self, [Guest; 3]) {
        let mut settings = Settings::new("test");
        change(&mut settings);
        let mut world = Self::new(settings);
        let guests = [("a", 1), ("b", 2), ("c", 3)].map(|(name, number)| world.attach(card(name, number)));
        (world, guests)
    }

    fn attach(&mut self, card: Card) -> Guest {
        let (mac, id) = (card.mac, CardId(u64::from(card.mac[5])));
        let addresses = self.network.attach(id, card, self.now).unwrap();
        Guest {
            id,
            mac,
            ipv4: addresses.ipv4.into(),
            ipv6: addresses.ipv6.into(),
            link_local: addresses.link_local.into(),
        }
    }

    fn gateway(&self) -> Guest {
        let gateway = self.network.gateway();
        Guest {
            id: CardId(0),
            mac: gateway.mac,
            ipv4: gateway.addresses.ipv4.into(),
            ipv6: gateway.addresses.ipv6.into(),
            link_local: gateway.link_local.into(),
        }
    }

    /// Receives a frame of a guest, and returns what the network sends.
    fn receive(&mut self, from: Guest, frame: &[u8]) -> Vec<(Target, Vec<u8>)> {
        self.receive_unfinished(from, &offload::WHOLE, frame)
    }

    /// Receives a frame with work for the receiver. Cards of this world leave that work to the network.
    fn receive_unfinished(&mut self, from: Guest, header: &Header, frame: &[u8]) -> Vec<(Target, Vec<u8>)> {
        let (sent, full) = (&mut self.sent, &self.full);
        let mut output = |target: Target, bytes: &[u8]| {
            if full.contains(&target) {
                return Delivery::Full;
            }
            sent.push((target, bytes.to_vec()));
            Delivery::Taken
        };
        let network = &mut self.network;
        network.receive_unfinished(from.id, header, frame, self.now, &mut output);
        std::mem::take(&mut self.sent)
    }

    fn dropped(&self, guest: Guest, reason: DropReason) -> u64 {
        self.network.counts(guest.id).unwrap().from_guest.dropped(reason)
    }

    /// Checks that a frame is dropped for this reason, and that nothing is sent.
    fn assert_dropped(&mut self, guest: Guest, frame: &[u8], reason: DropReason) {
        let before = self.network.counts(guest.id).unwrap().from_guest;
        let sent = self.receive(guest, frame);
        let after = self.network.counts(guest.id).unwrap().from_guest;
        assert_eq!(sent, [], "{reason:?}");
        assert_eq!(
            after.dropped(reason),
            before.dropped(reason) + 1,
            "{reason:?}: {after:?}"
        );
        assert_eq!(
            after.dropped_in_all(),
            before.dropped_in_all() + 1,
            "{reason:?}: {after:?}"
        );
    }
}

fn route(from: Guest, to: Guest) -> Route {
    Route {
        from_mac: from.mac,
        to_mac: to.mac,
        from: from.ipv4,
        to: to.ipv4,
    }
}

fn route_v6(from: Guest, to: Guest) -> Route {
    Route {
        from: from.ipv6,
        to: to.ipv6,
        ..route(from, to)
    }
}

fn udp(route: Route, ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    assert!(compose::udp(&mut frame, route, ports, data));
    frame
}

fn icmp(route: Route, message: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    assert!(compose::icmp(&mut frame, route, message, compose::HOPS_ON_LINK));
    frame
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}
