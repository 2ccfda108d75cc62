//! Cards that join networks and leave them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use registry::subnet::Join;
use subnet::network::{AttachError, Card, CardId, Limits, Network, RangeError, Rate, Settings};
use subnet::{PortForward, nat};

use crate::card::CardSocket;
use crate::path::Paths;

/// Greatest number of cards of a gateway.
pub(crate) const CARDS_MAX: usize = 1024;
/// Greatest number of ports that are forwarded to one card.
const FORWARDS_MAX: usize = 256;

/// A card that has joined.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) network: String,
    pub(crate) vm: String,
    /// Its number among the cards of its VM.
    pub(crate) number: usize,
    pub(crate) forward: Vec<String>,
    pub(crate) host: bool,
}

/// Networks and their cards.
#[derive(Debug, Default)]
pub(crate) struct Networks {
    pub(crate) networks: HashMap<String, Network>,
    pub(crate) members: HashMap<CardId, Member>,
}

impl Networks {
    /// Returns the network of a card.
    pub(crate) fn of(&mut self, card: CardId) -> Option<&mut Network> {
        let member = self.members.get(&card)?;
        self.networks.get_mut(&member.network)
    }

    /// Joins a card. Returns its addresses.
    ///
    /// # Errors
    /// Returns a line for people if the card can't join. Nothing has changed then.
    pub(crate) fn join(
        &mut self,
        id: CardId,
        join: &Join,
        socket: OwnedFd,
        paths: &mut Paths,
        now: Instant,
    ) -> Result<Vec<IpAddr>, String> {
        if self.members.len() >= CARDS_MAX {
            return Err(format!(
                "the subnet has {CARDS_MAX} cards already; help: end a VM, or use `kind = \"user\"`"
            ));
        }
        if join.forward.len() > FORWARDS_MAX {
            return Err(format!(
                "{} forwarded ports; help: forward {FORWARDS_MAX} at most",
                join.forward.len()
            ));
        }
        let forwards = join.forward.iter().map(|text| text.parse::<PortForward>());
        let forwards = forwards.collect::<Result<Vec<_>, _>>();
        let forwards = forwards.map_err(|error| error.to_string())?;
        let socket = CardSocket::new(socket, join.offloads);
        let socket = socket.map_err(|error| format!("the card's socket: {error}"))?;
        let settings = settings(join)?;
        let network = self.networks.entry(join.network.clone());
        let network = network.or_insert_with(|| Network::new(settings.clone(), now));
        if !is_same(network.settings(), &settings) {
            return Err(format!(
                "the network {} has cards with other settings; help: end its VMs (`mirrorball net ls`), then \
                 start them again",
                join.network
            ));
        }
        let attached = attach(network, id, join, now);
        let addresses = match attached {
            Ok(addresses) => addresses,
            Err(error) => {
                self.remove_unused(&join.network);
                return Err(format!("the network {}: {error}", join.network));
            }
        };
        let card = nat::Card {
            address: addresses.ipv4,
            gateways: network.gateway().addresses,
            host: join.host,
        };
        paths.nat.add_card(id, card);
        for forward in forwards {
            if let Err(error) = paths.nat.add_forward(id, forward) {
                paths.nat.remove_card(id);
                network.detach(id);
                self.remove_unused(&join.network);
                return Err(error.to_string());
            }
        }
        paths.sockets.insert(id, socket);
        let member = Member {
            network: join.network.clone(),
            vm: join.vm.clone(),
            number: join.card,
            forward: join.forward.clone(),
            host: join.host,
        };
        self.members.insert(id, member);
        Ok(vec![addresses.ipv4.into(), addresses.ipv6.into()])
    }

    /// Removes a card, and its network with the last one.
    pub(crate) fn leave(&mut self, id: CardId, paths: &mut Paths) {
        paths.remove(id);
        let Some(member) = self.members.remove(&id) else {
            return;
        };
        if let Some(network) = self.networks.get_mut(&member.network) {
            network.detach(id);
        }
        self.remove_unused(&member.network);
    }

    fn remove_unused(&mut self, name: &str) {
        let is_unused = |network: &Network| network.cards().next().is_none();
        if self.networks.get(name).is_some_and(is_unused) {
            self.networks.remove(name);
        }
    }
}

/// Returns the settings of a card's network. IPv6 leads to the outside where the host has such an address.
fn settings(join: &Join) -> Result<Settings, String> {
    let is_global = |address: &IpAddr| match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => (address.segments()[0] & 0xe000) == 0x2000,
    };
    let mut settings = Settings {
        outside_ipv6: join.facts.own.iter().any(is_global),
        ..Settings::new(&join.network)
    };
    if let Some(chosen) = &join.settings {
        if let Some(range) = &chosen.range {
            settings.ipv4 = range.parse().map_err(|error: RangeError| error.to_string())?;
        }
        settings.outside = !chosen.isolated;
        settings.peers = chosen.peers;
    }
    Ok(settings)
}

/// Whether settings are the same, but for what follows from the host's addresses.
fn is_same(one: &Settings, other: &Settings) -> bool {
    let outside_ipv6 = one.outside_ipv6;
    *one == Settings {
        outside_ipv6,
        ..other.clone()
    }
}

/// Attaches a card under the name of its VM. A further card of the VM gets its number behind the name.
fn attach(
    network: &mut Network,
    id: CardId,
    join: &Join,
    now: Instant,
) -> Result<subnet::network::Addresses, AttachError> {
    let card = |name: String| Card {
        name,
        mac: join.mac,
        address: join.address,
        outside: join.outside,
        limits: Limits {
            from_guest: Rate {
                bytes: join.bandwidth,
                packets: join.packets.map(u64::from),
            },
            to_guest: Rate::default(),
        },
    };
    match network.attach(id, card(join.vm.clone()), now) {
        Err(AttachError::NameTaken(_)) if join.card > 0 => {
            network.attach(id, card(format!("{}-{}", join.vm, join.card)), now)
        }
        attached => attached,
    }
}
