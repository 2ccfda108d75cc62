//! Frames that a guest sends to its passt, and the decision about each.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Instant;

use subnet::filter::{Barred, Peers, Resolvers, admits};
use subnet::frame::{Packet, Payload, parse};

const BARRED: [&str; 4] = ["192.0.2.2", "198.51.100.3", "2001:db8::2", "2001:db8::3"];

pub fn fuzz((choice, frame): (u8, &[u8])) {
    let own: HashSet<IpAddr> = BARRED
        .iter()
        .map(|text| text.parse().expect("an address"))
        .collect();
    let barred = Barred {
        own: own.clone(),
        cluster: HashSet::new(),
    };
    let resolvers = Resolvers {
        direct: Vec::new(),
        at_gateway: choice & 1 != 0,
    };
    let now = Instant::now();
    let mut peers = Peers::new(vec![53]);
    if choice & 2 != 0 {
        peers.note(frame, now);
    }
    let is_admitted = admits(frame, &barred, &resolvers, &peers, now);
    let Some(packet) = parse(frame) else {
        assert!(!is_admitted, "a frame that cannot be judged");
        return;
    };
    if let Packet::Ip(datagram) = packet
        && let Payload::Tcp { opens: true, .. } = datagram.payload
        && (own.contains(&datagram.destination) || datagram.destination.is_loopback())
    {
        assert!(!is_admitted, "a connection to a barred address");
    }
}
