//! Way of a guest's frame: checks of its sender, then its receiver.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

use smoltcp::wire::{ArpOperation, ArpPacket, ArpRepr, EthernetAddress};

use super::header::{ARP, Content, ETHERNET_BYTES, Ethernet, IPV4, IPV6, Ip, is_group};
use super::neighbors::kind;
use super::settings::{LINK_LOCAL, has_prefix};
use super::{CardId, Delivery, DropReason, Network, Output, Target, compose, dhcp, dns, neighbors};
use crate::offload::{self, Header, Offload};

/// Types of ICMP that only routers send: redirect and router advertisement.
const ICMP_OF_ROUTERS: [u8; 2] = [5, 9];
const ICMP_ECHO_REQUEST: u8 = 8;
/// Ports of DHCPv6: the server's and the client's.
const DHCPV6_PORTS: (u16, u16) = (547, 546);
/// Bytes that a copy of a broadcast costs at least.
const FLOOD_BYTES_MIN: usize = 512;
/// Bytes of the largest frame before it is cut into segments: an IP packet of 64 KiB.
const UNCUT_FRAME_BYTES_MAX: usize = ETHERNET_BYTES + 65_535;

/// An IP packet of a guest, in its frame.
#[derive(Clone, Copy)]
struct Received<'a> {
    /// Card of the guest.
    id: CardId,
    frame: &'a [u8],
    ethernet: &'a Ethernet<'a>,
    ip: &'a Ip<'a>,
    /// Work that the guest has left to the receiver.
    offload: Option<Offload>,
    now: Instant,
}

impl Network {
    /// Passes a guest's frame on, or returns the reason to drop it.
    pub(super) fn pass(
        &mut self,
        id: CardId,
        header: &Header,
        frame: &[u8],
        now: Instant,
        output: &mut dyn Output,
    ) -> Result<(), DropReason> {
        let Some(member) = self.members.get_mut(id) else {
            return Ok(());
        };
        if !member.from_guest.admits(frame.len(), now) {
            return Err(DropReason::RateLimit);
        }
        let frame_bytes_max = if offload::is_segmented(header) {
            UNCUT_FRAME_BYTES_MAX
        } else {
            self.frame_bytes_max()
        };
        if frame.len() > frame_bytes_max {
            return Err(DropReason::Oversized);
        }
        let ethernet = Ethernet::parse(frame).ok_or(DropReason::Malformed)?;
        if Some(ethernet.source) != self.members.get(id).map(|member| member.card.mac) {
            return Err(DropReason::SourceMac);
        }
        let ip = match ethernet.kind {
            ARP if !offload::is_whole(header) => return Err(DropReason::Malformed),
            ARP => return self.arp(id, &ethernet, output),
            IPV4 => Ip::ipv4(ethernet.payload),
            IPV6 => Ip::ipv6(ethernet.payload),
            _ => return Err(DropReason::Protocol),
        };
        let ip = ip.ok_or(DropReason::Malformed)?;
        let offload = Offload::of_packet(header, &ip).map_err(|_| DropReason::Malformed)?;
        let whole_bytes = offload.map_or(frame.len(), |work| work.largest_frame_bytes());
        if whole_bytes > self.frame_bytes_max() {
            return Err(DropReason::Oversized);
        }
        let received = Received {
            id,
            // Padding has no part in the work.
            frame: &frame[..offload.map_or(frame.len(), |work| work.frame_bytes())],
            ethernet: &ethernet,
            ip: &ip,
            offload,
            now,
        };
        if ethernet.kind == IPV4 {
            self.ipv4(received, output)
        } else {
            self.ipv6(received, output)
        }
    }

    /// Answers an ARP request for any card.
    fn arp(
        &mut self,
        id: CardId,
        ethernet: &Ethernet<'_>,
        output: &mut dyn Output,
    ) -> Result<(), DropReason> {
        let packet = ArpPacket::new_checked(ethernet.payload).map_err(|_| DropReason::Malformed)?;
        let ArpRepr::EthernetIpv4 {
            operation,
            source_hardware_addr,
            source_protocol_addr: asker,
            target_protocol_addr: target,
            ..
        } = ArpRepr::parse(&packet).map_err(|_| DropReason::Malformed)?
        else {
            return Err(DropReason::Malformed);
        };
        let Some(own) = self.members.get(id).map(|member| member.addresses.ipv4) else {
            return Ok(());
        };
        if source_hardware_addr != EthernetAddress(ethernet.source) {
            return Err(DropReason::SourceMac);
        }
        // A sender without an address checks whether another card has the target.
        if asker != own && !asker.is_unspecified() {
            return Err(DropReason::SourceAddress);
        }
        if operation != ArpOperation::Request {
            // The switch knows all addresses.
            return Ok(());
        }
        let owner = if target == self.gateway.addresses.ipv4 {
            Some(self.gateway.mac)
        } else {
            self.neighbor(id, target.into())
        };
        if let Some(owner) = owner {
            self.compose_and_reply(id, output, |frame| {
                compose::arp_reply(frame, (owner, target), (ethernet.source, asker));
                true
            });
        }
        Ok(())
    }

    fn ipv4(&mut self, received: Received<'_>, output: &mut dyn Output) -> Result<(), DropReason> {
        let Received { id, ip, .. } = received;
        let Some(own) = self.members.get(id).map(|member| member.addresses.ipv4) else {
            return Ok(());
        };
        if let Content::Udp {
            source: dhcp::CLIENT_PORT,
            destination: dhcp::SERVER_PORT,
            data,
        } = ip.content
        {
            if ip.source != own && !ip.source.is_unspecified() {
                return Err(DropReason::SourceAddress);
            }
            self.serve_dhcp(id, data, output);
            return Ok(());
        }
        if ip.source != own {
            return Err(DropReason::SourceAddress);
        }
        match ip.content {
            Content::Udp {
                source: dhcp::SERVER_PORT,
                ..
            } => return Err(DropReason::RogueServer),
            Content::Icmp { kind, .. } if ICMP_OF_ROUTERS.contains(&kind) => {
                return Err(DropReason::RogueServer);
            }
            // Groups need no membership: their frames go to all cards.
            Content::Igmp => return Ok(()),
            _ => {}
        }
        self.route(received, output)
    }

    fn ipv6(&mut self, received: Received<'_>, output: &mut dyn Output) -> Result<(), DropReason> {
        let Received { id, ip, .. } = received;
        let IpAddr::V6(source) = ip.source else {
            return Err(DropReason::Malformed);
        };
        let has_address = !source.is_unspecified();
        if has_address && !self.members.may_use(id, source) {
            return Err(DropReason::SourceAddress);
        }
        match ip.content {
            Content::Udp {
                source, destination, ..
            } if (source, destination) == DHCPV6_PORTS => {
                return Err(DropReason::RogueServer);
            }
            Content::Icmp {
                kind,
                message,
                is_fragment,
            } => match kind {
                kind::ROUTER_SOLICITATION..=kind::REDIRECT if is_fragment => {
                    return Err(DropReason::Malformed);
                }
                kind::ROUTER_ADVERTISEMENT | kind::REDIRECT => return Err(DropReason::RogueServer),
                kind::ROUTER_SOLICITATION => {
                    self.advertise(id, has_address.then_some(source), output);
                    return Ok(());
                }
                kind::NEIGHBOR_SOLICITATION => {
                    return self.neighbor_solicitation(id, ip, message, output);
                }
                kind::NEIGHBOR_ADVERTISEMENT => {
                    let target = neighbors::target(message).ok_or(DropReason::Malformed)?;
                    // The switch knows all addresses.
                    return if has_address {
                        self.claim(id, target)
                    } else {
                        Err(DropReason::SourceAddress)
                    };
                }
                kind if kind::MEMBERSHIP.contains(&kind) => return Ok(()),
                _ => {}
            },
            _ => {}
        }
        if !has_address {
            return Err(DropReason::SourceAddress);
        }
        self.route(received, output)
    }

    /// Answers a neighbor solicitation for any card. One without a source claims its target.
    fn neighbor_solicitation(
        &mut self,
        id: CardId,
        ip: &Ip<'_>,
        message: &[u8],
        output: &mut dyn Output,
    ) -> Result<(), DropReason> {
        let target = neighbors::target(message).ok_or(DropReason::Malformed)?;
        let (IpAddr::V6(source), compose::HOPS_ON_LINK) = (ip.source, ip.hops) else {
            return Err(DropReason::Malformed);
        };
        let gateway = self.gateway;
        let is_router = target == gateway.link_local || target == gateway.addresses.ipv6;
        let is_claim = source.is_unspecified();
        if is_claim && !is_router && !self.is_taken(id, target) {
            return self.claim(id, target);
        }
        let owner = if is_router {
            Some(gateway.mac)
        } else {
            // A claim of another card's address fails even where cards don't reach one another.
            let neighbor = self.neighbor(id, target.into());
            neighbor.or(is_claim.then_some(gateway.mac))
        };
        if let Some(owner) = owner {
            let advertisement = neighbors::neighbor_advertisement(target, owner, is_router, !is_claim);
            let to = if is_claim { neighbors::ALL_NODES } else { source };
            self.reply_icmpv6(id, (owner, target), to, &advertisement, output);
        }
        Ok(())
    }

    /// Records that a guest uses an address.
    fn claim(&mut self, id: CardId, address: Ipv6Addr) -> Result<(), DropReason> {
        if self.members.may_use(id, address) {
            Ok(())
        } else {
            Err(DropReason::SourceAddress)
        }
    }

    /// Returns whether another card has the address.
    fn is_taken(&self, id: CardId, address: Ipv6Addr) -> bool {
        self.members
            .by_address(address.into())
            .is_some_and(|(owner, _)| owner != id)
    }

    /// Returns the hardware address of the other card that has this address, if the card may reach it.
    fn neighbor(&self, id: CardId, address: IpAddr) -> Option<[u8; 6]> {
        let (owner, member) = self.members.by_address(address)?;
        (owner != id && self.settings.peers).then_some(member.card.mac)
    }

    /// Passes a checked packet on, by the hardware address of its receiver.
    fn route(&mut self, received: Received<'_>, output: &mut dyn Output) -> Result<(), DropReason> {
        let Received { id, .. } = received;
        let receiver = received.ethernet.destination;
        if receiver == self.gateway.mac {
            return self.pass_to_gateway(received, output);
        }
        if !self.settings.peers {
            return Err(DropReason::PeersBarred);
        }
        if is_group(receiver) {
            return self.flood(received, output);
        }
        match self.members.by_mac(receiver) {
            Some(to) if to != id => {
                self.deliver(to, received.frame, received.offload, received.now, output);
                Ok(())
            }
            _ => Err(DropReason::NoSuchCard),
        }
    }

    fn flood(&mut self, received: Received<'_>, output: &mut dyn Output) -> Result<(), DropReason> {
        let Received {
            id,
            frame,
            offload,
            now,
            ..
        } = received;
        let receivers = self.members.count().saturating_sub(1);
        let Some(member) = self.members.get_mut(id) else {
            return Ok(());
        };
        // Bounded: a frame has 64 KiB, and a network about a thousand cards.
        let cost = (frame.len().max(FLOOD_BYTES_MIN) * receivers) as u64;
        if !member.flood.has(cost, now) {
            return Err(DropReason::FloodLimit);
        }
        member.flood.take(cost);
        let mut next = self.members.next_after(None);
        while let Some(to) = next {
            if to != id {
                self.deliver(to, frame, offload, now, output);
            }
            next = self.members.next_after(Some(to));
        }
        Ok(())
    }

    /// Sends a frame to a card within its limit, with the work that is left to its receiver.
    pub(super) fn deliver(
        &mut self,
        to: CardId,
        frame: &[u8],
        offload: Option<Offload>,
        now: Instant,
        output: &mut dyn Output,
    ) {
        let Some(member) = self.members.get_mut(to) else {
            return;
        };
        if !member.to_guest.admits(frame.len(), now) {
            member.counts.to_guest.add(frame.len());
            member.counts.to_guest.drop(DropReason::RateLimit);
            return;
        }
        self.send_to_card(to, frame, offload, output);
    }

    /// Handles a packet to the gateway's hardware address.
    fn pass_to_gateway(&mut self, received: Received<'_>, output: &mut dyn Output) -> Result<(), DropReason> {
        let Received { id, ip, .. } = received;
        let gateway = self.gateway;
        let to = ip.destination;
        let is_gateways = gateway.addresses.contains(to);
        if is_gateways || to == gateway.link_local {
            return match ip.content {
                Content::Udp {
                    source,
                    destination: dns::PORT,
                    data,
                } => self.serve_dns(id, (ip.source, source), to, data, output),
                Content::Icmp {
                    kind: ICMP_ECHO_REQUEST | kind::ECHO_REQUEST,
                    message,
                    is_fragment: false,
                } => self.serve_echo(id, ip, message, output),
                // Forwarded ports, and the host's own where the card may reach them: the translator decides.
                Content::Udp { .. } | Content::Tcp if is_gateways => self.pass_outside(received, output),
                _ => Err(DropReason::NoSuchService),
            };
        }
        if !self.is_routable(to) {
            return Err(DropReason::Unroutable);
        }
        if !self.reaches_outside(id) {
            return Err(DropReason::Isolated);
        }
        self.pass_outside(received, output)
    }

    pub(super) fn reaches_outside(&self, id: CardId) -> bool {
        let member = self.members.get(id);
        member.is_some_and(|member| member.reaches_outside(&self.settings))
    }

    fn pass_outside(&mut self, received: Received<'_>, output: &mut dyn Output) -> Result<(), DropReason> {
        let Received { id, ip, offload, .. } = received;
        let mut delivery = Delivery::Taken;
        let mut send = |packet: &[u8]| delivery = output.send(Target::Outside(id), packet);
        match offload {
            // The translator checks the sum of a datagram, and takes TCP without one.
            Some(offload) if matches!(ip.content, Content::Udp { .. }) => {
                let mut buffer = std::mem::take(&mut self.buffer);
                offload.finish(received.frame, &mut buffer, |whole| {
                    send(&whole[ETHERNET_BYTES..])
                });
                self.buffer = buffer;
            }
            _ => send(ip.packet),
        }
        match delivery {
            Delivery::Taken => Ok(()),
            Delivery::Full => Err(DropReason::Full),
        }
    }

    fn is_routable(&self, address: IpAddr) -> bool {
        let is_local = match address {
            IpAddr::V4(address) => {
                self.settings.ipv4.contains(address) || address.is_broadcast() || address.is_link_local()
            }
            IpAddr::V6(address) => has_prefix(address, self.prefix) || has_prefix(address, LINK_LOCAL),
        };
        !is_local && !address.is_multicast() && !address.is_loopback() && !address.is_unspecified()
    }

    pub(super) fn frame_bytes_max(&self) -> usize {
        ETHERNET_BYTES + usize::from(self.settings.mtu)
    }
}
