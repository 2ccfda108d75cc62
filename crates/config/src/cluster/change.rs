//! Changes of a running cluster's file: a host joins or leaves.
//!
//! Cells are numbered through the file. So a joining host's cells come after all others. The cells of a host
//! that has left stay, marked `left`, so their numbers are never reused.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use serde::Serialize;

use super::{CellSpec, ClusterSpec, HostSpec, Site};
use crate::error::ConfigError;

/// Tables of a host that joins.
#[derive(Serialize)]
struct Tables<'a> {
    hosts: [&'a HostSpec; 1],
    cells: Vec<CellSpec>,
}

impl ClusterSpec {
    /// Returns the file's text with a further host and its cells at the end, and the parsed file. All other
    /// text stays, comments included.
    ///
    /// # Errors
    /// If the host is already in the file, or the new file is invalid.
    pub fn with_host(
        source_name: &str,
        text: &str,
        name: &str,
        address: SocketAddr,
        cells: &[CellSpec],
    ) -> Result<(String, Self), ConfigError> {
        let spec = Self::parse(source_name, text)?;
        let wrong = |what: String, help: &str| ConfigError::plain(what, help);
        if spec.hosts.is_empty() {
            let what = format!("{source_name} names no hosts");
            return Err(wrong(
                what,
                "a host joins a cluster of several, each a [[hosts]] table",
            ));
        }
        if let Some(host) = spec.hosts.iter().find(|host| host.name == name) {
            let what = format!("host {name} is in {source_name} already, at {}", host.address);
            return Err(wrong(what, "`mirrorball cluster up FILE` starts its cells there"));
        }
        let host = HostSpec {
            name: name.to_owned(),
            address,
            shared_memory: None,
            remote_paths: Vec::new(),
        };
        let cells = cells.iter().map(|cell| CellSpec {
            host: Some(name.to_owned()),
            left: false,
            ..cell.clone()
        });
        let tables = Tables {
            hosts: [&host],
            cells: cells.collect(),
        };
        let tables = toml::to_string(&tables)
            .map_err(|error| wrong(format!("the tables of host {name}: {error}"), "check its name"))?;
        let text = format!("{}\n\n{tables}", text.trim_end());
        let spec = Self::parse(source_name, &text)?;
        Ok((text, spec))
    }

    /// Returns the file's text without a host: its cells' numbers stay unused. The text is rewritten, without
    /// comments.
    ///
    /// # Errors
    /// If there is no such host, or the cluster needs it.
    pub fn without_host(&self, name: &str) -> Result<(String, Self), ConfigError> {
        let wrong = |what: &str, help: &str| ConfigError::plain(format!("host {name} {what}"), help);
        let Some(at) = self.hosts.iter().position(|host| host.name == name) else {
            return Err(wrong("is not in the cluster's file", "check the name"));
        };
        if self.hosts.len() == 1 {
            return Err(wrong(
                "is the only one",
                "end the cluster with `mirrorball cluster down`",
            ));
        }
        let has_etcd = self
            .membership
            .as_ref()
            .is_none_or(|membership| membership.etcd.is_empty());
        if at == 0 && has_etcd {
            let help = "name an etcd of yours in [membership], for all hosts, before this one leaves";
            return Err(wrong("runs the cluster's etcd", help));
        }
        if self.hosts[at].shared_memory.is_some() {
            let help = "take the cluster down, and take the host out of its file";
            return Err(wrong(
                "shares memory with others, which is divided among all of them",
                help,
            ));
        }
        let mut spec = self.clone();
        spec.hosts.remove(at);
        spec.networks
            .retain(|network| network.host.as_deref() != Some(name));
        for cell in &mut spec.cells {
            if cell.host.as_deref() == Some(name) {
                *cell = CellSpec {
                    host: None,
                    cpus: None,
                    nodes: None,
                    memory: None,
                    left: true,
                };
            }
        }
        let text = toml::to_string(&spec).map_err(|error| wrong(&error.to_string(), "check the file"))?;
        let text = format!("# Written by mirrorball, when host {name} left.\n{text}");
        let spec = Self::parse("cluster.toml", &text)?;
        Ok((text, spec))
    }
}

/// The first difference of a running cluster's file that a host does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SiteChange {
    /// The host itself, by name.
    #[error("this host, {0}, is another one in it, or not there")]
    Here(String),
    /// Another host, by name.
    #[error("host {0} is another one in it")]
    Host(String),
    /// A cell that a host of another name has.
    #[error("cell {0} is another host's in it")]
    Cell(u16),
    /// The settings of the membership.
    #[error("[membership] is another one in it")]
    Membership,
    /// The division of shared memory among hosts.
    #[error("memory that hosts share is divided in another way in it")]
    SharedMemory,
}

impl Site {
    /// Checks that a host whose cells run may switch to `next`: only hosts may be added and removed.
    ///
    /// # Errors
    /// The first change that is not allowed.
    pub fn may_become(&self, next: &Self) -> Result<(), SiteChange> {
        let own = |site: &Self| site.hosts.iter().find(|host| host.name == self.here).cloned();
        if own(self) != own(next) {
            return Err(SiteChange::Here(self.here.clone()));
        }
        for host in &self.hosts {
            let Some(then) = next.hosts.iter().find(|then| then.name == host.name) else {
                continue;
            };
            if then != host {
                return Err(SiteChange::Host(host.name.clone()));
            }
        }
        for host in &next.hosts {
            let mut numbers = host.cells.iter();
            let taken = numbers.find(|cell| self.host_of(**cell).is_some_and(|then| then.name != host.name));
            if let Some(cell) = taken {
                return Err(SiteChange::Cell(*cell));
            }
        }
        let rest = |site: &Self| (site.etcd.clone(), site.silence_ms, site.spans, site.on_lost);
        if rest(self) != rest(next) {
            return Err(SiteChange::Membership);
        }
        if self.sharing_pairs() != next.sharing_pairs() {
            return Err(SiteChange::SharedMemory);
        }
        Ok(())
    }

    /// Returns the cells of this file that are not in another one.
    pub fn cells_without(&self, next: &Self) -> Vec<u16> {
        let cells = |site: &Self| -> BTreeSet<u16> {
            site.hosts
                .iter()
                .flat_map(|host| host.cells.iter().copied())
                .collect()
        };
        cells(self).difference(&cells(next)).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const TWO: &str = "# Two hosts.\n[[hosts]]\nname = \"alpha\"\naddress = \"10.0.0.1:7400\"\n\
                       [[hosts]]\nname = \"beta\"\naddress = \"10.0.0.2:7400\"\n\
                       [[cells]]\nhost = \"alpha\"\n[[cells]]\nhost = \"beta\"\n[membership]\nsilence_ms = \
                       300\n";

    fn cell(cpus: &str) -> CellSpec {
        CellSpec {
            host: None,
            cpus: Some(cpus.to_owned()),
            nodes: None,
            memory: None,
            left: false,
        }
    }

    fn gamma(text: &str) -> Result<(String, ClusterSpec), ConfigError> {
        let address = "10.0.0.3:7400".parse().unwrap();
        ClusterSpec::with_host("file", text, "gamma", address, &[cell("0"), cell("1-2")])
    }

    fn site(spec: &ClusterSpec, here: &str) -> Site {
        spec.site(here, Path::new("/etc")).unwrap().unwrap()
    }

    #[test]
    fn joining_host_gets_the_next_cells_and_all_other_text_stays() {
        let (text, spec) = gamma(TWO).unwrap();
        assert!(text.starts_with(TWO), "{text}");
        let (before, after) = (ClusterSpec::parse("file", TWO).unwrap(), site(&spec, "alpha"));
        assert_eq!(after.hosts[2].cells, [2, 3]);
        let before = site(&before, "alpha");
        assert_eq!(before.hosts[..], after.hosts[..2]);
        before.may_become(&after).unwrap();
        assert!(
            gamma(&text)
                .unwrap_err()
                .to_string()
                .contains("is in file already")
        );
        let one = "[[cells]]\ncpus = \"0\"\n";
        assert!(gamma(one).unwrap_err().to_string().contains("names no hosts"));
    }

    #[test]
    fn cell_numbers_of_a_host_that_has_left_are_never_reused() {
        let (_, three) = gamma(TWO).unwrap();
        let (text, spec) = three.without_host("beta").unwrap();
        let left = site(&spec, "gamma");
        assert_eq!(left.hosts.len(), 2);
        assert_eq!(left.hosts[1].cells, [2, 3]);
        assert!(left.host_of(1).is_none());
        assert_eq!(spec.membership.as_ref().unwrap().silence_ms, 300);
        site(&three, "gamma").may_become(&left).unwrap();
        assert_eq!(site(&three, "gamma").cells_without(&left), [1]);
        // The same host joins again.
        let address = "10.0.0.2:7400".parse().unwrap();
        let (_, again) = ClusterSpec::with_host("file", &text, "beta", address, &[cell("0")]).unwrap();
        assert_eq!(site(&again, "beta").hosts[2].cells, [4]);
        left.may_become(&site(&again, "gamma")).unwrap();
    }

    #[test]
    fn required_host_can_not_leave() {
        let spec = ClusterSpec::parse("file", TWO).unwrap();
        for (host, why) in [
            ("alpha", "runs the cluster's etcd"),
            ("delta", "is not in the cluster's file"),
        ] {
            let error = spec.without_host(host).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let (_, alone) = spec.without_host("beta").unwrap();
        let error = alone.without_host("alpha").unwrap_err().to_string();
        assert!(error.contains("is the only one"), "{error}");
    }

    #[test]
    fn running_host_refuses_a_file_of_other_cells_or_another_membership() {
        let spec = ClusterSpec::parse("file", TWO).unwrap();
        let now = site(&spec, "beta");
        for (from, to, why) in [
            ("10.0.0.2:7400", "10.0.0.9:7400", "this host, beta"),
            ("10.0.0.1:7400", "10.0.0.9:7400", "host alpha is another one"),
            // No other host decides which files its commands may name here.
            (
                "address = \"10.0.0.2:7400\"\n",
                "address = \"10.0.0.2:7400\"\nremote_paths = [\"/\"]\n",
                "this host, beta",
            ),
            ("silence_ms = 300", "silence_ms = 400", "[membership]"),
            (
                "host = \"alpha\"\n[[cells]]\nhost = \"beta\"",
                "host = \"beta\"\n[[cells]]\nhost = \"alpha\"",
                "beta",
            ),
        ] {
            let text = TWO.replace(from, to);
            assert_ne!(text, TWO);
            let next = site(&ClusterSpec::parse("file", &text).unwrap(), "beta");
            let error = now.may_become(&next).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(now.may_become(&now).is_ok());
    }
}
