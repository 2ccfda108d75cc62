//! Identity of a clone: its guest's name, addresses, random numbers and time, other than its parent's.

use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent::protocol::{CardAddress, Identity, Ipv4Settings};
use config::VmSpec;
use config::vm::{NetKind, NetSpec};
use miette::{IntoDiagnostic, Result};
use operations::networks;
use registry::runtime;
use registry::subnet::NetworkReport;
use subnet::network::Ipv4Range;

use crate::guest;

/// Bytes of randomness for each clone.
const SEED_BYTES: usize = 64;
/// Time limit for a clone's agent to reply.
const AGENT_LIMIT: Duration = Duration::from_secs(30);

/// A clone that runs.
pub struct Clone<'a> {
    /// Name of the VM.
    pub name: &'a str,
    /// Spec that it was started with.
    pub spec: &'a VmSpec,
    /// Directory of the VM in the runtime directory.
    pub folder: &'a Path,
}

/// Gives every clone an identity of its own. A clone without an agent keeps its parent's, and a message
/// reports that.
pub fn identify(parent: (&str, &VmSpec), clones: &[Clone<'_>]) {
    let networks = networks_of(clones);
    std::thread::scope(|scope| {
        for clone in clones {
            let networks = &networks;
            scope.spawn(move || {
                let done = identity_on(networks, parent, clone).and_then(|identity| {
                    let agent = guest::connect(clone.name, clone.folder, AGENT_LIMIT)?;
                    let identified = agent::client::identify(agent, &identity);
                    identified.map_err(|error| guest::explain(clone.name, error))
                });
                if let Err(error) = done {
                    eprintln!(
                        "mirrorball: {error}: its host name, hardware addresses, random numbers and time \
                         are its parent's"
                    );
                    warn_of_silent_cards(parent, std::slice::from_ref(clone));
                }
            });
        }
    });
}

/// Reports cards of a subnet whose guest has kept another hardware address than the card's: the subnet passes
/// none of its frames.
pub fn warn_of_silent_cards(parent: (&str, &VmSpec), clones: &[Clone<'_>]) {
    let addresses =
        |name: &str, spec: &VmSpec| cell::open::hardware_addresses(spec, name).unwrap_or_default();
    let kept = addresses(parent.0, parent.1);
    for clone in clones {
        let own = addresses(clone.name, clone.spec);
        for number in silent_cards(clone.spec, &kept, &own) {
            eprintln!(
                "mirrorball: {}: card net{number} passes no frames until the guest has booted again: the \
                 guest has kept the hardware address of {}'s",
                clone.name, parent.0
            );
        }
    }
}

/// Returns the numbers of the cards of a subnet that have another hardware address than the guest has kept.
fn silent_cards(spec: &VmSpec, kept: &[[u8; 6]], own: &[[u8; 6]]) -> Vec<usize> {
    let cards = spec.nets.iter().flatten().enumerate();
    let is_silent = |number: &usize| kept.get(*number) != own.get(*number);
    cards
        .filter(|(_, card)| card.kind == NetKind::Subnet)
        .map(|(number, _)| number)
        .filter(is_silent)
        .collect()
}

/// Returns the parent's cards for a VM that keeps its parent's identity: those of a subnet have the hardware
/// addresses that the guest has, and on a network of this VM alone the IP addresses, too.
pub fn kept_cards(parent: (&str, &VmSpec)) -> Result<Option<Vec<NetSpec>>> {
    let addresses = cell::open::hardware_addresses(parent.1, parent.0).into_diagnostic()?;
    let mut cards = parent.1.nets.clone();
    let on_subnet = |card: &NetSpec| card.kind == NetKind::Subnet;
    let first = cards.iter().flatten().position(on_subnet);
    for (number, card) in cards.iter_mut().flatten().enumerate() {
        let Some(mac) = addresses.get(number).filter(|_| on_subnet(card)) else {
            continue;
        };
        card.mac = Some(subnet::write_mac(*mac));
        // Elsewhere the parent may have the address, or the network another range.
        if card.network.is_none() && parent.1.share_group.is_none() {
            let name = match first == Some(number) {
                true => parent.0.to_ascii_lowercase(),
                false => format!("{}-{number}", parent.0.to_ascii_lowercase()),
            };
            card.address
                .get_or_insert_with(|| Ipv4Range::default().preferred(&name));
        }
    }
    Ok(cards)
}

/// Gives a clone that keeps its parent's identity its parent's addresses on a network of its own, where the
/// parent's network is that of a command, or of the parent alone: two cards with one hardware address can't
/// be on the same one.
pub fn keep_addresses_on_own_network(parent: (&str, &VmSpec), spec: &mut VmSpec) -> Result<()> {
    let mut alone = parent.1.clone();
    for card in alone.nets.iter_mut().flatten() {
        card.network
            .take_if(|network| config::is_command_network(network));
    }
    let kept = kept_cards((parent.0, &alone))?.unwrap_or_default();
    for (card, mut kept) in spec.nets.iter_mut().flatten().zip(kept) {
        let is_alone = match card.network.as_deref() {
            Some(network) => config::is_command_network(network),
            None => parent.1.share_group.is_none(),
        };
        if card.kind == NetKind::Subnet && is_alone {
            kept.forward.clear();
            *card = kept;
        }
    }
    Ok(())
}

fn is_on_subnet(spec: &VmSpec) -> bool {
    let mut cards = spec.nets.iter().flatten();
    cards.any(|card| card.kind == NetKind::Subnet)
}

/// Makes the identity of a VM that resumes from the state of `parent`.
pub fn identity(parent: (&str, &VmSpec), clone: &Clone<'_>) -> Result<Identity> {
    identity_on(&networks_of(std::slice::from_ref(clone)), parent, clone)
}

/// Returns the networks of the subnet, if a clone is on one. Those of a gateway that does not answer are
/// unknown, and a message reports that.
fn networks_of(clones: &[Clone<'_>]) -> Vec<NetworkReport> {
    if !clones.iter().any(|clone| is_on_subnet(clone.spec)) {
        return Vec::new();
    }
    runtime::directory()
        .and_then(|runtime| networks::list(&runtime))
        .map(|listed| listed.networks)
        .map_err(|error| eprintln!("mirrorball: the subnet's gateway does not answer: {error}"))
        .unwrap_or_default()
}

fn identity_on(networks: &[NetworkReport], parent: (&str, &VmSpec), clone: &Clone<'_>) -> Result<Identity> {
    let seed = random(SEED_BYTES)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (from, to) = (
        cell::open::hardware_addresses(parent.1, parent.0).into_diagnostic()?,
        cell::open::hardware_addresses(clone.spec, clone.name).into_diagnostic()?,
    );
    let cards = from.into_iter().zip(to).enumerate();
    Ok(Identity {
        hostname: clone.name.to_owned(),
        cards: cards
            .map(|(number, (from, to))| CardAddress {
                from,
                to,
                ipv4: ipv4(networks, clone.name, number),
            })
            .collect(),
        seed,
        unix_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
    })
}

/// Returns random bytes of the host.
pub fn random(count: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut bytes))
        .into_diagnostic()?;
    Ok(bytes)
}

/// Returns the IPv4 settings of a VM's card; none if it is not on a subnet.
fn ipv4(networks: &[NetworkReport], vm: &str, number: usize) -> Option<Ipv4Settings> {
    networks.iter().find_map(|network| {
        let mut cards = network.cards.iter();
        let card = cards.find(|card| card.vm == vm && card.card == number)?;
        let first = |addresses: &[IpAddr]| {
            addresses.iter().find_map(|address| match address {
                IpAddr::V4(address) => Some(*address),
                IpAddr::V6(_) => None,
            })
        };
        let (_, bits) = network.ranges.first()?.split_once('/')?;
        Some(Ipv4Settings {
            address: first(&card.addresses)?,
            prefix_bits: bits.parse().ok().filter(|bits| *bits <= 32)?,
            gateway: first(&network.gateway)?,
        })
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use registry::subnet::CardReport;
    use serde_json::json;

    use super::*;

    fn network(name: &str, cards: &[(&str, usize, [u8; 4])]) -> NetworkReport {
        let card = |(vm, card, address): &(&str, usize, [u8; 4])| -> CardReport {
            serde_json::from_value(json!({
                "vm": vm, "card": card, "mac": "", "addresses": ["fd00::1", Ipv4Addr::from(*address)],
                "forward": [], "host": false, "counters": {}, "dropped": {}
            }))
            .unwrap()
        };
        NetworkReport {
            name: name.to_owned(),
            ranges: vec!["10.20.0.0/24".to_owned(), "fd00::/64".to_owned()],
            gateway: vec![[10, 20, 0, 1].into()],
            isolated: false,
            peers: true,
            cards: cards.iter().map(card).collect(),
        }
    }

    #[test]
    fn ipv4_settings_are_those_of_the_vms_card_on_its_network() {
        let networks = [
            network("a", &[("web", 0, [10, 20, 0, 5]), ("web-1", 0, [10, 20, 0, 6])]),
            network("b", &[("web-1", 1, [10, 20, 0, 7])]),
        ];
        let of = |vm, number| ipv4(&networks, vm, number);
        let expected = |last| Ipv4Settings {
            address: [10, 20, 0, last].into(),
            prefix_bits: 24,
            gateway: [10, 20, 0, 1].into(),
        };
        assert_eq!(of("web-1", 0), Some(expected(6)));
        assert_eq!(of("web-1", 1), Some(expected(7)));
        assert_eq!(of("web-1", 2), None);
        let mut wrong = networks[1].clone();
        wrong.ranges = vec!["10.20.0.0/240".to_owned()];
        assert_eq!(ipv4(&[wrong], "web-1", 1), None);
    }

    fn spec(kinds: &[&str]) -> VmSpec {
        let cards: Vec<_> = kinds.iter().map(|kind| json!({ "kind": kind })).collect();
        serde_json::from_value(json!({ "image": "tiny", "nets": cards })).unwrap()
    }

    #[test]
    fn cards_of_a_subnet_are_silent_under_another_hardware_address() {
        let spec = spec(&["user", "subnet", "subnet"]);
        let (kept, own) = ([[2; 6], [4; 6], [6; 6]], [[8; 6], [4; 6], [8; 6]]);
        assert_eq!(silent_cards(&spec, &kept, &own), [2]);
    }

    #[test]
    fn kept_cards_of_a_subnet_have_the_hardware_addresses_of_the_guest() {
        let spec = spec(&["user", "subnet"]);
        let kept = kept_cards(("web", &spec)).unwrap().unwrap();
        assert_eq!(kept[0].mac, None);
        let renamed = VmSpec {
            nets: Some(kept),
            ..spec.clone()
        };
        let of = |spec: &VmSpec, name| cell::open::hardware_addresses(spec, name).unwrap()[1];
        assert_eq!(of(&renamed, "other"), of(&spec, "web"));
        assert_ne!(of(&spec, "other"), of(&spec, "web"));
    }

    #[test]
    fn addresses_are_kept_on_a_network_of_the_vm_alone() {
        let cards = |spec: &VmSpec| kept_cards(("Web", spec)).unwrap().unwrap();
        let range = Ipv4Range::default();
        let mut spec = spec(&["user", "subnet", "subnet"]);
        let kept = cards(&spec);
        assert_eq!(kept[0].address, None);
        assert_eq!(kept[1].address, Some(range.preferred("web")));
        assert_eq!(kept[2].address, Some(range.preferred("web-2")));
        let own = Ipv4Addr::new(10, 213, 7, 7);
        for card in spec.nets.iter_mut().flatten().skip(1) {
            card.address = Some(own);
        }
        assert_eq!(cards(&spec)[1].address, Some(own));
        for card in spec.nets.iter_mut().flatten().skip(1) {
            (card.network, card.address) = (Some("back".to_owned()), None);
        }
        assert_eq!(cards(&spec)[1].address, None);
        spec = self::spec(&["subnet"]);
        spec.share_group = Some("group".to_owned());
        assert_eq!(cards(&spec)[0].address, None);
    }

    #[test]
    fn clone_with_its_parents_identity_leaves_the_network_of_a_command_alone() {
        let mut parent = spec(&["subnet", "subnet"]);
        let networks = [config::command_network(7), "back".to_owned()];
        for (card, network) in parent.nets.iter_mut().flatten().zip(networks) {
            card.network = Some(network);
            card.forward = vec!["8080:80".to_owned()];
        }
        let mut clone = parent.clone();
        for card in clone.nets.iter_mut().flatten() {
            card.forward.clear();
        }
        keep_addresses_on_own_network(("web", &parent), &mut clone).unwrap();
        let cards = clone.nets.clone().unwrap();
        assert_eq!(cards[0].network, None);
        assert_eq!(cards[0].address, Some(Ipv4Range::default().preferred("web")));
        assert_eq!(
            (&cards[1].network, &cards[1].mac),
            (&Some("back".to_owned()), &None)
        );
        assert!(cards.iter().all(|card| card.forward.is_empty()), "{cards:?}");
        // A clone of such a clone has them, too.
        let (again, mut next) = (clone.clone(), clone.clone());
        for card in next.nets.iter_mut().flatten() {
            (card.mac, card.address) = (None, None);
        }
        keep_addresses_on_own_network(("web-1", &again), &mut next).unwrap();
        let next = next.nets.unwrap();
        assert_eq!((&next[0].mac, next[0].address), (&cards[0].mac, cards[0].address));
        assert_eq!(next[1].mac, None);
        let of = |spec: &VmSpec, name| cell::open::hardware_addresses(spec, name).unwrap();
        assert_eq!(
            silent_cards(&clone, &of(&parent, "web"), &of(&clone, "web-1")),
            [1]
        );
    }
}
