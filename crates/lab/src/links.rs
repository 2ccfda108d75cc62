//! The networks between a lab's hosts: membership, addresses, and changes of their quality at run time.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use config::lab::{LabSpec, LinkSpec, Quality};

use crate::LabError;
use crate::boot::NetworkCard;
use crate::error::Context;
use crate::switch::Switch;

/// All links of a running lab.
#[derive(Clone)]
pub struct Links(Vec<Link>);

#[derive(Clone)]
struct Link {
    spec: LinkSpec,
    switch: Switch,
}

/// A host's end of a link: its card, and the socket of the card.
pub type End = (NetworkCard, OwnedFd);

impl Links {
    /// Starts the links of `spec`. Returns the ends of each of its hosts.
    pub fn start(spec: &LabSpec) -> Result<(Self, Vec<Vec<End>>), LabError> {
        let what = || "could not make a network between lab hosts".to_string();
        let mut ends: Vec<Vec<End>> = spec.hosts.iter().map(|_| Vec::new()).collect();
        let mut links = Vec::new();
        for (number, link) in spec.links.iter().enumerate() {
            let mut ports = Vec::new();
            for (position, name) in link.hosts.iter().enumerate() {
                let Some(host) = spec.hosts.iter().position(|host| host.name == *name) else {
                    continue;
                };
                let (ours, theirs) = UnixStream::pair().context(what)?;
                ports.push(ours);
                let card = NetworkCard {
                    mac: format!("52:54:77:00:{number:02x}:{:02x}", position + 1),
                    address: address(number, position),
                    gateway: None,
                };
                ends[host].push((card, theirs.into()));
            }
            let switch = Switch::start(ports, link.quality(), number as u64).context(what)?;
            let spec = link.clone();
            links.push(Link { spec, switch });
        }
        Ok((Self(links), ends))
    }

    /// Changes every link that has both hosts, in both directions. `change` receives the present quality and
    /// that of the lab's file. Returns the new quality; `None` if no link has both hosts.
    pub fn change(
        &self,
        hosts: &[String; 2],
        change: impl Fn(Quality, Quality) -> Quality,
    ) -> Option<Quality> {
        let mut all = None;
        for link in &self.0 {
            let position = |name: &String| link.spec.hosts.iter().position(|host| host == name);
            if let [Some(one), Some(other)] = hosts.each_ref().map(position)
                && one != other
            {
                let quality = change(link.switch.quality(one, other), link.spec.quality());
                link.switch.set(one, other, quality);
                all = Some(quality);
            }
        }
        all
    }
}

/// The check of the spec keeps both numbers in range.
fn address(link: usize, position: usize) -> Ipv4Addr {
    let byte = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
    Ipv4Addr::new(10, 77, byte(link), byte(position + 1))
}

/// Returns each host's address on each of its links.
pub fn names(spec: &LabSpec) -> Vec<(String, Ipv4Addr)> {
    let mut names = Vec::new();
    for (number, link) in spec.links.iter().enumerate() {
        for (position, name) in link.hosts.iter().enumerate() {
            names.push((name.clone(), address(number, position)));
        }
    }
    names
}
