//! A lab file: software hosts, the networks between them and the memory they share.
//!
//! Unknown keys are errors. An error shows the file, the place and the help.

mod link;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::error::ConfigError;
use crate::fault::{Fault, fault};
use crate::size::Size;

pub use link::{Delay, DelayError, LinkSpec, Loss, LossError, Quality};

/// Maximum host processes on one machine.
const HOSTS_MAX: usize = 64;
const LINKS_MAX: usize = 100;
/// Maximum CPUs of a host on QEMU's machine type.
const CPUS_MAX: u16 = 255;
const NODES_MAX: usize = 64;
/// Less memory is not enough to boot Linux with the lab's modules.
const HOST_MEMORY_MIN_BYTES: u64 = 256 << 20;
const NODE_MEMORY_MIN_BYTES: u64 = 64 << 20;
const SHARED_MIN_BYTES: u64 = 1 << 20;

/// Lab file: hosts, and the links and memory between them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabSpec {
    /// Time limit of `lab run` in seconds; none when absent.
    pub limit_s: Option<u64>,
    /// Its hosts, at least one.
    pub hosts: Vec<HostSpec>,
    /// Private networks between hosts.
    #[serde(default)]
    pub links: Vec<LinkSpec>,
    /// Memory regions that several hosts share.
    #[serde(default)]
    pub shared: Vec<SharedSpec>,
}

/// A host of a lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSpec {
    /// Name, unique in the lab; becomes its host name.
    pub name: String,
    /// CPUs; all of this machine's when absent.
    pub cpus: Option<u16>,
    /// Memory; when absent, a share of this machine's available memory.
    pub memory: Option<Size>,
    /// NUMA nodes; their memory and CPUs must add up to the host's.
    #[serde(default)]
    pub nodes: Vec<HostNodeSpec>,
}

/// A NUMA node of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostNodeSpec {
    /// Number of the host's CPUs, continuing from the previous node; a node may have none.
    pub cpus: u16,
    /// Memory of the node.
    pub memory: Size,
    /// Distance to each node in order, 10 being local; 10 and 20 when absent.
    pub distances: Option<Vec<u8>>,
}

/// Memory shared between hosts, as an ivshmem device on each.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedSpec {
    /// Size, a power of two.
    pub size: Size,
    /// Hosts that share it.
    pub hosts: Vec<String>,
}

impl LabSpec {
    /// A lab of one host with default values.
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

    /// Reads and checks a lab file's text; `source_name` is shown in errors. Never panics, whatever `text`
    /// is.
    pub fn parse(source_name: &str, text: &str) -> Result<Self, ConfigError> {
        let spec: Self =
            toml::from_str(text).map_err(|error| ConfigError::from_toml(source_name, text, &error))?;
        spec.check()
            .map_err(|fault| ConfigError::from_fault(source_name, text, &fault))?;
        Ok(spec)
    }

    fn check(&self) -> Result<(), Fault> {
        if self.hosts.is_empty() || self.hosts.len() > HOSTS_MAX {
            return Err(fault(
                &["hosts"],
                format!("{} hosts", self.hosts.len()),
                format!("a lab has from 1 to {HOSTS_MAX}, each a [[hosts]] table with a name"),
            ));
        }
        let mut names = HashSet::new();
        for (index, host) in self.hosts.iter().enumerate() {
            let at = ["hosts", &index.to_string()];
            host.check(&at)?;
            if !names.insert(host.name.as_str()) {
                return Err(fault(
                    &[&at[..], &["name"]].concat(),
                    format!("two hosts are named {}", host.name),
                    "rename one",
                ));
            }
        }
        if self.links.len() > LINKS_MAX {
            return Err(fault(
                &["links"],
                format!("{} links", self.links.len()),
                format!("{LINKS_MAX} at most"),
            ));
        }
        for (index, link) in self.links.iter().enumerate() {
            members(&["links", &index.to_string(), "hosts"], &link.hosts, &names)?;
        }
        for (index, shared) in self.shared.iter().enumerate() {
            members(&["shared", &index.to_string(), "hosts"], &shared.hosts, &names)?;
            if !shared.size.0.is_power_of_two() || shared.size.0 < SHARED_MIN_BYTES {
                return Err(fault(
                    &["shared", &index.to_string(), "size"],
                    "a size that shared memory can't have",
                    "a power of two, 1M at least, as \"256M\"",
                ));
            }
        }
        Ok(())
    }
}

/// Checks that each member is a host of the file, and named once.
fn members(at: &[&str], members: &[String], hosts: &HashSet<&str>) -> Result<(), Fault> {
    let mut seen = HashSet::new();
    for (index, member) in members.iter().enumerate() {
        let place = index.to_string();
        let at = [at, &[&place]].concat();
        if !hosts.contains(member.as_str()) {
            return Err(fault(
                &at,
                format!("there is no host {member:?}"),
                "name a host of this file",
            ));
        }
        if !seen.insert(member) {
            return Err(fault(&at, format!("{member:?} is named twice"), "name it once"));
        }
    }
    Ok(())
}

impl HostSpec {
    fn check(&self, at: &[&str]) -> Result<(), Fault> {
        let key = |name| [at, &[name]].concat();
        let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let name = &self.name;
        if name.is_empty() || name.len() > 63 || !name.bytes().all(valid) || name.starts_with('-') {
            return Err(fault(
                &key("name"),
                format!("{name:?} can't be a host's name"),
                "letters, digits and `-`, 63 at most, not starting with `-`",
            ));
        }
        if let Some(cpus) = self.cpus
            && !(1..=CPUS_MAX).contains(&cpus)
        {
            return Err(fault(
                &key("cpus"),
                format!("{cpus} CPUs"),
                format!("from 1 to {CPUS_MAX}"),
            ));
        }
        if self.memory.is_some_and(|memory| memory.0 < HOST_MEMORY_MIN_BYTES) {
            return Err(fault(
                &key("memory"),
                "too little memory for a host",
                "256M at least",
            ));
        }
        self.check_nodes(at)
    }

    fn check_nodes(&self, at: &[&str]) -> Result<(), Fault> {
        let key = |name| [at, &[name]].concat();
        if self.nodes.is_empty() {
            return Ok(());
        }
        if self.nodes.len() > NODES_MAX {
            return Err(fault(
                &key("nodes"),
                format!("{} nodes", self.nodes.len()),
                format!("{NODES_MAX} at most"),
            ));
        }
        let cpus: u32 = self.nodes.iter().map(|node| u32::from(node.cpus)).sum();
        if !(1..=u32::from(CPUS_MAX)).contains(&cpus) || self.cpus.is_some_and(|all| u32::from(all) != cpus) {
            return Err(fault(
                &key("nodes"),
                format!("the nodes have {cpus} CPUs together"),
                "make the nodes' cpus add up to the host's, or leave the host's out",
            ));
        }
        let memory = self
            .nodes
            .iter()
            .try_fold(0u64, |sum, node| sum.checked_add(node.memory.0));
        if memory.is_none() || self.memory.is_some_and(|all| Some(all.0) != memory) {
            return Err(fault(
                &key("nodes"),
                "the nodes have another amount of memory than the host",
                "make the nodes' memory add up to the host's, or leave the host's out",
            ));
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let place = index.to_string();
            if node.memory.0 < NODE_MEMORY_MIN_BYTES {
                return Err(fault(
                    &[&key("nodes")[..], &[&place, "memory"]].concat(),
                    "too little memory for a node",
                    "64M at least",
                ));
            }
            let wrong = |distances: &Vec<u8>| {
                let far = |(to, distance): (usize, &u8)| {
                    if to == index {
                        *distance != 10
                    } else {
                        *distance <= 10
                    }
                };
                distances.len() != self.nodes.len() || distances.iter().enumerate().any(far)
            };
            if node.distances.as_ref().is_some_and(wrong) {
                return Err(fault(
                    &[&key("nodes")[..], &[&place, "distances"]].concat(),
                    "distances that a node can't have",
                    "one for each node in order: 10 for itself, more for the others",
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the message, and the text under its caret.
    fn refused(text: &str) -> (String, String) {
        let error = LabSpec::parse("lab.toml", text).unwrap_err();
        let span = error.span.unwrap();
        (
            error.message,
            text[span.offset()..span.offset() + span.len()].to_string(),
        )
    }

    #[test]
    fn unknown_key_is_refused_with_its_place() {
        let (message, place) = refused("[[hosts]]\nname = \"a\"\ncpuz = 2\n");
        assert!(message.contains("cpuz"), "{message}");
        assert_eq!(place, "cpuz");
    }

    #[test]
    fn duplicate_host_name_is_refused_at_the_second_host() {
        let text = "[[hosts]]\nname = \"a\"\n[[hosts]]\nname = \"a\"\n";
        let error = LabSpec::parse("lab.toml", text).unwrap_err();
        assert!(error.message.contains("two hosts"));
        assert_eq!(error.span.unwrap().offset(), text.rfind("\"a\"").unwrap());
    }

    #[test]
    fn link_to_an_unknown_host_is_refused() {
        let (message, place) = refused("[[hosts]]\nname = \"a\"\n[[links]]\nhosts = [\"a\", \"b\"]\n");
        assert!(message.contains("no host \"b\""), "{message}");
        assert_eq!(place, "\"b\"");
    }

    #[test]
    fn link_has_the_delay_and_loss_of_its_file() {
        let hosts = "[[hosts]]\nname = \"a\"\n[[hosts]]\nname = \"b\"\n";
        let links =
            "links = [{ hosts = [\"a\", \"b\"], delay = \"2ms\", loss = \"1%\" }, { hosts = [\"a\"] }]\n";
        let spec = LabSpec::parse("lab.toml", &format!("{links}{hosts}")).unwrap();
        assert_eq!(spec.links[0].quality().to_string(), "delay 2ms, loss 1%");
        assert_eq!(spec.links[1].quality(), Quality::default());
    }

    #[test]
    fn invalid_delay_or_loss_is_refused() {
        for (key, wrong, help) in [
            (
                "delay",
                "\"2\"",
                "write a whole number and us, ms or s, as \"2ms\"",
            ),
            (
                "delay",
                "\"1h\"",
                "write a whole number and us, ms or s, as \"2ms\"",
            ),
            ("delay", "\"11s\"", "write \"10s\" at most"),
            ("delay", "2", "put it in quotes"),
            (
                "loss",
                "\"101%\"",
                "write a percentage from 0% to 100%, as \"1%\" or \"0.0001%\"",
            ),
            ("loss", "0.01", "put it in quotes"),
        ] {
            let text = format!("[[hosts]]\nname = \"a\"\n[[links]]\nhosts = [\"a\"]\n{key} = {wrong}\n");
            let error = LabSpec::parse("lab.toml", &text).unwrap_err();
            assert_eq!(error.help.as_deref(), Some(help), "{error}");
            let span = error.span.unwrap();
            assert_eq!(&text[span.offset()..span.offset() + span.len()], wrong);
        }
    }

    #[test]
    fn nodes_must_add_up() {
        let (message, place) =
            refused("[[hosts]]\nname = \"a\"\ncpus = 3\nnodes = [{ cpus = 1, memory = \"1G\" }]\n");
        assert!(message.contains("1 CPUs together"), "{message}");
        assert!(place.contains("1G"), "{place}");
    }

    #[test]
    fn distance_to_itself_other_than_ten_is_refused() {
        let node = "[[hosts.nodes]]\ncpus = 1\nmemory = \"1G\"\n";
        let (_, place) = refused(&format!(
            "[[hosts]]\nname = \"a\"\n{node}distances = [20, 10]\n{node}"
        ));
        assert_eq!(place, "[20, 10]");
    }

    #[test]
    fn shared_memory_must_be_a_power_of_two() {
        let (_, place) = refused("[[hosts]]\nname = \"a\"\n[[shared]]\nsize = \"3M\"\nhosts = [\"a\"]\n");
        assert_eq!(place, "\"3M\"");
    }
}
