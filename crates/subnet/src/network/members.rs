//! Cards of a network, by number, hardware address, IP address and name.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use policy::rate::Bucket;

use super::card::{Addresses, Card, Counts};
use super::error::AttachError;
use super::header::is_group;
use super::rate::Limiter;
use super::settings::{Gateway, LINK_LOCAL, Settings, has_prefix, interface_address};
use super::{CARDS_MAX, CardId, LEARNT_MAX};
use crate::write_mac;

/// Name of the gateway, which no VM can have.
pub const GATEWAY_NAME: &str = "_gateway";
/// Bytes per second that broadcasts of one card may become: each receiver's copy counts.
const FLOOD_BYTES: u64 = 16 << 20;
/// Bytes of copies that pass at once.
const FLOOD_BURST_BYTES: u64 = 4 << 20;

/// A card of a network.
#[derive(Debug)]
pub struct Member {
    pub card: Card,
    pub addresses: Addresses,
    pub counts: Counts,
    pub from_guest: Limiter,
    pub to_guest: Limiter,
    pub flood: Bucket,
    /// Whether the guest has used the IPv6 address made from its hardware address.
    uses_ipv6: bool,
    /// Other IPv6 addresses, with the number of their last use.
    learnt: Vec<(Ipv6Addr, u64)>,
}

impl Member {
    /// Whether the guest reaches the outside.
    pub fn reaches_outside(&self, settings: &Settings) -> bool {
        settings.outside && self.card.outside
    }

    /// Returns the IPv6 address of the network's prefix that the guest has, as far as it has shown one.
    pub fn ipv6(&self, prefix: Ipv6Addr) -> Option<Ipv6Addr> {
        if self.uses_ipv6 {
            return Some(self.addresses.ipv6);
        }
        let mut learnt = self.learnt.iter().map(|(address, _)| *address);
        learnt.find(|address| has_prefix(*address, prefix))
    }
}

/// Cards of a network.
#[derive(Debug)]
pub struct Members {
    gateway: Gateway,
    prefix: Ipv6Addr,
    cards: BTreeMap<CardId, Member>,
    macs: HashMap<[u8; 6], CardId>,
    addresses: HashMap<IpAddr, CardId>,
    names: HashMap<String, CardId>,
    /// Number of uses of learnt addresses.
    uses: u64,
}

impl Members {
    /// Creates an empty list.
    pub fn new(settings: &Settings) -> Self {
        Self {
            gateway: settings.gateway(),
            prefix: settings.ipv6_prefix(),
            cards: BTreeMap::new(),
            macs: HashMap::new(),
            addresses: HashMap::new(),
            names: HashMap::new(),
            uses: 0,
        }
    }

    /// Adds a card.
    pub fn attach(
        &mut self,
        id: CardId,
        card: Card,
        settings: &Settings,
        now: Instant,
    ) -> Result<Addresses, AttachError> {
        let name = card.name.to_ascii_lowercase();
        if self.cards.contains_key(&id) {
            return Err(AttachError::NumberTaken(card.name));
        }
        if !is_host_name(&name) {
            return Err(AttachError::Name(card.name));
        }
        if name == GATEWAY_NAME || self.names.contains_key(&name) {
            return Err(AttachError::NameTaken(card.name));
        }
        if is_group(card.mac) || card.mac == [0; 6] {
            return Err(AttachError::Mac(write_mac(card.mac)));
        }
        if card.mac == self.gateway.mac || self.macs.contains_key(&card.mac) {
            return Err(AttachError::MacTaken(write_mac(card.mac)));
        }
        if self.cards.len() >= CARDS_MAX {
            return Err(AttachError::Full(self.cards.len()));
        }
        let ipv4 = match card.address {
            Some(address) => self.requested(address, settings)?,
            None => self.free_address(&name, settings)?,
        };
        let addresses = Addresses {
            ipv4,
            ipv6: interface_address(self.prefix, card.mac),
            link_local: interface_address(LINK_LOCAL, card.mac),
        };
        for address in [addresses.ipv6, addresses.link_local] {
            // Another guest may have used it before this card came.
            if let Some(thief) = self.addresses.insert(address.into(), id)
                && let Some(thief) = self.cards.get_mut(&thief)
            {
                thief.learnt.retain(|(learnt, _)| *learnt != address);
            }
        }
        self.addresses.insert(ipv4.into(), id);
        self.macs.insert(card.mac, id);
        self.names.insert(name, id);
        let member = Member {
            from_guest: Limiter::new(card.limits.from_guest, now),
            to_guest: Limiter::new(card.limits.to_guest, now),
            flood: Bucket::new(FLOOD_BYTES, FLOOD_BURST_BYTES, now),
            card,
            addresses,
            counts: Counts::default(),
            uses_ipv6: false,
            learnt: Vec::new(),
        };
        self.cards.insert(id, member);
        Ok(addresses)
    }

    /// Removes a card.
    pub fn detach(&mut self, id: CardId) -> Option<Member> {
        let member = self.cards.remove(&id)?;
        self.macs.remove(&member.card.mac);
        self.names.remove(&member.card.name.to_ascii_lowercase());
        let Addresses {
            ipv4,
            ipv6,
            link_local,
        } = member.addresses;
        let own = [IpAddr::from(ipv4), ipv6.into(), link_local.into()];
        let learnt = member.learnt.iter().map(|(address, _)| IpAddr::from(*address));
        for address in own.into_iter().chain(learnt) {
            self.addresses.remove(&address);
        }
        Some(member)
    }

    /// Returns a card.
    pub fn get(&self, id: CardId) -> Option<&Member> {
        self.cards.get(&id)
    }

    /// Returns a card to change.
    pub fn get_mut(&mut self, id: CardId) -> Option<&mut Member> {
        self.cards.get_mut(&id)
    }

    /// Lists the cards.
    pub fn iter(&self) -> impl Iterator<Item = (CardId, &Member)> {
        self.cards.iter().map(|(id, member)| (*id, member))
    }

    /// Returns the card after this number, to go through all while they change.
    pub fn next_after(&self, id: Option<CardId>) -> Option<CardId> {
        let start = id.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
        let mut rest = self.cards.range((start, std::ops::Bound::Unbounded));
        rest.next().map(|(id, _)| *id)
    }

    /// Returns the number of cards.
    pub fn count(&self) -> usize {
        self.cards.len()
    }

    /// Returns the card with this hardware address.
    pub fn by_mac(&self, mac: [u8; 6]) -> Option<CardId> {
        self.macs.get(&mac).copied()
    }

    /// Returns the card to which this address belongs.
    pub fn by_address(&self, address: IpAddr) -> Option<(CardId, &Member)> {
        let id = *self.addresses.get(&address)?;
        Some((id, self.cards.get(&id)?))
    }

    /// Returns the card with this name in lower case.
    pub fn by_name(&self, name: &str) -> Option<(CardId, &Member)> {
        let id = *self.names.get(name)?;
        Some((id, self.cards.get(&id)?))
    }

    /// Returns whether a guest may use an IPv6 address, and records its use. An address of the network's
    /// prefix or of the link that no other card has becomes the card's; the one that it used least recently
    /// of [`LEARNT_MAX`] ceases to be.
    pub fn may_use(&mut self, id: CardId, address: Ipv6Addr) -> bool {
        let Some(member) = self.cards.get_mut(&id) else {
            return false;
        };
        self.uses = self.uses.saturating_add(1);
        match self.addresses.get(&address.into()) {
            Some(owner) if *owner != id => return false,
            Some(_) => {
                if let Some(learnt) = member.learnt.iter_mut().find(|(learnt, _)| *learnt == address) {
                    learnt.1 = self.uses;
                }
                member.uses_ipv6 |= address == member.addresses.ipv6;
                return true;
            }
            None => {}
        }
        let is_gateways = address == self.gateway.link_local || address == self.gateway.addresses.ipv6;
        // The address with an interface of zeroes is that of any router.
        let is_routers = u128::from(address) as u64 == 0;
        let is_local = has_prefix(address, self.prefix) || has_prefix(address, LINK_LOCAL);
        if is_gateways || is_routers || !is_local {
            return false;
        }
        if member.learnt.len() >= LEARNT_MAX {
            let oldest = (0..member.learnt.len()).min_by_key(|index| member.learnt[*index].1);
            if let Some(index) = oldest {
                let (oldest, _) = member.learnt.swap_remove(index);
                self.addresses.remove(&oldest.into());
            }
        }
        member.learnt.push((address, self.uses));
        self.addresses.insert(address.into(), id);
        true
    }

    fn requested(&self, address: Ipv4Addr, settings: &Settings) -> Result<Ipv4Addr, AttachError> {
        if !settings.ipv4.fits_card(address) {
            let range = settings.ipv4;
            return Err(AttachError::AddressOutside { address, range });
        }
        if self.addresses.contains_key(&address.into()) {
            return Err(AttachError::AddressTaken(address));
        }
        Ok(address)
    }

    /// Returns the address that the name decides, or the next free one.
    fn free_address(&self, name: &str, settings: &Settings) -> Result<Ipv4Addr, AttachError> {
        let range = settings.ipv4;
        let first = range.first_number(name);
        // Each card has one address, so one more than the cards is enough.
        let tries = range.cards().min(CARDS_MAX as u32 + 1);
        (0..tries)
            .map(|step| range.card(first + step))
            .find(|address| !self.addresses.contains_key(&IpAddr::from(*address)))
            .ok_or(AttachError::Full(self.cards.len()))
    }
}

fn is_host_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 63 && name.chars().all(allowed) && !name.starts_with(['.', '-'])
}
