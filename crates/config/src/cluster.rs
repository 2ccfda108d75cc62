//! A cluster file: the cells that a host is divided into, or several hosts.
//!
//! Unknown keys are errors. An error shows the file, the place and the mend. [`ClusterSpec::cells`] is what the file means
//! on a host, [`ClusterSpec::site`] what it says of the others; without a file, [`ClusterSpec::of_nodes`] makes a cell of
//! each NUMA node.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cpulist;
use crate::error::ConfigError;
use crate::validate::{Fault, fault};
use crate::vm::Size;

/// Cells of a cluster.
pub const CELLS_MAX: usize = 64;
/// Linux numbers CPUs below this.
const CPUS_MAX: usize = 8192;
/// Bytes of a host's name, as of a label of the domain name system.
const HOST_NAME_MAX: usize = 63;
/// How long a cell may be silent.
const SILENCE_MS: std::ops::RangeInclusive<u64> = 50..=60_000;
/// Where etcd is asked.
const ETCD_PORT: u16 = 2379;
/// The smallest VM fits.
const MEMORY_MIN_BYTES: u64 = 64 << 20;

/// A cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSpec {
    /// Its cells, numbered from 0.
    pub cells: Vec<CellSpec>,
    /// Its hosts; none when it is this one alone.
    #[serde(default)]
    pub hosts: Vec<HostSpec>,
    /// How several hosts agree which cells live.
    pub membership: Option<MembershipSpec>,
}

/// A host of several.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSpec {
    /// Its name: its host name, or what `--host` says.
    pub name: String,
    /// Where its cells are reached: the address, and the port of cell 0; cell N has the Nth after it.
    pub address: SocketAddr,
}

/// How several hosts agree which cells live.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MembershipSpec {
    /// The clients' URLs of an etcd; when absent, the first host runs one for trials.
    #[serde(default)]
    pub etcd: Vec<String>,
    /// The folder of the hosts' keys, from the file's own folder on.
    #[serde(default = "default_keys")]
    pub keys: PathBuf,
    /// After how many milliseconds without a word a cell of another host is taken for dead.
    #[serde(default = "default_silence")]
    pub silence_ms: u64,
}

impl Default for MembershipSpec {
    fn default() -> Self {
        Self {
            etcd: Vec::new(),
            keys: default_keys(),
            silence_ms: default_silence(),
        }
    }
}

fn default_keys() -> PathBuf {
    PathBuf::from("keys")
}

fn default_silence() -> u64 {
    200
}

/// What a host of a cluster of several knows of all of them.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Site {
    /// This host.
    pub here: String,
    /// All hosts.
    pub hosts: Vec<HostPlan>,
    /// The clients' URLs of their etcd.
    pub etcd: Vec<String>,
    /// Whether this host runs that etcd.
    pub runs_etcd: bool,
    /// The folder of keys.
    pub keys: PathBuf,
    /// After how many milliseconds without a word a cell of another host is taken for dead.
    pub silence_ms: u64,
}

/// A host and its cells.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct HostPlan {
    /// Its name.
    pub name: String,
    /// Where cell 0 would be reached.
    pub address: SocketAddr,
    /// Its cells.
    pub cells: Vec<u16>,
}

impl Site {
    /// The host of a cell.
    pub fn host_of(&self, cell: u16) -> Option<&HostPlan> {
        self.hosts.iter().find(|host| host.cells.contains(&cell))
    }

    /// Whether a cell is on another host.
    pub fn is_elsewhere(&self, cell: u16) -> bool {
        self.host_of(cell).is_some_and(|host| host.name != self.here)
    }
}

impl HostPlan {
    /// Where a cell of this host is reached.
    pub fn address_of(&self, cell: u16) -> SocketAddr {
        // Checked when the file was read.
        SocketAddr::new(self.address.ip(), self.address.port().saturating_add(cell))
    }
}

/// A cell: by NUMA nodes, by CPUs, or by CPUs of some nodes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellSpec {
    /// The host that it is on, when there are several.
    pub host: Option<String>,
    /// Its CPUs, as `0-3,8`; those of its nodes when absent.
    pub cpus: Option<String>,
    /// The NUMA nodes whose memory it gives out; those of its CPUs when absent, and without those all of its host's.
    pub nodes: Option<Vec<u32>>,
    /// How much memory it gives out; when absent an equal share of each node with the other cells of the node.
    pub memory: Option<Size>,
}

/// What a host has to give.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HostNodes(pub BTreeMap<u32, HostNode>);

/// A NUMA node of a host.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HostNode {
    /// The CPUs of it that this user may use, sorted.
    pub cpus: Vec<usize>,
    /// Its memory.
    pub memory_bytes: u64,
}

/// A cell on a host.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CellPlan {
    /// Its number in the cluster.
    pub number: u16,
    /// Its host, when there are several.
    pub host: Option<String>,
    /// Its CPUs, sorted.
    pub cpus: Vec<usize>,
    /// The NUMA nodes of its memory, sorted.
    pub nodes: Vec<u32>,
    /// How much of it the cell gives out.
    pub memory_bytes: u64,
}

impl ClusterSpec {
    /// A cell of each node that has CPUs.
    pub fn of_nodes(host: &HostNodes) -> Self {
        let with_cpus = host.0.iter().filter(|(_, node)| !node.cpus.is_empty());
        let cell = |(number, _): (&u32, &HostNode)| CellSpec {
            host: None,
            cpus: None,
            nodes: Some(vec![*number]),
            memory: None,
        };
        Self::on_one_host(with_cpus.map(cell).take(CELLS_MAX).collect())
    }

    /// That many cells: the nodes that have CPUs if there are as many, else as many parts of all CPUs, neighbours together.
    ///
    /// # Errors
    /// If there are fewer CPUs, or no cells are wanted.
    pub fn of_count(host: &HostNodes, count: u16) -> Result<Self, ConfigError> {
        let by_node = Self::of_nodes(host);
        let count = usize::from(count);
        if by_node.cells.len() == count {
            return Ok(by_node);
        }
        let cpus: Vec<usize> = host
            .0
            .values()
            .flat_map(|node| node.cpus.iter().copied())
            .collect();
        let most = cpus.len().min(CELLS_MAX);
        if !(1..=most).contains(&count) {
            return Err(ConfigError::from_flags(&fault(
                &["cells"],
                format!("{count} cells"),
                format!("this host has CPUs for 1 to {most}"),
            )));
        }
        let part = |index: usize| &cpus[index * cpus.len() / count..(index + 1) * cpus.len() / count];
        let cells = (0..count).map(|index| {
            let mut cpus = part(index).to_vec();
            cpus.sort_unstable();
            CellSpec {
                host: None,
                cpus: Some(cpulist::write(&cpus)),
                nodes: None,
                memory: None,
            }
        });
        Ok(Self::on_one_host(cells.collect()))
    }

    fn on_one_host(cells: Vec<CellSpec>) -> Self {
        Self {
            cells,
            hosts: Vec::new(),
            membership: None,
        }
    }

    /// Reads and checks a cluster file's text; `source_name` is shown in errors. Never panics, whatever `text` is.
    pub fn parse(source_name: &str, text: &str) -> Result<Self, ConfigError> {
        let spec: Self =
            toml::from_str(text).map_err(|error| ConfigError::from_toml(source_name, text, &error))?;
        spec.check()
            .map_err(|fault| ConfigError::from_fault(source_name, text, &fault))?;
        Ok(spec)
    }

    /// What it means on this host, which is called `here` if there are several. `text` is the file it was read from, for
    /// errors.
    pub fn cells(
        &self,
        host: &HostNodes,
        here: Option<&str>,
        source_name: &str,
        text: &str,
    ) -> Result<Vec<CellPlan>, ConfigError> {
        self.plan(host, here)
            .map_err(|fault| ConfigError::from_fault(source_name, text, &fault))
    }

    /// What the host called `here` has to know of the others; none if it is alone. `folder` is the file's.
    pub fn site(&self, here: &str, folder: &Path) -> Result<Option<Site>, ConfigError> {
        let Some(first) = self.hosts.first() else {
            return Ok(None);
        };
        if !self.hosts.iter().any(|host| host.name == here) {
            let known: Vec<&str> = self.hosts.iter().map(|host| &host.name[..]).collect();
            return Err(ConfigError::from_flags(&fault(
                &["host"],
                format!("the cluster has no host {here:?}"),
                format!("it has {}; name the one that this is", known.join(", ")),
            )));
        }
        let membership = self.membership.clone().unwrap_or_default();
        let own_etcd = format!("http://{}", SocketAddr::new(first.address.ip(), ETCD_PORT));
        let runs_etcd = membership.etcd.is_empty();
        let hosts = self.hosts.iter().map(|host| HostPlan {
            name: host.name.clone(),
            address: host.address,
            cells: (0..)
                .zip(&self.cells)
                .filter(|(_, cell)| cell.host.as_ref() == Some(&host.name))
                .map(|(number, _)| number)
                .collect(),
        });
        Ok(Some(Site {
            here: here.to_owned(),
            hosts: hosts.collect(),
            etcd: if runs_etcd {
                vec![own_etcd]
            } else {
                membership.etcd
            },
            runs_etcd: runs_etcd && here == first.name,
            keys: folder.join(membership.keys),
            silence_ms: membership.silence_ms,
        }))
    }

    fn check(&self) -> Result<(), Fault> {
        if self.cells.is_empty() || self.cells.len() > CELLS_MAX {
            return Err(fault(
                &["cells"],
                format!("{} cells", self.cells.len()),
                format!("a cluster has from 1 to {CELLS_MAX}, each a [[cells]] table"),
            ));
        }
        self.check_hosts()?;
        let mut taken: BTreeMap<(Option<&str>, usize), usize> = BTreeMap::new();
        for (index, cell) in self.cells.iter().enumerate() {
            let at = index.to_string();
            if self.hosts.is_empty() && cell.cpus.is_none() && cell.nodes.as_ref().is_none_or(Vec::is_empty) {
                return Err(fault(
                    &["cells", &at],
                    "a cell of nothing",
                    "name its CPUs (cpus = \"0-3\") or its NUMA nodes (nodes = [0])",
                ));
            }
            for cpu in cell.listed(&at)?.into_iter().flatten() {
                if let Some(other) = taken.insert((cell.host.as_deref(), cpu), index) {
                    return Err(fault(
                        &["cells", &at, "cpus"],
                        format!("CPU {cpu} is in cell {other} already"),
                        "give each CPU to one cell",
                    ));
                }
            }
            if cell.memory.is_some_and(|memory| memory.0 < MEMORY_MIN_BYTES) {
                return Err(fault(
                    &["cells", &at, "memory"],
                    "too little memory for a VM",
                    "64M at least",
                ));
            }
        }
        Ok(())
    }

    /// Each cell on a host there is, each host with a cell, and all within their bounds.
    fn check_hosts(&self) -> Result<(), Fault> {
        if self.hosts.is_empty() && self.membership.is_some() {
            return Err(fault(
                &["membership"],
                "membership of one host",
                "name the hosts, each a [[hosts]] table, or leave it out",
            ));
        }
        for (index, host) in self.hosts.iter().enumerate() {
            let at = index.to_string();
            let is_named = host.name.len() <= HOST_NAME_MAX
                && host.name.starts_with(|first: char| first.is_ascii_alphanumeric())
                && host.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
            if !is_named {
                return Err(fault(
                    &["hosts", &at, "name"],
                    format!("{:?} is no name of a host", host.name),
                    format!("letters, digits and `-`, {HOST_NAME_MAX} at most"),
                ));
            }
            let others = &self.hosts[..index];
            if let Some(first) = others.iter().position(|other| other.name == host.name) {
                return Err(fault(
                    &["hosts", &at, "name"],
                    format!("host {first} has this name already"),
                    "give each host its own name",
                ));
            }
            if let Some(first) = others
                .iter()
                .position(|other| other.address.ip() == host.address.ip())
            {
                return Err(fault(
                    &["hosts", &at, "address"],
                    format!("host {first} has this address already"),
                    "give each host its own address",
                ));
            }
            if host.address.port() == 0
                || usize::from(host.address.port()) + CELLS_MAX > usize::from(u16::MAX)
            {
                return Err(fault(
                    &["hosts", &at, "address"],
                    "no ports for its cells",
                    "choose a port from 1 to 65400: cell N has the Nth after it",
                ));
            }
            if !self
                .cells
                .iter()
                .any(|cell| cell.host.as_ref() == Some(&host.name))
            {
                return Err(fault(
                    &["hosts", &at],
                    format!("host {} has no cell", host.name),
                    "add a [[cells]] table that names it",
                ));
            }
        }
        for (index, cell) in self.cells.iter().enumerate() {
            let at = index.to_string();
            let known: Vec<&str> = self.hosts.iter().map(|host| &host.name[..]).collect();
            match &cell.host {
                None if self.hosts.is_empty() => {}
                None => {
                    return Err(fault(
                        &["cells", &at],
                        "a cell of no host",
                        format!("name its host, one of {}", known.join(", ")),
                    ));
                }
                Some(host) if known.contains(&&host[..]) => {}
                Some(host) => {
                    return Err(fault(
                        &["cells", &at, "host"],
                        format!("there is no host {host:?}"),
                        "each host is a [[hosts]] table with a name and an address",
                    ));
                }
            }
        }
        let membership = self.membership.iter();
        for url in membership.clone().flat_map(|membership| &membership.etcd) {
            if !url.starts_with("http://") {
                return Err(fault(
                    &["membership", "etcd"],
                    format!("{url:?} is no URL of an etcd that can be asked"),
                    "write http://ADDRESS:PORT",
                ));
            }
        }
        if membership
            .clone()
            .any(|membership| !SILENCE_MS.contains(&membership.silence_ms))
        {
            return Err(fault(
                &["membership", "silence_ms"],
                "too short or too long",
                format!("{} to {}", SILENCE_MS.start(), SILENCE_MS.end()),
            ));
        }
        Ok(())
    }

    fn plan(&self, host: &HostNodes, here: Option<&str>) -> Result<Vec<CellPlan>, Fault> {
        let mut plans: Vec<CellPlan> = Vec::new();
        let mut taken: BTreeMap<usize, u16> = BTreeMap::new();
        let own = self.cells.iter().enumerate();
        for (index, cell) in own.filter(|(_, cell)| cell.host.as_deref() == here) {
            let at = index.to_string();
            let number = u16::try_from(index).unwrap_or(u16::MAX);
            let plan = cell.plan(number, &at, host)?;
            for cpu in &plan.cpus {
                if let Some(other) = taken.insert(*cpu, number) {
                    return Err(fault(
                        &["cells", &at],
                        format!("CPU {cpu} is in cell {other} already"),
                        "give each CPU to one cell",
                    ));
                }
            }
            plans.push(plan);
        }
        self.share_memory(&mut plans, host)?;
        Ok(plans)
    }

    /// Gives each cell its memory: what its file says, or an equal share of what its nodes have left.
    fn share_memory(&self, plans: &mut [CellPlan], host: &HostNodes) -> Result<(), Fault> {
        for plan in &mut *plans {
            plan.memory_bytes = self.cells[usize::from(plan.number)]
                .memory
                .map_or(0, |memory| memory.0);
        }
        let users = |plans: &[CellPlan], node: &u32| {
            let uses = |plan: &&CellPlan| plan.nodes.contains(node);
            plans.iter().filter(uses).count().max(1) as u64
        };
        for index in 0..plans.len() {
            let nodes = plans[index].nodes.iter();
            let share =
                nodes.map(|node| host.0.get(node).map_or(0, |known| known.memory_bytes) / users(plans, node));
            let share: u64 = share.sum();
            if plans[index].memory_bytes == 0 {
                plans[index].memory_bytes = share;
            }
        }
        // Together they must not give out more than there is.
        for plan in plans.iter() {
            let group: Vec<u32> = plan.nodes.clone();
            let among = plans
                .iter()
                .filter(|other| other.nodes.iter().any(|node| group.contains(node)));
            let (mut nodes, mut wanted) = (group.clone(), 0_u64);
            for other in among {
                nodes.extend(&other.nodes);
                wanted = wanted.saturating_add(other.memory_bytes);
            }
            nodes.sort_unstable();
            nodes.dedup();
            let there: u64 = nodes
                .iter()
                .filter_map(|node| host.0.get(node))
                .map(|node| node.memory_bytes)
                .sum();
            if wanted > there {
                return Err(fault(
                    &["cells", &plan.number.to_string(), "memory"],
                    format!(
                        "the cells on its NUMA nodes want {} together, which have {}",
                        Size(wanted >> 20 << 20),
                        Size(there >> 20 << 20)
                    ),
                    "give them less, or leave `memory` out",
                ));
            }
        }
        Ok(())
    }
}

impl CellSpec {
    /// The CPUs that the file lists.
    fn listed(&self, at: &str) -> Result<Option<Vec<usize>>, Fault> {
        let Some(text) = &self.cpus else { return Ok(None) };
        let cpus = cpulist::parse_below(text, CPUS_MAX).ok_or_else(|| {
            fault(
                &["cells", at, "cpus"],
                format!("{text:?} is no list of CPUs"),
                "write it as \"0-3,8\"",
            )
        })?;
        Ok(Some(cpus))
    }

    fn plan(&self, number: u16, at: &str, host: &HostNodes) -> Result<CellPlan, Fault> {
        let all = || host.0.keys().copied().collect();
        let nodes = match (&self.nodes, &self.cpus) {
            (None, None) => all(),
            (nodes, _) => nodes.clone().unwrap_or_default(),
        };
        if let Some(unknown) = nodes.iter().find(|node| !host.0.contains_key(node)) {
            let known: Vec<String> = host.0.keys().map(u32::to_string).collect();
            return Err(fault(
                &["cells", at, "nodes"],
                format!("this host has no NUMA node {unknown}"),
                format!("it has {}", known.join(", ")),
            ));
        }
        let node_of = |cpu: &usize| {
            let mut having = host.0.iter().filter(|(_, node)| node.cpus.contains(cpu));
            having.next().map(|(number, _)| *number)
        };
        let cpus = match self.listed(at)? {
            Some(cpus) => cpus,
            None => {
                let of_nodes = nodes.iter().filter_map(|node| host.0.get(node));
                of_nodes.flat_map(|node| node.cpus.iter().copied()).collect()
            }
        };
        if let Some(unknown) = cpus.iter().find(|cpu| node_of(cpu).is_none()) {
            let all = host.0.values().flat_map(|node| node.cpus.iter().copied());
            let mut all: Vec<usize> = all.collect();
            all.sort_unstable();
            return Err(fault(
                &["cells", at, "cpus"],
                format!("this host has no CPU {unknown} that you may use"),
                format!("it has {}", cpulist::write(&all)),
            ));
        }
        if cpus.is_empty() {
            return Err(fault(
                &["cells", at, "nodes"],
                "its NUMA nodes have no CPU that you may use",
                "name a node that has CPUs, or CPUs beside the nodes",
            ));
        }
        let mut nodes = if self.nodes.is_some() || self.cpus.is_none() {
            nodes
        } else {
            cpus.iter().filter_map(node_of).collect()
        };
        nodes.sort_unstable();
        nodes.dedup();
        let mut cpus = cpus;
        cpus.sort_unstable();
        cpus.dedup();
        Ok(CellPlan {
            number,
            host: self.host.clone(),
            cpus,
            nodes,
            memory_bytes: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostNodes {
        let node = |cpus: &[usize]| HostNode {
            cpus: cpus.to_vec(),
            memory_bytes: 1 << 30,
        };
        HostNodes([(0, node(&[1, 2])), (1, node(&[3])), (2, node(&[]))].into())
    }

    /// The message, and the text its caret is under.
    fn refused(text: &str) -> (String, String) {
        let planned = ClusterSpec::parse("cluster.toml", text)
            .and_then(|spec| spec.cells(&host(), None, "cluster.toml", text));
        let error = planned.unwrap_err();
        let span = error.span.unwrap();
        (
            error.message,
            text[span.offset()..span.offset() + span.len()].to_owned(),
        )
    }

    fn planned(text: &str) -> Vec<CellPlan> {
        let spec = ClusterSpec::parse("cluster.toml", text).unwrap();
        spec.cells(&host(), None, "cluster.toml", text).unwrap()
    }

    #[test]
    fn without_a_file_each_node_with_cpus_is_a_cell() {
        let cells = ClusterSpec::of_nodes(&host())
            .cells(&host(), None, "", "")
            .unwrap();
        assert_eq!(cells.len(), 2);
        assert_eq!((&cells[0].cpus[..], &cells[0].nodes[..]), (&[1, 2][..], &[0][..]));
        assert_eq!((&cells[1].cpus[..], cells[1].memory_bytes), (&[3][..], 1 << 30));
    }

    #[test]
    fn a_number_of_cells_divides_nodes_or_cpus() {
        let cells = |count| {
            ClusterSpec::of_count(&host(), count)
                .unwrap()
                .cells(&host(), None, "", "")
                .unwrap()
        };
        assert_eq!(cells(2)[0].nodes, [0]);
        let cpus: Vec<Vec<usize>> = cells(3).into_iter().map(|cell| cell.cpus).collect();
        assert_eq!(cpus, [[1], [2], [3]]);
        assert_eq!(
            (&cells(1)[0].cpus[..], &cells(1)[0].nodes[..]),
            (&[1, 2, 3][..], &[0, 1][..])
        );
        for count in [0, 4] {
            let error = ClusterSpec::of_count(&host(), count).unwrap_err();
            assert_eq!(error.message, format!("--cells: {count} cells"));
        }
    }

    #[test]
    fn cells_on_one_node_share_its_memory() {
        let cells = planned("[[cells]]\ncpus = \"1\"\n[[cells]]\ncpus = \"2\"\n");
        assert!(
            cells
                .iter()
                .all(|cell| cell.memory_bytes == 512 << 20 && cell.nodes == [0])
        );
    }

    #[test]
    fn memory_of_a_node_without_cpus_can_be_a_cells() {
        let cells = planned("[[cells]]\ncpus = \"3\"\nnodes = [1, 2]\n");
        assert_eq!(cells[0].memory_bytes, 2 << 30);
    }

    #[test]
    fn wrong_cells_are_shown_with_their_place() {
        for (text, message, place) in [
            ("cells = []", "0 cells", "[]"),
            ("[[cells]]\n", "a cell of nothing", "[[cells]]"),
            ("[[cells]]\ncpus = \"x\"\n", "no list", "\"x\""),
            ("[[cells]]\ncpus = \"0\"\n", "no CPU 0", "\"0\""),
            ("[[cells]]\ncpu = \"1\"\n", "unknown key `cpu`", "cpu"),
            ("[[cells]]\nnodes = [7]\n", "no NUMA node 7", "[7]"),
            ("[[cells]]\nnodes = [2]\n", "have no CPU", "[2]"),
            (
                "[[cells]]\ncpus = \"1\"\n[[cells]]\ncpus = \"1-2\"\n",
                "in cell 0",
                "\"1-2\"",
            ),
            (
                "[[cells]]\nnodes = [0]\n[[cells]]\ncpus = \"2\"\n",
                "in cell 0",
                "[[cells]]",
            ),
            (
                "[[cells]]\ncpus = \"1\"\nmemory = \"1M\"\n",
                "too little",
                "\"1M\"",
            ),
            (
                "[[cells]]\ncpus = \"1\"\nmemory = \"2G\"\n",
                "want 2G together, which have 1G",
                "\"2G\"",
            ),
        ] {
            let (said, at) = refused(text);
            assert!(said.contains(message), "{text:?}: {said}");
            assert_eq!(at, place, "{text:?}");
        }
    }

    const TWO_HOSTS: &str = "[[hosts]]\nname = \"a\"\naddress = \"10.0.0.1:7400\"\n\
        [[hosts]]\nname = \"b\"\naddress = \"10.0.0.2:7400\"\n";

    #[test]
    fn each_host_plans_its_own_cells_and_knows_the_others() {
        let text = format!(
            "{TWO_HOSTS}[[cells]]\nhost = \"a\"\n[[cells]]\nhost = \"b\"\ncpus = \"1\"\n[[cells]]\nhost = \"b\"\ncpus = \"2\"\n"
        );
        let spec = ClusterSpec::parse("cluster.toml", &text).unwrap();
        let cells = |here| spec.cells(&host(), Some(here), "cluster.toml", &text).unwrap();
        assert_eq!((cells("a").len(), cells("b").len()), (1, 2));
        assert_eq!(
            (&cells("a")[0].nodes[..], cells("b")[1].number),
            (&[0, 1, 2][..], 2)
        );
        let site = spec.site("b", Path::new("/etc/cluster")).unwrap().unwrap();
        assert_eq!(site.etcd, ["http://10.0.0.1:2379"]);
        assert_eq!(
            (site.keys.to_str().unwrap(), site.silence_ms),
            ("/etc/cluster/keys", 200)
        );
        assert!(!site.runs_etcd && site.is_elsewhere(0) && !site.is_elsewhere(2) && !site.is_elsewhere(3));
        let other = site.host_of(2).unwrap();
        assert_eq!(other.address_of(2).to_string(), "10.0.0.2:7402");
        assert!(spec.site("a", Path::new("")).unwrap().unwrap().runs_etcd);
        let error = spec.site("c", Path::new("")).unwrap_err();
        assert_eq!(error.message, "--host: the cluster has no host \"c\"");
        let one = ClusterSpec::parse("cluster.toml", "[[cells]]\ncpus = \"1\"\n").unwrap();
        assert_eq!(one.site("a", Path::new("")).unwrap(), None);
    }

    #[test]
    fn wrong_hosts_are_shown_with_their_place() {
        let cell = "[[cells]]\nhost = \"a\"\n[[cells]]\nhost = \"b\"\n";
        for (text, message) in [
            (
                format!("{TWO_HOSTS}[[cells]]\nhost = \"a\"\n"),
                "host b has no cell",
            ),
            (
                format!("{TWO_HOSTS}{cell}[[cells]]\nhost = \"c\"\n"),
                "no host \"c\"",
            ),
            (
                format!("{TWO_HOSTS}{cell}[[cells]]\ncpus = \"1\"\n"),
                "a cell of no host",
            ),
            (
                format!("{TWO_HOSTS}{cell}").replace("\"b\"", "\"a\""),
                "has this name already",
            ),
            (
                format!("{TWO_HOSTS}{cell}").replace("\"b\"", "\"b.c\""),
                "no name of a host",
            ),
            (
                format!("{TWO_HOSTS}{cell}").replace("0.2:", "0.1:"),
                "has this address already",
            ),
            (
                format!("{TWO_HOSTS}{cell}").replace(":7400", ":65500"),
                "no ports",
            ),
            (
                format!("{TWO_HOSTS}{cell}").replace(":7400", ""),
                "socket address",
            ),
            (
                format!("{TWO_HOSTS}{cell}[membership]\netcd = [\"https://10.0.0.1:2379\"]\n"),
                "no URL of an etcd",
            ),
            (
                format!("{TWO_HOSTS}{cell}[membership]\nsilence_ms = 1\n"),
                "too short",
            ),
            (
                "[membership]\n[[cells]]\ncpus = \"1\"\n".to_owned(),
                "membership of one host",
            ),
            (
                "[[cells]]\ncpus = \"1\"\nhost = \"a\"\n".to_owned(),
                "no host \"a\"",
            ),
        ] {
            let error = ClusterSpec::parse("cluster.toml", &text).unwrap_err();
            assert!(error.message.contains(message), "{text}: {}", error.message);
            assert!(error.span.is_some(), "{text}: {}", error.message);
        }
    }

    #[test]
    fn cpus_are_written_as_they_are_read() {
        for list in ["0", "0-3,8", "1,3,5-6"] {
            assert_eq!(cpulist::write(&cpulist::parse_below(list, 10).unwrap()), list);
        }
    }
}
