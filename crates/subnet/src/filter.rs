//! Decides which frames of a guest may leave its card. It refuses frames to the host, to the cluster's hosts,
//! and to link-local addresses.
//!
//! The decision is pure. A guest may still reply to datagrams of a forwarded port, get its address by DHCP,
//! find its neighbours, and query the name servers that passt offers.

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
/// Types of ICMPv6 that find neighbours and routers, and join multicast groups. passt replies to them itself.
const NEIGHBOR_DISCOVERY: std::ops::RangeInclusive<u8> = 133..=136;
const MULTICAST_REPORTS: [u8; 4] = [130, 131, 132, 143];
/// Greatest number of UDP peers, and the time after their last datagram within which replies are allowed.
const PEERS_MAX: usize = 1024;
const ANSWER_LIMIT: Duration = Duration::from_secs(180);

/// Addresses that a guest may not reach, in addition to those that are barred by their kind.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Barred {
    /// Addresses of this host.
    pub own: HashSet<IpAddr>,
    /// Addresses of the cluster: its hosts' and its etcd's.
    pub cluster: HashSet<IpAddr>,
}

/// The name servers that passt offers.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Resolvers {
    /// Servers that the guest queries at their own addresses.
    pub direct: Vec<IpAddr>,
    /// Whether passt offers the host's own server on its loopback at the gateway's address.
    pub at_gateway: bool,
}

impl Resolvers {
    /// Returns the servers of a `resolv.conf`, as passt reads it. Omits those at one of `gateways`: passt may
    /// take these for the host.
    pub fn of(resolv_conf: &str, gateways: &[IpAddr]) -> Self {
        let servers = resolv_conf
            .lines()
            .filter_map(|line| line.strip_prefix("nameserver "));
        let mut resolvers = Self::default();
        for server in servers.filter_map(|server| server.trim().parse::<IpAddr>().ok()) {
            match server {
                IpAddr::V4(server) if server.is_loopback() => resolvers.at_gateway = true,
                server if server == GATEWAY || is_barred_by_kind(server) || gateways.contains(&server) => {}
                server => resolvers.direct.push(server),
            }
        }
        resolvers
    }
}

/// UDP peers whose datagrams arrived at a forwarded port: the guest may reply to them at any address.
#[derive(Debug, Default)]
pub struct Peers {
    /// Forwarded ports of the guest.
    ports: Vec<u16>,
    /// Time of each peer's last datagram, by its address and port, and the guest's port.
    seen: HashMap<(IpAddr, u16, u16), Instant>,
}

impl Peers {
    /// Creates an empty table; `ports` of the guest are forwarded.
    pub fn new(ports: Vec<u16>) -> Self {
        let seen = HashMap::new();
        Self { ports, seen }
    }

    /// Returns whether any port is forwarded.
    pub fn are_possible(&self) -> bool {
        !self.ports.is_empty()
    }

    /// Records the sender of a frame to the guest.
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

    /// Returns whether a datagram from the guest's port is a reply to `address` and `port`.
    fn may_be_answered(&self, (address, port): (IpAddr, u16), from: u16, now: Instant) -> bool {
        let seen = self.seen.get(&(address, port, from));
        seen.is_some_and(|seen| now.saturating_duration_since(*seen) < ANSWER_LIMIT)
    }
}

/// Returns whether a frame of the guest may be sent to passt.
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

/// Returns whether the guest may use this source address. passt takes the source of any frame for the guest's
/// address, and connects to that when the guest names the gateway.
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
    address == GATEWAY || is_barred_by_kind(address) || is_listed(address, barred)
}

/// Returns whether the list has the address, or the one that it stands for.
pub(crate) fn is_listed(address: IpAddr, barred: &Barred) -> bool {
    let has = |address: IpAddr| barred.own.contains(&address) || barred.cluster.contains(&address);
    has(address) || translated(address).is_some_and(has)
}

/// Returns whether an address, or the one that it stands for, is loopback, link-local, multicast, broadcast
/// or unspecified.
pub(crate) fn is_barred_by_kind(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            // Linux treats 0.0.0.0 as the loopback.
            address.octets()[0] == 0 || address.is_loopback() || address.is_link_local() || is_group(address)
        }
        IpAddr::V6(inner) => {
            // ::/96 holds ::, ::1 and IPv4-compatible addresses.
            let is_low = inner.segments()[..6] == [0; 6];
            is_low
                || inner.to_ipv4_mapped().is_some()
                || inner.is_unicast_link_local()
                || inner.is_multicast()
                || translated(address).is_some_and(is_barred_by_kind)
        }
    }
}

/// Returns whether the address is multicast, or broadcast on this link.
fn is_group(address: Ipv4Addr) -> bool {
    address.is_multicast() || address.is_broadcast()
}

/// Returns the IPv4 address that a translator on the path derives from an address of 64:ff9b::/96.
fn translated(address: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(address) = address else {
        return None;
    };
    let [0x64, 0xff9b, 0, 0, 0, 0, high, low] = address.segments() else {
        return None;
    };
    let [[a, b], [c, d]] = [high.to_be_bytes(), low.to_be_bytes()];
    Some(Ipv4Addr::new(a, b, c, d).into())
}

/// Returns whether a guest needs the datagram for its addresses and routes; passt replies to it without the
/// host.
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
    // passt forwards datagrams to the resolver, but connects to port 53 of 127.0.0.1, which may be another
    // program.
    let is_gateways = resolvers.at_gateway && is_udp && datagram.destination == IpAddr::V4(GATEWAY);
    port == DNS_PORT && (is_gateways || resolvers.direct.contains(&datagram.destination))
}

/// Returns whether the datagram belongs to a connection or exchange that the other side began. passt ignores
/// TCP segments of unknown connections.
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
