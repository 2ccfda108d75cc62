//! Networks of a cluster's VMs: settings that hold for cards of a subnet.

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use super::ClusterSpec;
use super::regions::matches;
use crate::fault::{Fault, fault};
use crate::validate::{is_name, network_name_is_valid};

/// Maximum number of networks of a cluster.
const NETWORKS_MAX: usize = 256;
/// Maximum number of patterns of a list.
const PATTERNS_MAX: usize = 64;
/// Bits that a range's prefix may have.
const PREFIX_BITS: std::ops::RangeInclusive<u8> = 8..=29;
/// First parts of the names of networks that commands and VMs make for themselves.
const RESERVED: [&str; 2] = ["run-", "vm-"];

/// A network of cards of a subnet.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSpec {
    /// Name by which VM files refer to it.
    pub name: String,
    /// Host of the network, when there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Range of IPv4 addresses, as `10.20.0.0/24`; the default one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// Whether its guests reach nothing else than one another.
    #[serde(default)]
    pub isolated: bool,
    /// Names of the VMs that may reach the outside; `*` stands for any characters. All when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outside: Option<Vec<String>>,
    /// Whether its guests reach one another.
    #[serde(default = "yes")]
    pub peers: bool,
}

fn yes() -> bool {
    true
}

impl NetworkSpec {
    /// Whether a VM of this name reaches the outside.
    pub fn reaches_outside(&self, vm: &str) -> bool {
        let is_listed = |patterns: &Vec<String>| patterns.iter().any(|pattern| matches(pattern, vm));
        !self.isolated && self.outside.as_ref().is_none_or(is_listed)
    }
}

/// Range of IPv4 addresses.
#[derive(Clone, Copy)]
struct Range {
    base: u32,
    mask: u32,
}

impl Range {
    /// Parses a private range. `subnet::network::Ipv4Range` accepts the same ones.
    fn parse(text: &str) -> Option<Self> {
        let (address, bits) = text.split_once('/')?;
        let (address, bits): (Ipv4Addr, u8) = (address.parse().ok()?, bits.parse().ok()?);
        if !PREFIX_BITS.contains(&bits) || text.contains('+') {
            return None;
        }
        let (base, mask) = (u32::from(address), u32::MAX << (32 - u32::from(bits)));
        let is_private = address.is_private() && Ipv4Addr::from(base | !mask).is_private();
        (base & !mask == 0 && is_private).then_some(Self { base, mask })
    }

    fn contains(self, address: u32) -> bool {
        address & self.mask == self.base
    }

    /// Whether the ranges have an address in common: one of them has the other's first one.
    fn overlaps(self, other: Self) -> bool {
        self.contains(other.base) || other.contains(self.base)
    }
}

impl ClusterSpec {
    pub(super) fn check_networks(&self) -> Result<(), Fault> {
        if self.networks.len() > NETWORKS_MAX {
            return Err(fault(
                &["networks"],
                format!("{} networks", self.networks.len()),
                format!("a cluster has {NETWORKS_MAX} at most"),
            ));
        }
        for (index, network) in self.networks.iter().enumerate() {
            let at = index.to_string();
            self.check_network_name(index, network, &at)?;
            self.check_network_host(network, &at)?;
            self.check_range(index, network, &at)?;
            check_outside(network, &at)?;
        }
        Ok(())
    }

    fn check_network_name(&self, index: usize, network: &NetworkSpec, at: &str) -> Result<(), Fault> {
        let path = ["networks", at, "name"];
        if !network_name_is_valid(&network.name) {
            return Err(fault(
                &path,
                format!("{:?} can't name a network", network.name),
                "1 to 63 letters, digits, `-`, `_` and `.`, the first a letter or digit",
            ));
        }
        if let Some(reserved) = RESERVED.iter().find(|start| network.name.starts_with(**start)) {
            return Err(fault(
                &path,
                format!("names with `{reserved}` are those of unnamed networks"),
                "choose another name",
            ));
        }
        let mut before = self.networks[..index].iter();
        if before.any(|other| other.name == network.name) {
            return Err(fault(
                &path,
                format!("a network {} is in the file already", network.name),
                "give each network a name of its own",
            ));
        }
        Ok(())
    }

    /// Checks the host: a gateway connects the VMs of its own host only.
    fn check_network_host(&self, network: &NetworkSpec, at: &str) -> Result<(), Fault> {
        match &network.host {
            None if self.hosts.is_empty() => Ok(()),
            None => Err(fault(
                &["networks", at],
                format!(
                    "the network {} is of no host, and none leads from host to host",
                    network.name
                ),
                "name the host of its VMs, as host = \"NAME\"",
            )),
            Some(host) if self.hosts.iter().any(|known| known.name == *host) => Ok(()),
            Some(host) => Err(fault(
                &["networks", at, "host"],
                format!("the file has no host {host:?}"),
                "name one of its [[hosts]], or drop `host` in a file without them",
            )),
        }
    }

    fn check_range(&self, index: usize, network: &NetworkSpec, at: &str) -> Result<(), Fault> {
        let Some(text) = &network.range else {
            return Ok(());
        };
        let path = ["networks", at, "range"];
        let range = Range::parse(text).ok_or_else(|| {
            fault(
                &path,
                format!("{text:?} is no range for a network"),
                "write a private one with a prefix of 8 to 29 bits, as \"10.20.0.0/24\"",
            )
        })?;
        let overlaps = |other: &&NetworkSpec| {
            let other = other.range.as_deref().and_then(Range::parse);
            other.is_some_and(|other| range.overlaps(other))
        };
        if let Some(other) = self.networks[..index].iter().find(overlaps) {
            return Err(fault(
                &path,
                format!("{text} has addresses of the network {}", other.name),
                "give each network a range of its own",
            ));
        }
        let has = |address: IpAddr| match address {
            IpAddr::V4(address) => range.contains(address.into()),
            IpAddr::V6(_) => false,
        };
        if let Some(host) = self.hosts.iter().find(|host| has(host.address.ip())) {
            return Err(fault(
                &path,
                format!("{text} has the address of host {}", host.name),
                "choose a range that the hosts' network does not use",
            ));
        }
        Ok(())
    }
}

fn check_outside(network: &NetworkSpec, at: &str) -> Result<(), Fault> {
    let Some(patterns) = &network.outside else {
        return Ok(());
    };
    let path = ["networks", at, "outside"];
    if network.isolated {
        return Err(fault(
            &path,
            "no VM of an isolated network reaches the outside",
            "drop `outside`, or `isolated`",
        ));
    }
    if patterns.is_empty() || patterns.len() > PATTERNS_MAX {
        return Err(fault(
            &path,
            format!("{} names", patterns.len()),
            format!("write 1 to {PATTERNS_MAX}, or `isolated = true` for none"),
        ));
    }
    for (index, pattern) in patterns.iter().enumerate() {
        if !is_name(&pattern.replace('*', "x")) {
            return Err(fault(
                &["networks", at, "outside", &index.to_string()],
                format!("no VM has a name like {pattern:?}"),
                "write a VM's name, or a part of it and `*`, as \"web-*\"",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
