//! Whether a VM's memory may be bound to some of the host's NUMA nodes.
//!
//! Memory that is bound to nodes comes from them alone: where the nodes have no room left, the kernel kills a
//! process. So the cell checks before it binds. [`HostMemory::read`] reads the host's memory, and [`check`]
//! decides.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use config::cluster::CellPlan;
use config::cpulist;
use config::vm::PagesSpec;
use config::{Size, VmSpec};
use registry::cluster::files::Files;
use registry::cluster::interface::LentMemory;
use registry::update::MemoryPages;
use registry::vms::Record;
use shard_api::launch::HomeMemory;

/// Maximum number of nodes of a kernel.
const NODES_MAX: usize = 1024;

/// A node of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeMemory {
    /// Size of a node's memory, bytes.
    total: u64,
    /// Bytes that are free, or that cached files can give up.
    available: u64,
    /// Free huge pages of the VM's page size.
    pool_free: u64,
}

/// The host's memory as a VM's processes may use it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostMemory {
    nodes: BTreeMap<u32, NodeMemory>,
    /// The nodes that the kernel lets the processes use (cpuset).
    allowed: Vec<u32>,
}

/// A VM whose memory is to be bound to nodes.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    bytes: u64,
    /// The size of a page of the host's pool, if the memory is of one.
    pool_kib: Option<u64>,
    /// The VM's present pages, if they are known of a running VM.
    present: Option<MemoryPages>,
}

/// A cell that gives a VM memory, and its nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lender {
    cell: u16,
    nodes: Vec<u32>,
}

impl Wanted {
    /// The request of a VM with these present pages, as far as they are known.
    pub(crate) fn of(spec: &VmSpec, present: Option<MemoryPages>) -> Self {
        Self {
            bytes: spec.memory.0,
            pool_kib: match spec.pages {
                PagesSpec::Small | PagesSpec::Transparent => None,
                PagesSpec::Huge2M => Some(2 << 10),
                PagesSpec::Huge1G => Some(1 << 20),
            },
            present,
        }
    }

    /// The size of a page of the host's pool, if the memory is of one.
    pub(crate) fn pool_kib(&self) -> Option<u64> {
        self.pool_kib
    }

    /// Bytes that these nodes must still provide.
    fn to_come(&self, nodes: &[u32]) -> u64 {
        let there = self.present.iter().flat_map(|present| {
            let on_them = present.nodes.iter().filter(|(node, _)| nodes.contains(node));
            on_them.map(|(_, pages)| pages.saturating_mul(present.page_kib << 10))
        });
        self.bytes.saturating_sub(there.sum())
    }
}

impl HostMemory {
    /// The memory of this host for the process `pid`. `pool_kib` is the size of a huge page.
    ///
    /// # Errors
    /// If the host's kernel has no nodes, or the process has ended.
    pub(crate) fn read(pid: i32, pool_kib: Option<u64>) -> io::Result<Self> {
        let folder = Path::new("/sys/devices/system/node");
        let with_memory = fs::read_to_string(folder.join("has_memory"));
        let with_memory = with_memory
            .map_err(|_| io::Error::other("the host's kernel has no NUMA nodes to choose from"))?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let nodes = list(&with_memory).into_iter().map(|node| {
            let folder = folder.join(format!("node{node}"));
            let meminfo = fs::read_to_string(folder.join("meminfo")).unwrap_or_default();
            let pool_free = pool_kib.map(|kib| {
                let path = folder.join(format!("hugepages/hugepages-{kib}kB/free_hugepages"));
                fs::read_to_string(path).ok()?.trim().parse().ok()
            });
            let pool_free = pool_free.flatten().unwrap_or(0);
            (
                node,
                NodeMemory {
                    pool_free,
                    ..node_memory(&meminfo)
                },
            )
        });
        Ok(Self {
            nodes: nodes.collect(),
            allowed: allowed(&status),
        })
    }
}

/// The cells that give a VM memory; none for a VM outside a cluster.
///
/// # Errors
/// If the cluster's plan can't be read.
pub(crate) fn lenders(record: &Record) -> io::Result<Vec<Lender>> {
    let Some(own) = record.cell else {
        return Ok(Vec::new());
    };
    let lent: u64 = record.borrowed.iter().map(|part| part.bytes).sum();
    let has_own = lent < record.spec.memory.0;
    let lenders = record.borrowed.iter().map(|part| part.cell);
    let cells: Vec<u16> = has_own.then_some(own).into_iter().chain(lenders).collect();
    let plan = Files::open()?.plan()?;
    let lender = |cell: u16| {
        let plan = plan.iter().find(|plan| plan.number == cell)?;
        let nodes = plan.nodes.clone();
        Some(Lender { cell, nodes })
    };
    Ok(cells.into_iter().filter_map(lender).collect())
}

/// The memory of a VM by home cell, its own cell first; empty if all of it is on the same nodes.
///
/// # Errors
/// If the cluster's plan can't be read.
pub(crate) fn homes(record: &Record) -> io::Result<Vec<HomeMemory>> {
    let Some(own) = record.cell else {
        return Ok(Vec::new());
    };
    let plan = Files::open()?.plan()?;
    Ok(homes_in(&plan, own, record.spec.memory.0, &record.borrowed))
}

fn homes_in(plan: &[CellPlan], own: u16, bytes: u64, borrowed: &[LentMemory]) -> Vec<HomeMemory> {
    let lent: u64 = borrowed.iter().map(|part| part.bytes).sum();
    let parts = std::iter::once((own, bytes.saturating_sub(lent)))
        .chain(borrowed.iter().map(|part| (part.cell, part.bytes)))
        .filter(|(_, bytes)| *bytes > 0);
    let home = |(cell, bytes): (u16, u64)| {
        let plan = plan.iter().find(|plan| plan.number == cell)?;
        let nodes = plan.nodes.clone();
        Some(HomeMemory { bytes, nodes })
    };
    // A cell that is not known any more leaves the whole to the VM's place.
    let homes: Vec<HomeMemory> = parts.map(home).collect::<Option<_>>().unwrap_or_default();
    match homes.split_first() {
        Some((first, rest)) if rest.iter().any(|home| home.nodes != first.nodes) => homes,
        _ => Vec::new(),
    }
}

/// A reason why a VM's memory may not be bound to nodes, with the help. Lists of nodes are as [`written`].
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NodesError {
    /// A node without memory, and those with memory.
    #[error("the host has no memory on node {node}; help: name some of {known}")]
    Unknown {
        /// Number of the NUMA node.
        node: u32,
        /// The host's nodes.
        known: String,
    },
    /// A node outside the cpuset of this process.
    #[error("the VM may not use memory of node {node} (cpuset); help: name some of {allowed}")]
    NotAllowed {
        /// Number of the NUMA node.
        node: u32,
        /// The nodes of the cpuset.
        allowed: String,
    },
    /// Too few free huge pages.
    #[error(
        "{pages} huge pages of {kib} KiB are to come to nodes {nodes}, where {free} are free; \
         help: add some by /sys/devices/system/node/node{first}/hugepages/hugepages-{kib}kB/nr_hugepages"
    )]
    HugePages {
        /// Pages that are needed.
        pages: u64,
        /// Length of a page, KiB.
        kib: u64,
        /// Numbers of the named NUMA nodes, as text.
        nodes: String,
        /// Pages that are free there.
        free: u64,
        /// The first of the nodes, for the path in the help.
        first: u32,
    },
    /// Too little memory.
    #[error(
        "{wanted} of memory are to come to nodes {nodes}, which have {there}; \
         help: name more nodes, or free memory there"
    )]
    TooLittle {
        /// Memory that is needed.
        wanted: Size,
        /// Numbers of the named NUMA nodes, as text.
        nodes: String,
        /// Sum of the memory of these nodes.
        there: Size,
    },
    /// A node of no cell that promised the memory.
    #[error("node {node} is not of the VM's place in the cluster; help: name some of {theirs}")]
    OtherPlace {
        /// Number of the NUMA node.
        node: u32,
        /// The nodes of the cells.
        theirs: String,
    },
    /// A cell that promised memory, but has no node in the list.
    #[error(
        "a part of its memory is promised by cell {cell}; help: name a node of that cell too, of {nodes}"
    )]
    CellWithoutNode {
        /// The cell's number.
        cell: u16,
        /// Numbers of the cell's NUMA nodes, as text.
        nodes: String,
    },
}

/// Decides whether a VM's memory may be bound to the nodes `asked`.
///
/// # Errors
/// The reason why not, with the help.
pub(crate) fn check(
    asked: &[u32],
    wanted: &Wanted,
    host: &HostMemory,
    lenders: &[Lender],
) -> Result<(), NodesError> {
    let known: Vec<u32> = host.nodes.keys().copied().collect();
    if let Some(&node) = asked.iter().find(|node| !known.contains(node)) {
        let known = written(&known);
        return Err(NodesError::Unknown { node, known });
    }
    if let Some(&node) = asked.iter().find(|node| !host.allowed.contains(node)) {
        let allowed = written(&host.allowed);
        return Err(NodesError::NotAllowed { node, allowed });
    }
    check_lenders(asked, lenders)?;
    let nodes = || asked.iter().filter_map(|node| host.nodes.get(node));
    let to_come = wanted.to_come(asked);
    if let Some(kib) = wanted.pool_kib {
        let pages = to_come.div_ceil(kib << 10);
        let free: u64 = nodes().map(|node| node.pool_free).sum();
        if pages > free {
            return Err(NodesError::HugePages {
                pages,
                kib,
                nodes: written(asked),
                free,
                first: asked[0],
            });
        }
        return Ok(());
    }
    let total: u64 = nodes().map(|node| node.total).sum();
    if wanted.bytes > total {
        return Err(too_little(wanted.bytes, asked, total));
    }
    let available: u64 = nodes().map(|node| node.available).sum();
    // A VM that starts takes its memory as its guest touches it.
    if wanted.present.is_some() && to_come > available {
        return Err(too_little(to_come, asked, available));
    }
    Ok(())
}

/// Checks that the nodes are those of the cells, each of which has promised its part of the memory.
fn check_lenders(asked: &[u32], lenders: &[Lender]) -> Result<(), NodesError> {
    if lenders.is_empty() {
        return Ok(());
    }
    let mut theirs: Vec<u32> = lenders.iter().flat_map(|lender| lender.nodes.clone()).collect();
    theirs.sort_unstable();
    theirs.dedup();
    if let Some(&node) = asked.iter().find(|node| !theirs.contains(node)) {
        let theirs = written(&theirs);
        return Err(NodesError::OtherPlace { node, theirs });
    }
    let gives_none = |lender: &&Lender| !lender.nodes.iter().any(|node| asked.contains(node));
    if let Some(Lender { cell, nodes }) = lenders.iter().find(gives_none) {
        return Err(NodesError::CellWithoutNode {
            cell: *cell,
            nodes: written(nodes),
        });
    }
    Ok(())
}

fn too_little(wanted: u64, nodes: &[u32], there: u64) -> NodesError {
    // Whole MiB read better.
    let mib = |bytes: u64| Size(bytes >> 20 << 20);
    NodesError::TooLittle {
        wanted: mib(wanted),
        nodes: written(nodes),
        there: mib(there),
    }
}

/// A list of nodes, as `0-1,4`.
pub(crate) fn written(nodes: &[u32]) -> String {
    let mut nodes: Vec<usize> = nodes.iter().map(|node| *node as usize).collect();
    nodes.sort_unstable();
    cpulist::write(&nodes)
}

fn list(text: &str) -> Vec<u32> {
    let nodes = cpulist::parse_below(text.trim(), NODES_MAX).unwrap_or_default();
    // All are below the limit.
    nodes.into_iter().map(|node| node as u32).collect()
}

/// The nodes in `/proc/PID/status`.
fn allowed(status: &str) -> Vec<u32> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    line.map_or_else(Vec::new, list)
}

/// The figures of `/sys/devices/system/node/node*/meminfo`, whose lines are `Node 0 MemFree: 12 kB`.
fn node_memory(meminfo: &str) -> NodeMemory {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.split_once(name));
        let kib = line.and_then(|(_, rest)| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.unwrap_or(0) << 10
    };
    // Memory files are in the page cache, and can't be dropped.
    let files = field(" FilePages:").saturating_sub(field(" Shmem:"));
    NodeMemory {
        total: field(" MemTotal:"),
        available: field(" MemFree:") + files,
        pool_free: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn borrowed_memory_is_that_of_the_lenders_nodes() {
        let plan = |number: u16, nodes: &[u32]| CellPlan {
            number,
            host: None,
            cpus: vec![usize::from(number)],
            nodes: nodes.to_vec(),
            memory_bytes: GIB,
        };
        let plans = [plan(0, &[0]), plan(1, &[1, 2]), plan(2, &[0])];
        let lent = |cell, bytes| LentMemory { cell, bytes };
        let home = |bytes, nodes: &[u32]| HomeMemory {
            bytes,
            nodes: nodes.to_vec(),
        };
        let homes = |own, borrowed: &[LentMemory]| homes_in(&plans, own, 10, borrowed);
        let expected = [home(6, &[1, 2]), home(3, &[0]), home(1, &[0])];
        assert_eq!(homes(1, &[lent(0, 3), lent(2, 1)]), expected);
        assert_eq!(homes(2, &[lent(1, 10)]), [], "all of it is on the same nodes");
        assert_eq!(homes(0, &[lent(2, 3)]), [], "the cells are on one node");
        assert_eq!(homes(0, &[lent(9, 3)]), [], "an unknown lender");
    }

    /// Nodes 0 and 1 with 4 GiB each, 3 of which are available; node 2 with memory that the VM may not use.
    fn host() -> HostMemory {
        let node = NodeMemory {
            total: 4 * GIB,
            available: 3 * GIB,
            pool_free: 100,
        };
        HostMemory {
            nodes: [(0, node), (1, node), (2, node)].into(),
            allowed: vec![0, 1],
        }
    }

    fn wanted(bytes: u64, present: &[(u32, u64)]) -> Wanted {
        Wanted {
            bytes,
            pool_kib: None,
            present: Some(MemoryPages {
                page_kib: 1 << 20,
                nodes: present.iter().copied().collect(),
            }),
        }
    }

    fn refused(asked: &[u32], wanted: &Wanted, lenders: &[Lender]) -> String {
        let why = check(asked, wanted, &host(), lenders).unwrap_err().to_string();
        assert!(why.contains("; help: "), "{why}");
        why
    }

    #[test]
    fn node_without_memory_or_that_the_kernel_withholds_is_refused() {
        let small = wanted(GIB, &[]);
        assert_eq!(check(&[0, 1], &small, &host(), &[]), Ok(()));
        assert_eq!(
            refused(&[0, 7], &small, &[]),
            "the host has no memory on node 7; help: name some of 0-2"
        );
        assert_eq!(
            refused(&[2], &small, &[]),
            "the VM may not use memory of node 2 (cpuset); help: name some of 0-1"
        );
    }

    #[test]
    fn memory_without_room_on_the_nodes_is_refused_and_present_pages_need_none() {
        assert_eq!(
            refused(&[1], &wanted(5 * GIB, &[]), &[]),
            "5G of memory are to come to nodes 1, which have 4G; help: name more nodes, or free memory there"
        );
        let why = refused(&[1], &wanted(4 * GIB, &[(0, 4)]), &[]);
        assert!(
            why.starts_with("4G of memory are to come to nodes 1, which have 3G"),
            "{why}"
        );
        assert_eq!(
            check(&[1], &wanted(4 * GIB, &[(0, 3), (1, 1)]), &host(), &[]),
            Ok(())
        );
        assert_eq!(check(&[0, 1], &wanted(5 * GIB, &[]), &host(), &[]), Ok(()));
        // A VM that starts.
        let starts = Wanted {
            present: None,
            ..wanted(4 * GIB, &[])
        };
        assert_eq!(check(&[1], &starts, &host(), &[]), Ok(()));
    }

    #[test]
    fn huge_pages_that_the_nodes_pools_have_not_are_refused() {
        let pool = |bytes, there| Wanted {
            bytes,
            pool_kib: Some(2048),
            present: Some(MemoryPages {
                page_kib: 2048,
                nodes: [(0, 40), (1, there)].into(),
            }),
        };
        assert_eq!(check(&[1], &pool(200 << 20, 0), &host(), &[]), Ok(()));
        let why = refused(&[1], &pool(202 << 20, 0), &[]);
        assert!(
            why.starts_with("101 huge pages of 2048 KiB are to come to nodes 1, where 100 are free"),
            "{why}"
        );
        assert!(why.contains("/node1/hugepages/hugepages-2048kB/"), "{why}");
        assert_eq!(check(&[1], &pool(202 << 20, 1), &host(), &[]), Ok(()));
    }

    #[test]
    fn nodes_of_a_place_are_those_of_the_cells_that_promised_the_memory_and_each_gives_its_part() {
        let lender = |cell, nodes: &[u32]| Lender {
            cell,
            nodes: nodes.to_vec(),
        };
        let small = wanted(GIB, &[]);
        let own = [lender(4, &[0])];
        assert_eq!(check(&[0], &small, &host(), &own), Ok(()));
        assert_eq!(
            refused(&[1], &small, &own),
            "node 1 is not of the VM's place in the cluster; help: name some of 0"
        );
        let with_lender = [lender(4, &[0]), lender(5, &[1])];
        assert_eq!(check(&[0, 1], &small, &host(), &with_lender), Ok(()));
        assert_eq!(
            refused(&[0], &small, &with_lender),
            "a part of its memory is promised by cell 5; help: name a node of that cell too, of 1"
        );
    }

    #[test]
    fn hosts_files_are_read_as_the_kernel_writes_them() {
        let meminfo = "Node 0 MemTotal:       8000 kB\nNode 0 MemFree:        1000 kB\n\
                       Node 0 FilePages:      700 kB\nNode 0 Shmem:          200 kB\n";
        let expected = NodeMemory {
            total: 8000 << 10,
            available: 1500 << 10,
            pool_free: 0,
        };
        assert_eq!(node_memory(meminfo), expected);
        assert_eq!(node_memory(""), NodeMemory::default());
        assert_eq!(allowed("Name:\tx\nMems_allowed_list:\t0-1,4\n"), [0, 1, 4]);
        assert_eq!(allowed("Name:\tx\n"), [0_u32; 0]);
        let own = i32::try_from(std::process::id()).unwrap();
        if Path::new("/sys/devices/system/node/has_memory").exists() {
            let host = HostMemory::read(own, Some(2048)).unwrap();
            let node = host.nodes[&host.allowed[0]];
            assert!(node.total >= node.available && node.available > 0, "{node:?}");
        }
    }
}
