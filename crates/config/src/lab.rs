//! A lab file: hosts in software, the networks between them and the memory they share.
//!
//! Unknown keys are errors. An error shows the file, the place and the mend.

use std::collections::HashSet;
use std::path::Path;

use miette::{Diagnostic, NamedSource, SourceSpan};
use serde::{Deserialize, Serialize};

use crate::vm::Size;

/// A lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabSpec {
    /// Seconds `lab run` may take; none when absent.
    pub limit_s: Option<u64>,
    /// Its hosts, at least one.
    pub hosts: Vec<HostSpec>,
    /// Private networks between hosts.
    #[serde(default)]
    pub links: Vec<LinkSpec>,
    /// Memory that several hosts see.
    #[serde(default)]
    pub shared: Vec<SharedSpec>,
}

/// A host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSpec {
    /// Unique in the lab; becomes its host name.
    pub name: String,
    /// CPUs; all of this machine's when absent.
    pub cpus: Option<u16>,
    /// Memory; a share of what this machine has available when absent.
    pub memory: Option<Size>,
    /// NUMA nodes; their memory and CPUs must add up to the host's.
    #[serde(default)]
    pub nodes: Vec<HostNodeSpec>,
}

/// A NUMA node of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostNodeSpec {
    /// How many of the host's CPUs, counted on from the node before; a node may have none.
    pub cpus: u16,
    /// Its memory.
    pub memory: Size,
    /// Distance to each node in order, 10 being local; 10 and 20 when absent.
    pub distances: Option<Vec<u8>>,
}

/// A private network: host `i` in the list has address `10.77.LINK.(i+1)`, links counted from 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// The hosts on it.
    pub hosts: Vec<String>,
}

/// Memory shared between hosts, an ivshmem device on each.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedSpec {
    /// A power of two.
    pub size: Size,
    /// The hosts that see it.
    pub hosts: Vec<String>,
}

/// What is wrong with a lab file.
#[derive(Debug, thiserror::Error, Diagnostic)]
#[error("{message}")]
pub struct LabFileError {
    /// What.
    pub message: String,
    /// The file.
    #[source_code]
    pub source_code: NamedSource<String>,
    /// Where.
    #[label("here")]
    pub place: Option<SourceSpan>,
    /// How to mend it.
    #[help]
    pub mend: String,
}

impl LabSpec {
    /// One host with everything chosen.
    pub fn one_host() -> Self {
        Self {
            limit_s: None,
            hosts: vec![HostSpec {
                name: "lab".into(),
                cpus: None,
                memory: None,
                nodes: Vec::new(),
            }],
            links: Vec::new(),
            shared: Vec::new(),
        }
    }

    /// Reads and checks a lab file's text; `name` is shown in errors.
    pub fn parse(name: &Path, text: &str) -> Result<Self, Box<LabFileError>> {
        let fail = |message: String, place: Option<std::ops::Range<usize>>, mend: &str| {
            Box::new(LabFileError {
                message,
                source_code: NamedSource::new(name.display().to_string(), text.to_string()),
                place: place.map(Into::into),
                mend: mend.to_string(),
            })
        };
        let spec: Self = toml::from_str(text).map_err(|error| {
            fail(
                error.message().to_string(),
                error.span(),
                "a lab file has limit_s, hosts (name, cpus, memory, nodes), links (hosts) and shared (size, hosts)",
            )
        })?;
        spec.check().map_err(|(message, word, mend)| {
            let place = text
                .find(&format!("\"{word}\""))
                .map(|start| start..start + word.len() + 2);
            fail(message, place, mend)
        })?;
        Ok(spec)
    }

    /// What is wrong, the word to point at, and the mend.
    fn check(&self) -> Result<(), (String, String, &'static str)> {
        if self.hosts.is_empty() {
            return Err((
                "a lab needs at least one host".into(),
                String::new(),
                "add a [[hosts]] table with a name",
            ));
        }
        let mut names = HashSet::new();
        for host in &self.hosts {
            let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            if host.name.is_empty() || host.name.len() > 63 || !host.name.bytes().all(valid) {
                return Err((
                    format!("{:?} can't be a host's name", host.name),
                    host.name.clone(),
                    "use letters, digits and `-`, 63 at most",
                ));
            }
            if !names.insert(host.name.as_str()) {
                return Err((
                    format!("two hosts are named {}", host.name),
                    host.name.clone(),
                    "rename one",
                ));
            }
            host.check()
                .map_err(|(message, mend)| (message, host.name.clone(), mend))?;
        }
        for member in self
            .links
            .iter()
            .map(|l| &l.hosts)
            .chain(self.shared.iter().map(|s| &s.hosts))
            .flatten()
        {
            if !names.contains(member.as_str()) {
                return Err((
                    format!("there is no host {member}"),
                    member.clone(),
                    "name a host of this file",
                ));
            }
        }
        if self.links.len() > 100 || self.links.iter().any(|link| link.hosts.len() > 250) {
            return Err((
                "too many links, or hosts on a link".into(),
                String::new(),
                "100 links of 250 hosts at most",
            ));
        }
        if self
            .shared
            .iter()
            .any(|shared| !shared.size.0.is_power_of_two() || shared.size.0 < 1 << 20)
        {
            return Err((
                "the size of shared memory must be a power of two, 1M at least".into(),
                "size".into(),
                "use a size like 256M",
            ));
        }
        Ok(())
    }
}

impl HostSpec {
    fn check(&self) -> Result<(), (String, &'static str)> {
        if self.cpus.is_some_and(|cpus| cpus == 0 || cpus > 255) {
            return Err((
                format!("host {} must have 1 to 255 CPUs", self.name),
                "change cpus",
            ));
        }
        if self.memory.is_some_and(|memory| memory.0 < 256 << 20) {
            return Err((
                format!("host {} has too little memory", self.name),
                "256M at least",
            ));
        }
        if self.nodes.is_empty() {
            return Ok(());
        }
        let cpus: u32 = self.nodes.iter().map(|node| u32::from(node.cpus)).sum();
        if cpus == 0 || self.cpus.is_some_and(|all| u32::from(all) != cpus) {
            return Err((
                format!("the nodes of host {} have {cpus} CPUs together", self.name),
                "make the nodes' cpus add up to the host's, or leave the host's out",
            ));
        }
        let memory = self
            .nodes
            .iter()
            .try_fold(0u64, |sum, node| sum.checked_add(node.memory.0));
        if memory.is_none() || self.memory.is_some_and(|all| Some(all.0) != memory) {
            return Err((
                format!(
                    "the nodes of host {} have another amount of memory than the host",
                    self.name
                ),
                "make the nodes' memory add up to the host's, or leave the host's out",
            ));
        }
        for node in &self.nodes {
            if node
                .distances
                .as_ref()
                .is_some_and(|d| d.len() != self.nodes.len() || d.iter().any(|x| *x < 10))
            {
                return Err((
                    format!("a node of host {} has wrong distances", self.name),
                    "give one distance for each node, each 10 (local) or more",
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> LabFileError {
        *LabSpec::parse(Path::new("lab.toml"), text).unwrap_err()
    }

    #[test]
    fn an_unknown_key_is_shown_with_its_place() {
        let text = "[[hosts]]\nname = \"a\"\ncpuz = 2\n";
        let error = fault(text);
        assert!(error.message.contains("cpuz"), "{}", error.message);
        assert_eq!(error.place.unwrap().offset(), text.find("cpuz").unwrap());
    }

    #[test]
    fn two_hosts_of_one_name_are_refused() {
        assert!(
            fault("[[hosts]]\nname = \"a\"\n[[hosts]]\nname = \"a\"\n")
                .message
                .contains("two hosts")
        );
    }

    #[test]
    fn a_link_to_nowhere_is_refused() {
        assert!(
            fault("[[hosts]]\nname = \"a\"\n[[links]]\nhosts = [\"a\", \"b\"]\n")
                .message
                .contains("no host b")
        );
    }

    #[test]
    fn nodes_must_add_up() {
        let text = "[[hosts]]\nname = \"a\"\ncpus = 3\nnodes = [{ cpus = 1, memory = 1073741824 }]\n";
        assert!(fault(text).message.contains("1 CPUs together"));
    }
}
