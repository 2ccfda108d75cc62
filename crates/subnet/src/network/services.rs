//! Services of a network's gateway to its cards.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::compose::{self, HOPS_ON_LINK, Route};
use super::dns::{Decision, HostAddresses, Zone};
use super::header::Ip;
use super::members::{GATEWAY_NAME, Member, Members};
use super::settings::{Settings, has_prefix};
use super::{CardId, Delivery, DropReason, Network, Output, Query, Target, dhcp, dns, neighbors};
use crate::offload::Offload;

const ICMP_ECHO_REPLY: u8 = 0;
const HOPS: u8 = 64;
/// Bytes of a datagram's headers in a frame: Ethernet, IPv6, UDP.
const DATAGRAM_HEADER_BYTES: usize = 14 + 40 + 8;

impl Network {
    /// Sends what `compose` writes to a card. It returns whether it wrote a whole frame.
    pub(super) fn compose_and_reply(
        &mut self,
        id: CardId,
        output: &mut dyn Output,
        compose: impl FnOnce(&mut Vec<u8>) -> bool,
    ) {
        let mut frame = std::mem::take(&mut self.buffer);
        if compose(&mut frame) {
            self.reply(id, &frame, output);
        }
        self.buffer = frame;
    }

    /// Sends a frame to a card, whatever its limit.
    pub(super) fn reply(&mut self, to: CardId, frame: &[u8], output: &mut dyn Output) {
        self.send_to_card(to, frame, None, output);
    }

    /// Sends a frame to a card, with the work that is left to its receiver, and counts it.
    pub(super) fn send_to_card(
        &mut self,
        to: CardId,
        frame: &[u8],
        offload: Option<Offload>,
        output: &mut dyn Output,
    ) {
        let Some(member) = self.members.get_mut(to) else {
            return;
        };
        member.counts.to_guest.add(frame.len());
        let delivery = match offload {
            Some(offload) => output.send_unfinished(to, frame, &offload),
            None => output.send(Target::Card(to), frame),
        };
        if delivery == Delivery::Full {
            member.counts.to_guest.drop(DropReason::Full);
        }
    }

    /// Sends an ICMPv6 message of neighbor discovery from `sender` to a card.
    pub(super) fn reply_icmpv6(
        &mut self,
        id: CardId,
        sender: ([u8; 6], Ipv6Addr),
        to: Ipv6Addr,
        message: &[u8],
        output: &mut dyn Output,
    ) {
        let Some(mac) = self.mac_of(id) else {
            return;
        };
        let route = Route {
            from_mac: sender.0,
            to_mac: if to.is_multicast() {
                compose::group_mac(to)
            } else {
                mac
            },
            from: sender.1.into(),
            to: to.into(),
        };
        self.compose_and_reply(id, output, |frame| {
            compose::icmp(frame, route, message, HOPS_ON_LINK)
        });
    }

    /// Sends a router advertisement to a card: to the guest's address, or to all addresses of the card.
    pub(super) fn advertise(&mut self, id: CardId, to: Option<Ipv6Addr>, output: &mut dyn Output) {
        let gateway = self.gateway;
        let advertisement =
            neighbors::router_advertisement(&self.settings, &gateway, self.reaches_outside(id));
        let to = to.unwrap_or(neighbors::ALL_NODES);
        self.reply_icmpv6(id, (gateway.mac, gateway.link_local), to, &advertisement, output);
    }

    pub(super) fn serve_echo(
        &mut self,
        id: CardId,
        ip: &Ip<'_>,
        message: &[u8],
        output: &mut dyn Output,
    ) -> Result<(), DropReason> {
        // A header of 8 bytes.
        if message.len() < 8 {
            return Err(DropReason::Malformed);
        }
        let kind = match ip.source {
            IpAddr::V4(_) => ICMP_ECHO_REPLY,
            IpAddr::V6(_) => neighbors::kind::ECHO_REPLY,
        };
        let reply = compose::echo_reply(kind, message);
        if let Some(route) = self.gateway_route(id, ip.destination, ip.source) {
            self.compose_and_reply(id, output, |frame| compose::icmp(frame, route, &reply, HOPS));
        }
        Ok(())
    }

    pub(super) fn serve_dhcp(&mut self, id: CardId, message: &[u8], output: &mut dyn Output) {
        let Some(member) = self.members.get(id) else {
            return;
        };
        // A host's name has no `_`.
        let name = member.card.name.replace('_', "-");
        let client = dhcp::Client {
            mac: member.card.mac,
            address: member.addresses.ipv4,
            name: &name,
            outside: member.reaches_outside(&self.settings),
        };
        let Some(reply) = dhcp::reply(message, client, &self.settings) else {
            return;
        };
        let server = self.gateway.addresses.ipv4.into();
        let Some(route) = self.gateway_route(id, server, reply.destination.into()) else {
            return;
        };
        let ports = (dhcp::SERVER_PORT, dhcp::CLIENT_PORT);
        self.compose_and_reply(id, output, |frame| {
            compose::udp(frame, route, ports, &reply.message)
        });
    }

    pub(super) fn serve_dns(
        &mut self,
        id: CardId,
        client: (IpAddr, u16),
        server: IpAddr,
        message: &[u8],
        output: &mut dyn Output,
    ) -> Result<(), DropReason> {
        let query = Query {
            card: id,
            client: SocketAddr::from(client),
            server,
            bytes_max: dns::datagram_bytes_max(message),
        };
        match self.decide_query_of(id, message) {
            Decision::Answer(answer) => self.send_answer(query, &answer, output),
            Decision::Upstream => {
                if output.send(Target::Query(query), message) == Delivery::Full {
                    return Err(DropReason::Full);
                }
            }
            Decision::Ignore => return Err(DropReason::Malformed),
        }
        Ok(())
    }

    pub(super) fn decide_query_of(&self, id: CardId, message: &[u8]) -> Decision {
        let zone = CardZone {
            card: id,
            members: &self.members,
            settings: &self.settings,
        };
        dns::decide(message, &zone, self.reaches_outside(id))
    }

    pub(super) fn send_answer(&mut self, query: Query, message: &[u8], output: &mut dyn Output) {
        let truncated;
        let bytes_max = self.frame_bytes_max();
        let room = bytes_max.saturating_sub(DATAGRAM_HEADER_BYTES);
        let message = match message.len() > room.min(query.bytes_max.into()) {
            true => {
                let Some(short) = dns::truncated(message) else {
                    return;
                };
                truncated = short;
                &truncated
            }
            false => message,
        };
        let Some(route) = self.gateway_route(query.card, query.server, query.client.ip()) else {
            return;
        };
        let ports = (dns::PORT, query.client.port());
        self.compose_and_reply(query.card, output, |frame| {
            compose::udp(frame, route, ports, message) && frame.len() <= bytes_max
        });
    }

    fn gateway_route(&self, id: CardId, from: IpAddr, to: IpAddr) -> Option<Route> {
        Some(Route {
            from_mac: self.gateway.mac,
            to_mac: self.mac_of(id)?,
            from,
            to,
        })
    }

    fn mac_of(&self, id: CardId) -> Option<[u8; 6]> {
        self.members.get(id).map(|member| member.card.mac)
    }
}

/// Names of a network, as one card sees them.
struct CardZone<'a> {
    card: CardId,
    members: &'a Members,
    settings: &'a Settings,
}

impl CardZone<'_> {
    fn is_visible(&self, id: CardId) -> bool {
        self.settings.peers || id == self.card
    }

    fn addresses(&self, member: &Member) -> HostAddresses {
        HostAddresses {
            ipv4: member.addresses.ipv4,
            ipv6: member.ipv6(self.settings.ipv6_prefix()),
        }
    }
}

impl Zone for CardZone<'_> {
    fn host(&self, name: &str) -> Option<HostAddresses> {
        if name == GATEWAY_NAME {
            let gateway = self.settings.gateway().addresses;
            return Some(HostAddresses {
                ipv4: gateway.ipv4,
                ipv6: Some(gateway.ipv6),
            });
        }
        let (id, member) = self.members.by_name(name)?;
        self.is_visible(id).then(|| self.addresses(member))
    }

    fn name_of(&self, address: IpAddr) -> Option<&str> {
        if self.settings.gateway().addresses.contains(address) {
            return Some(GATEWAY_NAME);
        }
        let (id, member) = self.members.by_address(address)?;
        self.is_visible(id).then_some(member.card.name.as_str())
    }

    fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.settings.ipv4.contains(address),
            IpAddr::V6(address) => has_prefix(address, self.settings.ipv6_prefix()),
        }
    }
}
