//! Which frames of a guest may leave its card: not those to the host, to the cluster's hosts, or to
//! link-local addresses.
//!
//! The decision is pure. A guest may still answer datagrams of a forwarded port, get its address by DHCP,
//! find its neighbours, and ask the name servers that passt hands out.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use crate::frame::{Datagram, Packet, Payload, parse};
use crate::passt::GATEWAY;

const DNS_PORT: u16 = 53;
/// Ports of DHCP: the client's and the server's.
const DHCP_PORTS: (u16, u16) = (68, 67);
/// Ports of DHCPv6, likewise, and the address of all its servers.
const DHCPV6_PORTS: (u16, u16) = (546, 547);
const DHCPV6_SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// Types of ICMPv6 by which neighbours and routers are found, and multicast groups joined. passt answers them
/// itself.
const NEIGHBOR_DISCOVERY: std::ops::RangeInclusive<u8> = 133..=136;
const MULTICAST_REPORTS: [u8; 4] = [130, 131, 132, 143];
/// UDP peers that are remembered, and how long after their last datagram they may be answered.
const PEERS_MAX: usize = 1024;
const ANSWER_LIMIT: Duration = Duration::from_secs(180);

/// Addresses that a guest may not reach, besides those that are barred by their kind.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Barred {
    /// This host's own.
    pub own: HashSet<IpAddr>,
    /// Those of the cluster: its hosts' and its etcd's.
    pub cluster: HashSet<IpAddr>,
}

/// The name servers that passt hands out.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Resolvers {
    /// Servers that the guest asks at their own addresses.
    pub direct: Vec<IpAddr>,
    /// The host's own one on its loopback, which passt offers at the gateway's address.
    pub at_gateway: bool,
}

impl Resolvers {
    /// Those of a `resolv.conf`, as passt reads it, but for those that are one of `gateways`: passt may take
    /// these for the host.
    pub fn of(resolv_conf: &str, gateways: &[IpAddr]) -> Self {
        let servers = resolv_conf
            .lines()
            .filter_map(|line| line.strip_prefix("nameserver "));
        let mut resolvers = Self::default();
        for server in servers.filter_map(|server| server.trim().parse::<IpAddr>().ok()) {
            match server {
                IpAddr::V4(server) if server.is_loopback() => resolvers.at_gateway = true,
                server if is_barred_by_kind(server) || gateways.contains(&server) => {}
                server => resolvers.direct.push(server),
            }
        }
        resolvers
    }
}

/// UDP peers whose datagrams came in at a forwarded port: the guest may answer them, whatever their address.
#[derive(Debug, Default)]
pub struct Peers {
    /// The guest's forwarded ports.
    ports: Vec<u16>,
    /// When each last sent: its address and port, and the guest's port.
    seen: HashMap<(IpAddr, u16, u16), Instant>,
}

impl Peers {
    /// Without peers; `ports` of the guest are forwarded.
    pub fn new(ports: Vec<u16>) -> Self {
        let seen = HashMap::new();
        Self { ports, seen }
    }

    /// Whether any port is forwarded.
    pub fn are_possible(&self) -> bool {
        !self.ports.is_empty()
    }

    /// Notes the sender of a frame that is on its way to the guest.
    pub fn note(&mut self, frame: &[u8], now: Instant) {
        let Some(Packet::Ip(Datagram {
            source: address,
            payload: Payload::Udp { source, destination },
            ..
        })) = parse(frame)
        else {
            return;
        };
        if !self.ports.contains(&destination) {
            return;
        }
        let peer = (address, source, destination);
        if self.seen.len() >= PEERS_MAX && !self.seen.contains_key(&peer) {
            let oldest = self.seen.iter().min_by_key(|(_, time)| **time);
            if let Some(oldest) = oldest.map(|(peer, _)| *peer) {
                self.seen.remove(&oldest);
            }
        }
        self.seen.insert(peer, now);
    }

    /// Whether a datagram from the guest's port answers `address` and `port`.
    fn may_be_answered(&self, (address, port): (IpAddr, u16), from: u16, now: Instant) -> bool {
        let seen = self.seen.get(&(address, port, from));
        seen.is_some_and(|seen| now.saturating_duration_since(*seen) < ANSWER_LIMIT)
    }
}

/// Whether a frame of the guest may go on to passt.
pub fn admits(frame: &[u8], barred: &Barred, resolvers: &Resolvers, peers: &Peers, now: Instant) -> bool {
    match parse(frame) {
        None => false,
        Some(Packet::Arp) => true,
        Some(Packet::Ip(datagram)) => {
            is_plausible_source(datagram.source, barred)
                && (!is_barred(datagram.destination, barred)
                    || is_configuration(&datagram)
                    || asks_a_resolver(&datagram, resolvers)
                    || answers(&datagram, peers, now))
        }
    }
}

/// passt takes the source of any frame for the guest's address, and connects to that when the guest names the
/// gateway.
fn is_plausible_source(source: IpAddr, barred: &Barred) -> bool {
    let is_another_hosts = barred.cluster.contains(&source) && !barred.own.contains(&source);
    let is_odd = match source {
        IpAddr::V4(source) => {
            source.is_loopback() || source.is_link_local() || is_group(source) || source == GATEWAY
        }
        IpAddr::V6(source) => {
            source.is_loopback() || source.is_multicast() || source.to_ipv4_mapped().is_some()
        }
    };
    !is_another_hosts && !is_odd
}

fn is_barred(address: IpAddr, barred: &Barred) -> bool {
    let is_listed = |address: IpAddr| barred.own.contains(&address) || barred.cluster.contains(&address);
    let is_translated = match address {
        IpAddr::V6(address) => {
            translated(address).is_some_and(|inner| is_barred_by_kind(inner) || is_listed(inner))
        }
        IpAddr::V4(_) => false,
    };
    is_barred_by_kind(address) || is_listed(address) || is_translated
}

fn is_barred_by_kind(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            // Linux takes 0.0.0.0 for the loopback.
            address.octets()[0] == 0
                || address.is_loopback()
                || address.is_link_local()
                || is_group(address)
                || address == GATEWAY
        }
        IpAddr::V6(address) => {
            // ::/96 holds ::, ::1 and IPv4-compatible addresses.
            let is_low = address.segments()[..6] == [0; 6];
            is_low
                || address.to_ipv4_mapped().is_some()
                || address.is_unicast_link_local()
                || address.is_multicast()
        }
    }
}

/// Multicast, or broadcast on this link.
fn is_group(address: Ipv4Addr) -> bool {
    address.is_multicast() || address.is_broadcast()
}

/// The IPv4 address that a translator on the way makes of an address of 64:ff9b::/96.
fn translated(address: Ipv6Addr) -> Option<IpAddr> {
    let [0x64, 0xff9b, 0, 0, 0, 0, high, low] = address.segments() else {
        return None;
    };
    let [[a, b], [c, d]] = [high.to_be_bytes(), low.to_be_bytes()];
    Some(Ipv4Addr::new(a, b, c, d).into())
}

/// Whether a guest needs this for its addresses and routes; passt answers it without the host.
fn is_configuration(datagram: &Datagram) -> bool {
    match (datagram.destination, datagram.payload) {
        (IpAddr::V4(to), Payload::Udp { source, destination }) => {
            (to.is_broadcast() || to == GATEWAY) && (source, destination) == DHCP_PORTS
        }
        (IpAddr::V6(to), Payload::Udp { source, destination }) => {
            to == DHCPV6_SERVERS && (source, destination) == DHCPV6_PORTS
        }
        (IpAddr::V6(to), Payload::Icmp { kind }) => {
            NEIGHBOR_DISCOVERY.contains(&kind) || (to.is_multicast() && MULTICAST_REPORTS.contains(&kind))
        }
        _ => false,
    }
}

fn asks_a_resolver(datagram: &Datagram, resolvers: &Resolvers) -> bool {
    let (port, is_udp) = match datagram.payload {
        Payload::Udp { destination, .. } => (destination, true),
        Payload::Tcp { destination, .. } => (destination, false),
        _ => return false,
    };
    // passt hands on datagrams to the resolver, but connects to port 53 of 127.0.0.1, which may be another
    // program.
    let is_gateways = resolvers.at_gateway && is_udp && datagram.destination == IpAddr::V4(GATEWAY);
    port == DNS_PORT && (is_gateways || resolvers.direct.contains(&datagram.destination))
}

/// Whether this belongs to a connection or exchange that the other side began. passt ignores TCP segments of
/// connections that it does not know.
fn answers(datagram: &Datagram, peers: &Peers, now: Instant) -> bool {
    match datagram.payload {
        Payload::Tcp { opens, .. } => !opens,
        Payload::Udp { source, destination } => {
            peers.may_be_answered((datagram.destination, destination), source, now)
        }
        Payload::Icmp { .. } | Payload::Other => false,
    }
}

#[cfg(test)]
mod tests;
