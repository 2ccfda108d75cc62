//! The record of a running VM.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use policy::cpu::dependency::{Dependencies, Use};
use serde::{Deserialize, Serialize};

use crate::cluster::admission::Limits;
use crate::cluster::interface::{BorrowedCpu, LentMemory, RegionGrant};
use crate::monitor::NameRules;
use crate::share_group::ShareGroup;

/// Name of the record's file in a VM's directory.
pub(super) const FILE: &str = "vm.json";

/// Default time limit of a boot, from its start until the guest's agent replies, in seconds.
pub const BOOT_LIMIT_S: u64 = 120;

/// Last boot of a VM's guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Boot {
    /// Time limit of a boot, from its start until the agent replies, in seconds.
    pub limit_s: u64,
    /// Time of the last start or reboot, in seconds since 1970; none before the first start.
    #[serde(default)]
    pub begun_unix_s: Option<u64>,
}

impl Default for Boot {
    fn default() -> Self {
        Self {
            limit_s: BOOT_LIMIT_S,
            begun_unix_s: None,
        }
    }
}

/// The record of a running VM, which is `vm.json` in its directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The VM's name.
    pub name: String,
    /// State of its vCPUs.
    pub state: State,
    /// The process id of its monitor.
    pub monitor_pid: u32,
    /// The process id of its shard, while there is one.
    pub shard_pid: Option<i32>,
    /// The process id of its keeper, while it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeper_pid: Option<i32>,
    /// Process ids of its network processes: passt and frame filters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub card_pids: Vec<u32>,
    /// Process ids of its secondary shards, when it spans cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub part_pids: Vec<i32>,
    /// Start time, in seconds since 1970.
    pub started_unix_s: u64,
    /// Number of boots, reboots included.
    pub boots: u32,
    /// The last boot.
    #[serde(default)]
    pub boot: Boot,
    /// Guest address on the socket device.
    pub cid: u32,
    /// Its cell, in a cluster of its user's.
    #[serde(default)]
    pub cell: Option<u16>,
    /// Its placement in the host's cluster, which root owns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_place: Option<HostPlace>,
    /// Memory that its cell borrowed for it, by lender.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowed: Vec<LentMemory>,
    /// Its vCPUs on CPUs of other cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowed_cpus: Vec<BorrowedCpu>,
    /// Shared regions that it was granted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub regions: Vec<RegionGrant>,
    /// Its shards, the home shard first, when it spans cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub span: Vec<policy::span::Part>,
    /// Layers of the sandbox that could not be applied.
    pub sandbox_missing: Vec<String>,
    /// Kernel cookies of the cores that it runs on alone, one per shard; none without `core_scheduling`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub core_cookies: Vec<u64>,
    /// Names of its disks whose writes wait for space on the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub full_disks: Vec<String>,
    /// Whether it is paused.
    #[serde(default)]
    pub paused: bool,
    /// Group whose VMs may map the same pages of files; none outside any.
    #[serde(default)]
    pub share_group: Option<ShareGroup>,
    /// Its files that VMs of another group map; it reads copies of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept_apart: Vec<PathBuf>,
    /// User id of the API's member that started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<u32>,
    /// Rules by which its files were opened, if its names came from another user or another host. They hold
    /// for its clones, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<NameRules>,
    /// CPUs of pinned vCPUs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pins: BTreeMap<u8, Vec<usize>>,
    /// Cell of each of these pins, if the VM spans cells.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pin_cells: BTreeMap<u8, u16>,
    /// CPUs of pins that were dropped, and the reason, by vCPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dropped_pins: BTreeMap<u8, String>,
    /// Its current spec, with the changes since its start.
    pub spec: config::VmSpec,
}

impl Record {
    /// Creates the record of a VM that this process starts. `cid` is the guest's address on the socket
    /// device.
    pub fn new(name: String, spec: config::VmSpec, cid: u32) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            name,
            state: State::Starting,
            monitor_pid: std::process::id(),
            shard_pid: None,
            keeper_pid: None,
            card_pids: Vec::new(),
            part_pids: Vec::new(),
            started_unix_s: now.map_or(0, |now| now.as_secs()),
            boots: 0,
            boot: Boot::default(),
            cid,
            cell: None,
            host_place: None,
            borrowed: Vec::new(),
            borrowed_cpus: Vec::new(),
            regions: Vec::new(),
            span: Vec::new(),
            sandbox_missing: Vec::new(),
            core_cookies: Vec::new(),
            full_disks: Vec::new(),
            paused: false,
            pins: BTreeMap::new(),
            pin_cells: BTreeMap::new(),
            dropped_pins: BTreeMap::new(),
            share_group: None,
            kept_apart: Vec::new(),
            member: None,
            names: None,
            spec,
        }
    }

    /// Uses of the CPUs and the memory of cells. A VM that spans cells uses those of its parts.
    pub fn dependencies(&self) -> Dependencies {
        let mut uses = Dependencies::default();
        for part in &self.span {
            uses.begin(part.cell, Use::Cpu, part.vcpus.len() as u64);
            uses.begin(part.cell, Use::Memory, part.memory_bytes);
        }
        if let (Some(cell), true) = (self.cell, self.span.is_empty()) {
            let borrowed: u64 = self.borrowed.iter().map(|part| part.bytes).sum();
            uses.begin(cell, Use::Cpu, self.spec.cpus.into());
            uses.begin(cell, Use::Memory, self.spec.memory.0.saturating_sub(borrowed));
            // The cell's process serves its devices.
            uses.begin(cell, Use::Device, 1);
            for part in &self.borrowed {
                uses.begin(part.cell, Use::Memory, part.bytes);
            }
            for borrowed in &self.borrowed_cpus {
                uses.move_vcpu(cell, borrowed.cell);
            }
        }
        uses
    }

    /// Whether the VM uses CPUs, memory or devices of this cell, the memory of shared regions included.
    pub fn depends_on(&self, cell: u16) -> bool {
        self.cell == Some(cell)
            || self.dependencies().has(cell)
            || self.regions.iter().any(|region| region.depends_on(cell))
    }
}

/// A placement in a cluster that another user owns.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct HostPlace {
    /// Number of the cell in the owner's cluster.
    pub cell: u16,
    /// Enforcement of the cell's CPU and memory limits.
    pub limits: Limits,
    /// Greatest `resident` for which the counted memory has room, bytes; none if all memory is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_max_bytes: Option<u64>,
}

/// State of a VM's vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its files are being opened, or it reboots.
    Starting,
    /// Its vCPUs run.
    Running,
}

/// Reads the record in a VM's directory.
pub fn read(folder: &Path) -> io::Result<Record> {
    Ok(serde_json::from_slice(&fs::read(folder.join(FILE))?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let spec = config::parse("vm.toml", "image = \"x\"\ncpus = 2\nmemory = \"64M\"\n").unwrap();
        let mut record = Record::new("one".to_owned(), spec, 3);
        record.cell = Some(0);
        record
    }

    #[test]
    fn vm_depends_on_its_cell_and_on_the_lenders_of_its_memory_and_its_cpus() {
        let mut record = record();
        assert_eq!(record.dependencies().cells(), [0]);
        record.borrowed = vec![LentMemory {
            cell: 2,
            bytes: 16 << 20,
        }];
        let lent = |vcpu, cell| BorrowedCpu {
            vcpu,
            cell,
            cpu: 9,
            is_automatic: false,
        };
        record.borrowed_cpus = vec![lent(0, 1), lent(1, 1)];
        assert_eq!(record.dependencies().cells(), [0, 1, 2]);
        let mut uses = record.dependencies();
        uses.end(0, Use::Memory, u64::MAX);
        assert!(uses.end(0, Use::Device, 1), "none of its vCPUs is in its cell");
        // Each move has the use that begins and the one that ends.
        assert_eq!(record.dependencies().move_vcpu(1, 3), (true, false));
        record.borrowed_cpus.pop();
        assert_eq!(record.dependencies().move_vcpu(1, 0), (false, true));
        assert!(record.depends_on(1) && record.depends_on(0) && !record.depends_on(3));
        record.borrowed_cpus.clear();
        assert_eq!(record.dependencies().cells(), [0, 2]);
    }

    #[test]
    fn record_of_a_release_without_borrowed_cpus_is_read() {
        let line = serde_json::to_string(&record()).unwrap();
        assert!(!line.contains("borrowed_cpus"), "{line}");
        let read: Record = serde_json::from_str(&line).unwrap();
        assert!(read.borrowed_cpus.is_empty());
    }

    #[test]
    fn spanning_vm_depends_on_the_cells_of_its_parts_and_any_vm_on_those_of_its_regions() {
        let mut record = record();
        let part = |cell, vcpus| policy::span::Part {
            cell,
            vcpus,
            memory_bytes: 32 << 20,
        };
        record.span = vec![part(4, 0..1), part(5, 1..2)];
        // Borrowed memory is that of a VM with one shard.
        record.borrowed = vec![LentMemory {
            cell: 6,
            bytes: 16 << 20,
        }];
        assert_eq!(record.dependencies().cells(), [4, 5]);
        assert!(record.depends_on(0), "the process of its cell serves it");
        assert!(!record.depends_on(6) && !record.depends_on(7));
        record.regions = vec![RegionGrant {
            name: "shared".to_owned(),
            home: 7,
            bytes: 1 << 20,
            access: config::cluster::RegionAccess::Read,
            borrowed: vec![LentMemory {
                cell: 8,
                bytes: 1 << 20,
            }],
        }];
        assert!(record.depends_on(7) && record.depends_on(8) && !record.depends_on(9));
    }
}
