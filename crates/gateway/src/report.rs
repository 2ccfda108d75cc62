//! Networks, cards and counters, for commands and metrics.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use registry::subnet::{CardReport, NetworkReport, ProcessReport, Response};
use subnet::nat;
use subnet::network::{Addresses, Card, CardId, DropReason, Network, Traffic, dns};

use crate::card::CardSocket;
use crate::client::{Client, Role};
use crate::joining::{Member, Networks};
use crate::path::Paths;

/// Returns the list of all networks.
pub(crate) fn networks(networks: &Networks, paths: &Paths, clients: &HashMap<u64, Client>) -> Response {
    let mut reports: Vec<_> = networks
        .networks
        .values()
        .map(|network| of_network(network, networks, paths))
        .collect();
    reports.sort_by(|a, b| a.name.cmp(&b.name));
    let captures = clients.values().filter_map(|client| match client.role {
        Role::Capturing { lost, .. } => Some(lost),
        _ => None,
    });
    Response::Networks {
        networks: reports,
        process: ProcessReport {
            pid: std::process::id(),
            outside: BTreeMap::from([("stack_failures".to_owned(), paths.nat.failures())]),
            captures: captures.collect(),
        },
    }
}

fn of_network(network: &Network, networks: &Networks, paths: &Paths) -> NetworkReport {
    let settings = network.settings();
    let gateway = network.gateway().addresses;
    let cards = network.cards().filter_map(|(id, card, addresses)| {
        let member = networks.members.get(&id)?;
        Some(of_card(id, (card, addresses, member), network, paths))
    });
    let mut cards: Vec<_> = cards.collect();
    cards.sort_by(|a, b| (&a.vm, a.card).cmp(&(&b.vm, b.card)));
    NetworkReport {
        name: settings.name.clone(),
        ranges: vec![
            settings.ipv4.to_string(),
            format!("{}/64", settings.ipv6_prefix()),
        ],
        gateway: vec![gateway.ipv4.into(), gateway.ipv6.into()],
        isolated: !settings.outside,
        peers: settings.peers,
        cards,
    }
}

fn of_card(
    id: CardId,
    (card, addresses, member): (&Card, Addresses, &Member),
    network: &Network,
    paths: &Paths,
) -> CardReport {
    let (mut counters, mut dropped) = (BTreeMap::new(), BTreeMap::new());
    let counts = network.counts(id).unwrap_or_default();
    for (direction, traffic) in [("from_guest", counts.from_guest), ("to_guest", counts.to_guest)] {
        add_traffic(direction, &traffic, &mut counters, &mut dropped);
    }
    if let Some(counts) = paths.nat.counts(id) {
        add_outside(&counts, &mut counters, &mut dropped);
    }
    CardReport {
        vm: member.vm.clone(),
        card: member.number,
        names: vec![card.name.clone(), format!("{}.{}", card.name, dns::DOMAIN)],
        mac: subnet::write_mac(card.mac),
        addresses: vec![IpAddr::from(addresses.ipv4), addresses.ipv6.into()],
        forward: member.forward.clone(),
        host: member.host,
        offloads: paths.sockets.get(&id).is_some_and(CardSocket::has_headers),
        outside: card.outside && network.settings().outside,
        counters,
        dropped,
    }
}

fn add_traffic(
    direction: &str,
    traffic: &Traffic,
    counters: &mut BTreeMap<String, u64>,
    dropped: &mut BTreeMap<String, u64>,
) {
    counters.insert(format!("{direction}_frames"), traffic.frames);
    counters.insert(format!("{direction}_bytes"), traffic.bytes);
    for reason in DropReason::ALL {
        let count = traffic.dropped(reason);
        if count > 0 {
            dropped.insert(format!("{direction}_{}", reason.name()), count);
        }
    }
}

fn add_outside(
    counts: &nat::Counts,
    counters: &mut BTreeMap<String, u64>,
    dropped: &mut BTreeMap<String, u64>,
) {
    for (name, count) in [
        ("connections", counts.connections),
        ("exchanges", counts.exchanges),
        ("opened", counts.opened),
    ] {
        counters.insert(format!("outside_{name}"), count);
    }
    for (name, count) in [
        ("barred", counts.barred),
        ("malformed", counts.malformed),
        ("limited", counts.limited),
        ("full", counts.full),
        ("unsent_echoes", counts.unsent_echoes),
        ("unreachable", counts.unreachable),
    ] {
        if count > 0 {
            dropped.insert(format!("outside_{name}"), count);
        }
    }
}
