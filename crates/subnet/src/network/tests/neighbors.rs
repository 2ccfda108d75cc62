//! ARP and neighbor discovery: the switch answers for all cards.

use std::net::Ipv6Addr;

use smoltcp::wire::{ArpOperation, ArpPacket, ArpRepr, EthernetAddress, Icmpv6Packet, NdiscRepr};

use super::*;
use crate::network::header::{ARP, ETHERNET_BYTES, Ethernet};
use crate::network::neighbors::ALL_NODES;

fn arp(from: Guest, asker: IpAddr, target: IpAddr, operation: ArpOperation) -> Vec<u8> {
    let (IpAddr::V4(asker), IpAddr::V4(target)) = (asker, target) else {
        panic!("{asker} and {target} are no addresses of ARP");
    };
    let mut frame = Vec::new();
    compose::ethernet(&mut frame, from.mac, [0xff; 6], ARP);
    let message = ArpRepr::EthernetIpv4 {
        operation,
        source_hardware_addr: EthernetAddress(from.mac),
        source_protocol_addr: asker,
        target_hardware_addr: EthernetAddress([0; 6]),
        target_protocol_addr: target,
    };
    frame.resize(ETHERNET_BYTES + 28, 0);
    message.emit(&mut ArpPacket::new_unchecked(&mut frame[ETHERNET_BYTES..]));
    frame
}

/// Returns the hardware address in the one reply, which goes to the asker.
fn arp_owner(sent: &[(Target, Vec<u8>)], asker: Guest) -> Option<[u8; 6]> {
    let (target, frame) = sent.first()?;
    assert_eq!((sent.len(), *target), (1, Target::Card(asker.id)));
    let packet = ArpPacket::new_checked(&frame[ETHERNET_BYTES..]).unwrap();
    assert_eq!(packet.operation(), ArpOperation::Reply);
    let owner = packet.source_hardware_addr().try_into().unwrap();
    let ethernet = Ethernet::parse(frame).unwrap();
    assert_eq!((ethernet.source, ethernet.destination), (owner, asker.mac));
    Some(owner)
}

#[test]
fn arp_is_answered_for_the_gateway_and_for_cards() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let gateway = world.gateway();
    for (target, owner) in [
        (gateway.ipv4, Some(gateway.mac)),
        (b.ipv4, Some(b.mac)),
        (a.ipv4, None),
        (address("10.213.0.0"), None),
        (address("8.8.8.8"), None),
    ] {
        for asker in [a.ipv4, address("0.0.0.0")] {
            let sent = world.receive(a, &arp(a, asker, target, ArpOperation::Request));
            assert_eq!(arp_owner(&sent, a), owner, "{target}");
        }
    }
    assert_eq!(world.network.counts(a.id).unwrap().from_guest.dropped_in_all(), 0);
}

#[test]
fn forged_arp_is_dropped_and_replies_go_nowhere() {
    let (mut world, [a, b, c]) = World::of_three(|_| {});
    let stolen = arp(a, b.ipv4, c.ipv4, ArpOperation::Request);
    world.assert_dropped(a, &stolen, DropReason::SourceAddress);
    let mut forged = arp(a, a.ipv4, c.ipv4, ArpOperation::Request);
    forged[ETHERNET_BYTES + 8..ETHERNET_BYTES + 14].copy_from_slice(&b.mac);
    world.assert_dropped(a, &forged, DropReason::SourceMac);
    world.assert_dropped(a, &forged[..ETHERNET_BYTES + 20], DropReason::Malformed);
    let reply = arp(a, a.ipv4, c.ipv4, ArpOperation::Reply);
    assert_eq!(world.receive(a, &reply), []);
    let poison = arp(a, world.gateway().ipv4, c.ipv4, ArpOperation::Reply);
    world.assert_dropped(a, &poison, DropReason::SourceAddress);
}

#[test]
fn cards_of_a_barred_network_find_the_gateway_only() {
    let (mut world, [a, b, _]) = World::of_three(|settings| settings.peers = false);
    let gateway = world.gateway();
    let sent = world.receive(a, &arp(a, a.ipv4, b.ipv4, ArpOperation::Request));
    assert_eq!(arp_owner(&sent, a), None);
    let sent = world.receive(a, &arp(a, a.ipv4, gateway.ipv4, ArpOperation::Request));
    assert_eq!(arp_owner(&sent, a), Some(gateway.mac));
    assert_eq!(solicit(&mut world, a, a.link_local, b.link_local), None);
}

/// Solicits a target; returns the hardware address of the answer, and its destination.
fn solicit(world: &mut World, guest: Guest, from: IpAddr, target: IpAddr) -> Option<([u8; 6], IpAddr)> {
    let sent = world.receive(guest, &solicitation(guest, from, target));
    let (to, frame) = sent.first()?;
    assert_eq!((sent.len(), *to), (1, Target::Card(guest.id)));
    let ip = header::Ip::ipv6(&frame[ETHERNET_BYTES..]).unwrap();
    let header::Content::Icmp { message, .. } = ip.content else {
        panic!("{ip:?} is no neighbor advertisement");
    };
    let packet = Icmpv6Packet::new_checked(message).unwrap();
    let (IpAddr::V6(source), IpAddr::V6(destination)) = (ip.source, ip.destination) else {
        panic!("{ip:?} is not of version 6");
    };
    assert!(packet.verify_checksum(&source, &destination));
    let NdiscRepr::NeighborAdvert {
        target_addr, lladdr, ..
    } = NdiscRepr::parse(&packet).unwrap()
    else {
        panic!("{ip:?} is no neighbor advertisement");
    };
    assert_eq!((IpAddr::from(target_addr), ip.hops), (target, 255));
    let owner = lladdr.unwrap().as_bytes().try_into().unwrap();
    Some((owner, ip.destination))
}

fn solicitation(guest: Guest, from: IpAddr, target: IpAddr) -> Vec<u8> {
    let IpAddr::V6(target) = target else {
        panic!("{target} is not of version 6");
    };
    let message = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat();
    let to = Route {
        from_mac: guest.mac,
        to_mac: [0x33, 0x33, 0xff, 0, 0, 1],
        from,
        to: address("ff02::1:ff00:1"),
    };
    icmp(to, &message)
}

#[test]
fn neighbor_solicitations_are_answered_for_the_gateway_and_for_cards() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let gateway = world.gateway();
    for (target, owner) in [
        (gateway.ipv6, gateway.mac),
        (gateway.link_local, gateway.mac),
        (b.ipv6, b.mac),
        (b.link_local, b.mac),
    ] {
        assert_eq!(
            solicit(&mut world, a, a.link_local, target),
            Some((owner, a.link_local)),
            "{target}"
        );
    }
    for target in [a.ipv6, address("fe80::77"), address("2001:db8::1")] {
        assert_eq!(solicit(&mut world, a, a.ipv6, target), None, "{target}");
    }
}

#[test]
fn claim_of_a_taken_address_is_answered_and_of_a_free_one_is_learnt() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let (none, all) = (address("::"), IpAddr::from(ALL_NODES));
    let gateway = world.gateway();
    assert_eq!(solicit(&mut world, a, none, b.ipv6), Some((b.mac, all)));
    assert_eq!(
        solicit(&mut world, a, none, gateway.ipv6),
        Some((gateway.mac, all))
    );
    assert_eq!(solicit(&mut world, a, none, a.ipv6), None);
    let private = address("fe80::1234:5678:9abc:def0");
    assert_eq!(solicit(&mut world, a, none, private), None);
    assert_eq!(solicit(&mut world, b, none, private), Some((a.mac, all)));
    assert_eq!(
        solicit(&mut world, b, b.link_local, private),
        Some((a.mac, b.link_local))
    );
    let other = solicitation(a, none, address("2001:db8::7"));
    world.assert_dropped(a, &other, DropReason::SourceAddress);
    let mut far = solicitation(a, a.link_local, b.link_local);
    // A router passed it on.
    far[ETHERNET_BYTES + 7] = 254;
    world.assert_dropped(a, &far, DropReason::Malformed);
}

#[test]
fn address_made_from_a_cards_hardware_address_is_only_ever_its_own() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    // Before `d` comes, `a` takes its address.
    let future = address("fe80::5054:ff:fe00:4");
    assert_eq!(solicit(&mut world, a, address("::"), future), None);
    let d = world.attach(card("d", 4));
    assert_eq!(d.link_local, future);
    assert_eq!(
        solicit(&mut world, a, a.link_local, future),
        Some((d.mac, a.link_local))
    );
    let to = Route {
        from: future,
        to: a.link_local,
        ..route(a, d)
    };
    world.assert_dropped(a, &udp(to, (1, 2), b""), DropReason::SourceAddress);
    // It stays there when the other leaves.
    world.network.detach(a.id).unwrap();
    assert_eq!(
        solicit(&mut world, b, b.link_local, future),
        Some((d.mac, b.link_local))
    );
}

#[test]
fn guest_keeps_the_addresses_that_it_used_last() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let IpAddr::V6(own) = a.ipv6 else {
        panic!("{} is not of version 6", a.ipv6);
    };
    let private =
        |number: u128| IpAddr::from(Ipv6Addr::from((u128::from(own) >> 64 << 64) + 0x1000 + number));
    let use_address = |world: &mut World, number| {
        let to = Route {
            from: private(number),
            ..route_v6(a, b)
        };
        assert_eq!(world.receive(a, &udp(to, (1, 2), b"")).len(), 1);
    };
    for number in 0..100 {
        use_address(&mut world, number);
        // The first is in use all the time, so it stays.
        assert_eq!(
            solicit(&mut world, b, b.ipv6, private(0)),
            Some((a.mac, b.ipv6)),
            "{number}"
        );
        use_address(&mut world, 0);
    }
    let owners = (0..100).filter(|number| solicit(&mut world, b, b.ipv6, private(*number)).is_some());
    assert_eq!(owners.collect::<Vec<_>>(), [0, 93, 94, 95, 96, 97, 98, 99]);
    // Nothing is left of a card that leaves.
    world.network.detach(a.id).unwrap();
    assert_eq!(solicit(&mut world, b, b.ipv6, private(0)), None);
    assert_eq!(solicit(&mut world, b, b.ipv6, a.ipv6), None);
}

#[test]
fn neighbor_advertisements_of_guests_go_nowhere() {
    let (mut world, [a, b, _]) = World::of_three(|_| {});
    let advertisement = |target: IpAddr| {
        let IpAddr::V6(target) = target else {
            panic!("{target} is not of version 6");
        };
        let message = [&[136, 0, 0, 0, 0x20, 0, 0, 0][..], &target.octets()].concat();
        icmp(route_v6(a, b), &message)
    };
    assert_eq!(world.receive(a, &advertisement(a.ipv6)), []);
    for target in [b.ipv6, world.gateway().link_local] {
        world.assert_dropped(a, &advertisement(target), DropReason::SourceAddress);
    }
}
