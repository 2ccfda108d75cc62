//! How short of memory this process's host is: available memory, stalls for memory (PSI), and the resident
//! memory of a VM.
//!
//! A process in a control group with a limit of memory (a container, a service) has what that group has left,
//! if it is less. A cell whose memory is that of some nodes has what these have left: memory that is bound to
//! nodes comes from no other. Pools of huge pages are no memory that becomes short: their pages count as
//! neither total nor available.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use config::cpulist;

use crate::memory_use::GUEST_MEMORY;

/// The mount point of the control groups.
const GROUPS: &str = "/sys/fs/cgroup";
/// Folder of the host's NUMA nodes.
const NODES: &str = "/sys/devices/system/node";
/// Maximum number of nodes of a kernel.
const NODES_MAX: usize = 1024;
/// Part of a node's memory that the kernel keeps for itself, roughly.
const NODE_RESERVE_DIVISOR: u64 = 64;
/// Open files of a shard that are searched for the guest's memory, at most: a shard that a guest controls may
/// have any number.
const FILES_MAX: usize = 256;

/// Memory of the host, or of the control group that limits this process further.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPressure {
    /// Memory without pools of huge pages, bytes.
    pub total_bytes: u64,
    /// Memory that programs can have without paging by the host, bytes.
    pub available_bytes: u64,
    /// Shared memory in use: guests' memory, and files in memory, bytes.
    pub shared_bytes: u64,
    /// Part of the last 10 s in which some task was stalled for memory, hundredths of a percent; 0 where the
    /// kernel does not count it.
    pub stalled_centipercent: u32,
}

impl MemoryPressure {
    /// Reads the figures of now, for memory of these NUMA nodes; of those that this process may use if there
    /// are none.
    ///
    /// # Errors
    /// If `/proc/meminfo` can't be read or lacks a figure.
    pub fn now(nodes: &[u32]) -> io::Result<Self> {
        let host = Self::of_host(
            &fs::read_to_string("/proc/meminfo")?,
            &fs::read_to_string("/proc/pressure/memory").unwrap_or_default(),
        )?;
        let nodes = match nodes {
            [] => allowed_nodes(&fs::read_to_string("/proc/self/status").unwrap_or_default()),
            nodes => nodes.to_vec(),
        };
        let host = match Self::of_nodes(Path::new(NODES), &nodes) {
            Some(nodes) => host.tighter(Self {
                stalled_centipercent: host.stalled_centipercent,
                ..nodes
            }),
            None => host,
        };
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Ok(groups(Path::new(GROUPS), &own)
            .filter_map(|group| Self::of_group(&group))
            .fold(host, Self::tighter))
    }

    /// Parses the host's figures.
    fn of_host(meminfo: &str, pressure: &str) -> io::Result<Self> {
        let bytes = |name: &str| {
            let line = meminfo
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
            Some(kib.saturating_mul(1024))
        };
        let missing = || io::Error::other("/proc/meminfo lacks MemTotal or MemAvailable");
        Ok(Self {
            total_bytes: bytes("MemTotal")
                .ok_or_else(missing)?
                // Kernels before 5.0 have no sum of all pools.
                .saturating_sub(bytes("Hugetlb").unwrap_or(0)),
            available_bytes: bytes("MemAvailable").ok_or_else(missing)?,
            shared_bytes: bytes("Shmem").unwrap_or(0),
            stalled_centipercent: stalled(pressure),
        })
    }

    /// Reads the figures of some nodes together; none if they are all nodes of the host, or one is unknown.
    fn of_nodes(folder: &Path, nodes: &[u32]) -> Option<Self> {
        let is_node = |name: &str| {
            name.strip_prefix("node")
                .is_some_and(|number| number.parse::<u32>().is_ok())
        };
        let all = fs::read_dir(folder).ok()?.flatten();
        let all = all
            .filter(|entry| entry.file_name().to_str().is_some_and(is_node))
            .count();
        if nodes.is_empty() || nodes.len() >= all {
            return None;
        }
        let mut sum = Self::default();
        for node in nodes {
            let node = folder.join(format!("node{node}"));
            let of_node = node_figures(&fs::read_to_string(node.join("meminfo")).ok()?, pool_bytes(&node));
            sum.total_bytes = sum.total_bytes.saturating_add(of_node.total_bytes);
            sum.available_bytes = sum.available_bytes.saturating_add(of_node.available_bytes);
            sum.shared_bytes = sum.shared_bytes.saturating_add(of_node.shared_bytes);
        }
        Some(sum)
    }

    /// Reads the figures of a control group; none if it has no limit of memory.
    fn of_group(group: &Path) -> Option<Self> {
        let read = |name: &str| fs::read_to_string(group.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let limit = number("memory.max")?;
        let used = number("memory.current")?;
        let stat = read("memory.stat").unwrap_or_default();
        let of_stat = |key: &str| {
            let value = |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.parse::<u64>().ok();
            stat.lines().find_map(value).unwrap_or(0)
        };
        // The kernel drops these before it kills a process of the group.
        let reclaimable = of_stat("inactive_file").saturating_add(of_stat("slab_reclaimable"));
        Some(Self {
            total_bytes: limit,
            available_bytes: limit.saturating_sub(used).saturating_add(reclaimable).min(limit),
            shared_bytes: of_stat("shmem"),
            stalled_centipercent: stalled(&read("memory.pressure").unwrap_or_default()),
        })
    }

    /// Returns the one with less available memory.
    fn tighter(self, other: Self) -> Self {
        match other.available_bytes < self.available_bytes {
            true => other,
            false => self,
        }
    }
}

/// The nodes whose memory a process may use (cpuset), by its `/proc` file `status`; none if it has no list.
fn allowed_nodes(status: &str) -> Vec<u32> {
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    let nodes = list.and_then(|list| cpulist::parse_below(list.trim(), NODES_MAX));
    nodes
        .into_iter()
        .flatten()
        .filter_map(|node| u32::try_from(node).ok())
        .collect()
}

/// Parses the file `meminfo` of a node, whose pools of huge pages have so many bytes.
fn node_figures(meminfo: &str, pool_bytes: u64) -> MemoryPressure {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.split_once(name));
        let kib = line.and_then(|(_, rest)| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.unwrap_or(0).saturating_mul(1024)
    };
    let total = bytes(" MemTotal:");
    // Files in memory are in the page cache, and can't be dropped.
    let files = bytes(" FilePages:").saturating_sub(bytes(" Shmem:"));
    let free = bytes(" MemFree:").saturating_add(files);
    MemoryPressure {
        total_bytes: total.saturating_sub(pool_bytes),
        available_bytes: free.saturating_sub(total / NODE_RESERVE_DIVISOR),
        shared_bytes: bytes(" Shmem:"),
        stalled_centipercent: 0,
    }
}

/// Bytes of the pools of huge pages of a node.
fn pool_bytes(node: &Path) -> u64 {
    let pools = fs::read_dir(node.join("hugepages"))
        .into_iter()
        .flatten()
        .flatten();
    let bytes = |pool: fs::DirEntry| {
        let name = pool.file_name();
        let kib: u64 = name
            .to_str()?
            .strip_prefix("hugepages-")?
            .strip_suffix("kB")?
            .parse()
            .ok()?;
        let pages = fs::read_to_string(pool.path().join("nr_hugepages")).ok()?;
        Some(
            pages
                .trim()
                .parse::<u64>()
                .ok()?
                .saturating_mul(kib)
                .saturating_mul(1024),
        )
    };
    pools.filter_map(bytes).fold(0, u64::saturating_add)
}

/// The control groups of a process below `root`, the innermost first, by its `/proc` file `cgroup`.
fn groups<'a>(root: &'a Path, cgroup: &str) -> impl Iterator<Item = PathBuf> + use<'a> {
    let own = cgroup.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = own.map(|path| root.join(path)).unwrap_or_else(|| root.to_owned());
    let mut next = Some(own);
    std::iter::from_fn(move || {
        let group = next.take()?;
        // A path that leaves the root is none of this mount's.
        let below = group.starts_with(root) && group != root;
        next = below.then(|| group.parent().map(Path::to_owned)).flatten();
        Some(group)
    })
}

/// The share of the last 10 s with some stalled task, of a file of PSI, hundredths of a percent.
fn stalled(pressure: &str) -> u32 {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "));
    let average = some.and_then(|line| {
        line.split_whitespace()
            .find_map(|word| word.strip_prefix("avg10="))
    });
    let percent = average.and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
    // Saturates, and NaN is 0.
    (percent * 100.0) as u32
}

/// Memory of a shard's guest that is in the host's memory, mapped or not, by the kernel's count, bytes; none
/// if the shard has ended.
///
/// Where this user may not look at the shard's open files, pages that the shard has not mapped are missing.
pub fn guest_resident_bytes(shard: i32) -> Option<u64> {
    allocated(shard).or_else(|| mapped(shard))
}

/// Bytes of the file with the guest's memory.
fn allocated(shard: i32) -> Option<u64> {
    let files = fs::read_dir(format!("/proc/{shard}/fd")).ok()?;
    let file = files.take(FILES_MAX).flatten().find(|file| {
        fs::read_link(file.path()).is_ok_and(|name| name.to_string_lossy().starts_with(GUEST_MEMORY))
    })?;
    let blocks = fs::metadata(file.path()).ok()?.blocks();
    Some(blocks.saturating_mul(512))
}

/// Bytes of shared memory that a process has mapped.
fn mapped(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       16000000 kB\nMemFree:          200000 kB\n\
                           MemAvailable:    1000000 kB\nShmem:            500000 kB\n\
                           HugePages_Total:    4000\nHugetlb:         8192000 kB\n";
    const PSI: &str = "some avg10=12.34 avg60=0.10 avg300=0.00 total=12\n\
                       full avg10=99.00 avg60=0.00 avg300=0.00 total=1\n";

    #[test]
    fn pools_of_huge_pages_are_no_memory_that_becomes_short() {
        let host = MemoryPressure::of_host(MEMINFO, PSI).unwrap();
        assert_eq!(host.total_bytes, (16_000_000 - 8_192_000) << 10);
        assert_eq!(
            (host.available_bytes, host.shared_bytes),
            (1_000_000 << 10, 500_000 << 10)
        );
        assert_eq!(host.stalled_centipercent, 1234);
        assert!(MemoryPressure::of_host("MemTotal: 5 kB\n", "").is_err());
        for wrong in [
            "",
            "some avg10=\n",
            "some avg10=NaN\n",
            "full avg10=5.00\n",
            "some avg10=-1\n",
        ] {
            assert_eq!(stalled(wrong), 0, "{wrong:?}");
        }
    }

    #[test]
    fn nodes_of_a_cell_count_alone_where_the_host_has_more() {
        let root = tempfile::tempdir().unwrap();
        for node in 0..3 {
            let pool = root.path().join(format!("node{node}/hugepages/hugepages-2048kB"));
            fs::create_dir_all(&pool).unwrap();
            fs::write(pool.join("nr_hugepages"), "100\n").unwrap();
            let field = |name: &str, mib: u64| format!("Node {node} {name}: {:>9} kB\n", mib << 10);
            let meminfo = [
                field("MemTotal", 640),
                field("MemFree", 100 + node),
                field("FilePages", 50),
                field("Shmem", 20),
            ];
            fs::write(root.path().join(format!("node{node}/meminfo")), meminfo.concat()).unwrap();
        }
        let of = |nodes: &[u32]| MemoryPressure::of_nodes(root.path(), nodes);
        let expected = MemoryPressure {
            // Without the pool of 200 MiB on each.
            total_bytes: 880 << 20,
            // 10 MiB of each are the kernel's.
            available_bytes: (100 + 30 - 10 + 102 + 30 - 10) << 20,
            shared_bytes: 40 << 20,
            stalled_centipercent: 0,
        };
        assert_eq!(of(&[0, 2]), Some(expected));
        assert_eq!(
            allowed_nodes("Mems_allowed:\t5\nMems_allowed_list:\t0,2\n"),
            [0, 2]
        );
        assert!(allowed_nodes("").is_empty());
        for none in [&[][..], &[0, 1, 2], &[7]] {
            assert_eq!(of(none), None, "{none:?}");
        }
    }

    #[test]
    fn control_group_with_less_left_than_the_host_counts() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("machine/service");
        fs::create_dir_all(&group).unwrap();
        let put = |folder: &Path, name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        // No limit of its own, below one that has a limit.
        put(&group, "memory.max", "max\n");
        let machine = root.path().join("machine");
        put(&machine, "memory.max", "1000000\n");
        put(&machine, "memory.current", "900000\n");
        put(
            &machine,
            "memory.stat",
            "anon 1\ninactive_file 50000\nshmem 300000\nslab_reclaimable 1000\n",
        );
        put(&machine, "memory.pressure", PSI);
        let found: Vec<PathBuf> = groups(root.path(), "12:cpu:/x\n0::/machine/service\n").collect();
        assert_eq!(found, [group, machine, root.path().to_owned()]);
        let limited: Vec<_> = found
            .iter()
            .filter_map(|group| MemoryPressure::of_group(group))
            .collect();
        let expected = MemoryPressure {
            total_bytes: 1_000_000,
            available_bytes: 151_000,
            shared_bytes: 300_000,
            stalled_centipercent: 1234,
        };
        assert_eq!(limited, [expected]);
        let host = MemoryPressure::of_host(MEMINFO, "").unwrap();
        assert_eq!(host.tighter(expected), expected);
        assert_eq!(expected.tighter(host), expected);
        for outside in ["", "0::/\n", "0::/../other\n"] {
            assert!(groups(root.path(), outside).count() <= 3, "{outside:?}");
        }
    }

    #[test]
    fn this_hosts_figures_are_read() {
        let now = MemoryPressure::now(&[]).unwrap();
        assert!(
            now.available_bytes > 0 && now.available_bytes <= now.total_bytes,
            "{now:?}"
        );
    }

    #[test]
    fn guests_memory_is_counted_mapped_or_not() {
        use shard_api::launch::Pages;
        use std::os::unix::fs::FileExt;
        let file = shard_api::memory::guest_file(Pages::Small, 64 << 20).unwrap();
        file.write_all_at(&[1; 8 << 12], 1 << 20).unwrap();
        let own = std::process::id() as i32;
        assert_eq!(allocated(own), Some(8 << 12));
        assert!(mapped(own).is_some());
        assert_eq!(guest_resident_bytes(i32::MAX), None);
    }
}
