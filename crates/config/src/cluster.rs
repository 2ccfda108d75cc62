//! A cluster file: the cells of one host or of several hosts.
//!
//! Unknown keys are errors. An error shows the file, the place and the help. [`ClusterSpec::cells`] resolves
//! the file for one host, and [`ClusterSpec::site`] returns its data about the other hosts. Without a file,
//! [`ClusterSpec::of_nodes`] makes a cell of each NUMA node.

mod borrowing;
mod change;
mod hosts;
mod networks;
mod overlap;
mod pressure;
mod regions;
mod scheduling;
#[cfg(test)]
mod tests;
mod users;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::cpulist;
use crate::error::ConfigError;
use crate::fault::{Fault, fault};
use crate::size::Size;

pub use borrowing::BorrowingSpec;
pub use change::SiteChange;
pub use hosts::{ETCD_KEYS, HostPlan, HostSpec, MembershipSpec, OnLost, Site, SpanTransport};
pub use networks::NetworkSpec;
pub use overlap::overlap;
pub use pressure::PressureSpec;
pub(crate) use regions::check_region_name;
pub use regions::{REGION_STEP_BYTES, RegionAccess, RegionSpec};
pub use scheduling::{CpuScheduler, SchedulingSpec};
pub use users::{UserPlan, UserSpec};

/// Maximum number of cells of a cluster.
pub const CELLS_MAX: usize = 64;
/// Linux's CPU numbers are below this.
const CPUS_MAX: usize = 8192;
/// Memory of the smallest VM.
const MEMORY_MIN_BYTES: u64 = 64 << 20;

/// Cluster file: the cells of all hosts, and how they form one cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSpec {
    /// Its cells, numbered from 0.
    pub cells: Vec<CellSpec>,
    /// Whether cells may have CPUs in common, for tests of more cells than a host has CPUs.
    #[serde(default)]
    pub shared_cpus: bool,
    /// Its hosts; none for a single host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostSpec>,
    /// Agreement of several hosts on the live cells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub membership: Option<MembershipSpec>,
    /// Borrowing of memory that begins by itself; as measured on each host when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub borrowing: Option<BorrowingSpec>,
    /// Reaction to a shortage of the host's memory; by the host's memory when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pressure: Option<PressureSpec>,
    /// Scheduler of the CPUs of each host's cells; Linux's when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<SchedulingSpec>,
    /// Users of this host that it admits in addition to its owner.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<UserSpec>,
    /// Regions of memory that its VMs share.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<RegionSpec>,
    /// Networks of its VMs' cards of a subnet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NetworkSpec>,
}

/// A cell: by NUMA nodes, by CPUs, or by CPUs of some nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellSpec {
    /// Its host, when there are several.
    pub host: Option<String>,
    /// Its CPUs, as `0-3,8`; those of its nodes when absent.
    pub cpus: Option<String>,
    /// NUMA nodes whose memory it manages; those of its CPUs when absent, or all of its host's without those.
    pub nodes: Option<Vec<u32>>,
    /// Memory that it manages; when absent, an equal share of each node with the other cells of the node.
    pub memory: Option<Size>,
    /// Whether the cell's host has left the cluster: its number is never reused.
    #[serde(default, skip_serializing_if = "is_false")]
    pub left: bool,
}

/// Resources of a host.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HostNodes(pub BTreeMap<u32, HostNode>);

/// A NUMA node of a host.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HostNode {
    /// Its CPUs that this user may use, sorted.
    pub cpus: Vec<usize>,
    /// Memory of the node, bytes.
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
    /// Memory of these nodes that the cell manages, in bytes.
    pub memory_bytes: u64,
}

impl ClusterSpec {
    /// Makes a cell of each node that has CPUs.
    pub fn of_nodes(host: &HostNodes) -> Self {
        let with_cpus = host.0.iter().filter(|(_, node)| !node.cpus.is_empty());
        let cell = |(number, _): (&u32, &HostNode)| CellSpec {
            host: None,
            cpus: None,
            nodes: Some(vec![*number]),
            memory: None,
            left: false,
        };
        Self::on_one_host(with_cpus.map(cell).take(CELLS_MAX).collect())
    }

    /// Makes `count` cells: the nodes that have CPUs if there are as many, else equal groups of neighbouring
    /// CPUs.
    ///
    /// # Errors
    /// If there are fewer CPUs, or `count` is 0.
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
                left: false,
            }
        });
        Ok(Self::on_one_host(cells.collect()))
    }

    fn on_one_host(cells: Vec<CellSpec>) -> Self {
        Self {
            cells,
            shared_cpus: false,
            hosts: Vec::new(),
            membership: None,
            borrowing: None,
            pressure: None,
            scheduling: None,
            users: Vec::new(),
            shared: Vec::new(),
            networks: Vec::new(),
        }
    }

    /// Reads and checks a cluster file's text; `source_name` is shown in errors. Never panics, whatever
    /// `text` is.
    pub fn parse(source_name: &str, text: &str) -> Result<Self, ConfigError> {
        let spec: Self =
            toml::from_str(text).map_err(|error| ConfigError::from_toml(source_name, text, &error))?;
        spec.check()
            .map_err(|fault| ConfigError::from_fault(source_name, text, &fault))?;
        Ok(spec)
    }

    /// Resolves the file for this host, which is `here` if there are several. `text` is the file's text, for
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

    /// Numbers of the cells without `memory`, which get a share of their nodes' memory.
    pub fn cells_with_shares(&self) -> BTreeSet<u16> {
        let numbered = (0..).zip(&self.cells);
        numbered
            .filter(|(_, cell)| cell.memory.is_none())
            .map(|(number, _)| number)
            .collect()
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
        self.check_users()?;
        self.check_borrowing()?;
        self.check_pressure()?;
        self.check_scheduling()?;
        self.check_regions()?;
        self.check_networks()?;
        let mut taken: BTreeMap<(Option<&str>, usize), usize> = BTreeMap::new();
        for (index, cell) in self.cells.iter().enumerate().filter(|(_, cell)| !cell.left) {
            let at = index.to_string();
            if self.hosts.is_empty() && cell.cpus.is_none() && cell.nodes.as_ref().is_none_or(Vec::is_empty) {
                return Err(fault(
                    &["cells", &at],
                    "a cell of nothing",
                    "name its CPUs (cpus = \"0-3\") or its NUMA nodes (nodes = [0])",
                ));
            }
            for cpu in cell.listed(&at)?.into_iter().flatten() {
                if let Some(other) = taken.insert((cell.host.as_deref(), cpu), index)
                    && !self.shared_cpus
                {
                    return Err(fault(
                        &["cells", &at, "cpus"],
                        format!("CPU {cpu} is in cell {other} already"),
                        "give each CPU to one cell; for tests, `shared_cpus = true` lets cells share CPUs",
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

    fn plan(&self, host: &HostNodes, here: Option<&str>) -> Result<Vec<CellPlan>, Fault> {
        let mut plans: Vec<CellPlan> = Vec::new();
        let mut taken: BTreeMap<usize, u16> = BTreeMap::new();
        let own = self.cells.iter().enumerate();
        for (index, cell) in own.filter(|(_, cell)| !cell.left && cell.host.as_deref() == here) {
            let at = index.to_string();
            let number = u16::try_from(index).unwrap_or(u16::MAX);
            let plan = cell.plan(number, &at, host)?;
            for cpu in &plan.cpus {
                if let Some(other) = taken.insert(*cpu, number)
                    && !self.shared_cpus
                {
                    return Err(fault(
                        &["cells", &at],
                        format!("CPU {cpu} is in cell {other} already"),
                        "give each CPU to one cell; for tests, `shared_cpus = true` lets cells share CPUs",
                    ));
                }
            }
            plans.push(plan);
        }
        self.share_memory(&mut plans, host)?;
        Ok(plans)
    }

    /// Assigns memory to each cell: the file's amount, or an equal share of its nodes' unassigned memory.
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
        // Together they must not have more memory than the nodes.
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

/// Serde predicate to skip false values.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(value: &bool) -> bool {
    !value
}

impl CellSpec {
    /// CPUs that the file lists.
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
