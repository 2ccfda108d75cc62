//! The table of all VMs, from the readings of each VM and of the files under them. It does no I/O.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::classify::{Classified, Mapped};
use super::host::HostMemory;
use super::process::OpenFile;
use super::smaps::FileId;
use crate::scanner::Scanner;

/// The readings of one VM.
#[derive(Clone, Debug, Default)]
pub struct VmReading {
    /// The VM's name.
    pub name: String,
    /// The guest's memory by its spec.
    pub memory: u64,
    /// The shard's mappings.
    pub shard: Classified,
    /// The shard's page tables.
    pub page_tables: u64,
    /// The files that the shard has open.
    pub files: Vec<OpenFile>,
    /// The VM's part of its monitor, and of the processes that the monitor started beside shards.
    pub monitor_part: u64,
    /// The part of `monitor_part` that is swapped out.
    pub monitor_part_swapped: u64,
}

/// A file whose pages may be in the page cache.
#[derive(Clone, Debug, Default)]
pub struct FileReading {
    /// The file's number.
    pub id: FileId,
    /// The file's name.
    pub name: String,
    /// Bytes in the page cache; `None` if the kernel does not report it.
    pub resident: Option<u64>,
    /// Bytes mapped by processes other than shards.
    pub mapped_elsewhere: u64,
}

/// The memory use of one VM, or of all, in bytes. `host_bytes` is the sum of `base_bytes`, `clone_bytes`,
/// `private_bytes`, `merged_bytes`, `copied_bytes`, `disk_bytes` and `monitor_bytes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VmMemory {
    /// The VM's name.
    pub name: String,
    /// The guest's memory by its spec.
    pub memory_bytes: u64,
    /// The part that the guest reports as used; only with a balloon.
    pub guest_used_bytes: Option<u64>,
    /// The host's memory that it takes.
    pub host_bytes: u64,
    /// Pages of disk images, kernel and initramfs that the guest sees.
    pub base_resident_bytes: u64,
    /// The VM's part of them: each page is divided by the number of its users.
    pub base_bytes: u64,
    /// Pages of the frozen VM that it, or its clones, came from.
    pub clone_resident_bytes: u64,
    /// The VM's part of them.
    pub clone_bytes: u64,
    /// Memory that only this guest has.
    pub private_bytes: u64,
    /// Pages that the host's scanner merged with equal ones.
    pub merged_resident_bytes: u64,
    /// The VM's part of them.
    pub merged_bytes: u64,
    /// Copies of base and clone pages, made when the guest wrote to them.
    pub copied_bytes: u64,
    /// Page cache of the files that keep the guest's writes.
    pub disk_bytes: u64,
    /// Memory of no guest: the shard's heap, code and page tables, and a part of the monitor process, of
    /// passt and of the frame filters.
    pub monitor_bytes: u64,
    /// Bytes that are swapped out.
    pub swapped_bytes: u64,
}

impl VmMemory {
    /// Bytes of the guest's pages that others use too, or could.
    pub fn shared_bytes(&self) -> u64 {
        self.base_resident_bytes + self.clone_resident_bytes + self.merged_resident_bytes
    }

    /// Adds the columns of another row.
    pub(super) fn add(&mut self, other: &Self) {
        self.memory_bytes += other.memory_bytes;
        if let Some(used) = other.guest_used_bytes {
            self.guest_used_bytes = Some(self.guest_used_bytes.unwrap_or(0) + used);
        }
        self.host_bytes += other.host_bytes;
        self.base_resident_bytes += other.base_resident_bytes;
        self.base_bytes += other.base_bytes;
        self.clone_resident_bytes += other.clone_resident_bytes;
        self.clone_bytes += other.clone_bytes;
        self.private_bytes += other.private_bytes;
        self.merged_resident_bytes += other.merged_resident_bytes;
        self.merged_bytes += other.merged_bytes;
        self.copied_bytes += other.copied_bytes;
        self.disk_bytes += other.disk_bytes;
        self.monitor_bytes += other.monitor_bytes;
        self.swapped_bytes += other.swapped_bytes;
    }
}

/// A file under the VMs: a file of an image, or the program itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FileMemory {
    /// The file's name.
    pub path: String,
    /// Bytes of the file in the page cache; `None` if the kernel does not report it.
    pub resident_bytes: Option<u64>,
    /// The part of them that VMs or their monitors map, which is counted there.
    pub mapped_bytes: u64,
    /// The rest, which the host keeps as long as it has room.
    pub unmapped_bytes: u64,
}

/// Memory of the host, and what VMs and the files under them take of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostSum {
    /// The host as the kernel counts it.
    #[serde(flatten)]
    pub memory: HostMemory,
    /// The sum of the VMs' `host_bytes`.
    pub vms_bytes: u64,
    /// Page cache of files under the VMs that no process maps.
    pub files_unmapped_bytes: u64,
    /// Memory that others use: programs, other files, the kernel.
    pub rest_bytes: u64,
}

/// The process that serves the cards of all VMs on a subnet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GatewayMemory {
    /// Process id.
    pub pid: u32,
    /// Its memory that is no file's, and its page tables.
    pub host_bytes: u64,
}

/// The whole table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUse {
    /// The running VMs, one row each.
    pub vms: Vec<VmMemory>,
    /// Sum over all rows of `vms`.
    pub total: VmMemory,
    /// The files under the VMs, the largest first.
    pub files: Vec<FileMemory>,
    /// The gateway of the subnet of the VMs' user, which is in no row; none if it does not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<GatewayMemory>,
    /// The host's scanner of memory, while it runs or has merged pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scanner: Option<Scanner>,
    /// Memory of the whole host.
    pub host: HostSum,
    /// One line for each source that could not be read.
    pub unread: Vec<String>,
}

impl MemoryUse {
    /// Adds the gateway, which was among the programs of others before.
    pub fn add_gateway(&mut self, gateway: GatewayMemory) {
        self.host.rest_bytes = self.host.rest_bytes.saturating_sub(gateway.host_bytes);
        self.gateway = Some(gateway);
    }
}

/// Makes the table. Files that a shard may write are its VM's own; the others are under all VMs.
pub fn account(vms: &[VmReading], files: &[FileReading], host: HostMemory) -> MemoryUse {
    let unmapped = unmapped_memory(vms);
    let mut mapped = mapped_files(vms);
    for file in files {
        *mapped.entry(file.id).or_default() += file.mapped_elsewhere;
    }
    let unmapped_of = |file: &FileReading| {
        let mapped = mapped.get(&file.id).copied().unwrap_or(0);
        file.resident.unwrap_or(0).saturating_sub(mapped)
    };
    let mut written = BTreeSet::new();
    let mut table = MemoryUse::default();
    for (vm, unmapped) in vms.iter().zip(unmapped) {
        let own = written_by(vm);
        let disk = files.iter().filter(|file| own.contains(&file.id));
        table.vms.push(row(vm, &unmapped, disk.map(unmapped_of).sum()));
        written.extend(own);
    }
    table.total.name = "total".to_owned();
    for vm in &table.vms {
        table.total.add(vm);
    }
    table.files = files
        .iter()
        .filter(|file| !written.contains(&file.id) && file.resident != Some(0))
        .map(|file| FileMemory {
            path: file.name.clone(),
            resident_bytes: file.resident,
            mapped_bytes: mapped.get(&file.id).copied().unwrap_or(0),
            unmapped_bytes: unmapped_of(file),
        })
        .collect();
    table
        .files
        .sort_by_key(|file| std::cmp::Reverse(file.resident_bytes));
    let files_unmapped = table.files.iter().map(|file| file.unmapped_bytes).sum();
    let known = table.total.host_bytes + files_unmapped + host.kvm_page_tables_bytes;
    table.host = HostSum {
        memory: host,
        vms_bytes: table.total.host_bytes,
        files_unmapped_bytes: files_unmapped,
        rest_bytes: host.used_bytes.saturating_sub(known),
    };
    table
}

fn written_by(vm: &VmReading) -> BTreeSet<FileId> {
    let files = vm.files.iter().filter(|file| file.writable && !file.guest_memory);
    files.map(|file| file.id).collect()
}

fn row(vm: &VmReading, unmapped: &Unmapped, disk_bytes: u64) -> VmMemory {
    let sum =
        |kind: &BTreeMap<FileId, Mapped>, what: fn(&Mapped) -> u64| kind.values().map(what).sum::<u64>();
    let Classified {
        own,
        frozen,
        base,
        anonymous,
        ..
    } = &vm.shard;
    let all = [own, frozen, base];
    let mut row = VmMemory {
        name: vm.name.clone(),
        memory_bytes: vm.memory,
        guest_used_bytes: None,
        host_bytes: 0,
        base_resident_bytes: sum(base, |file| file.resident),
        base_bytes: sum(base, |file| file.proportional),
        clone_resident_bytes: sum(frozen, |file| file.resident),
        clone_bytes: sum(frozen, |file| file.proportional),
        private_bytes: sum(own, |file| file.proportional) + unmapped.resident + anonymous.private,
        merged_resident_bytes: anonymous.merged_resident,
        merged_bytes: anonymous.merged,
        copied_bytes: all.iter().map(|kind| sum(kind, |file| file.copied)).sum(),
        disk_bytes,
        monitor_bytes: vm.shard.monitor + vm.page_tables + vm.monitor_part,
        swapped_bytes: unmapped.swapped
            + all
                .iter()
                .map(|kind| sum(kind, |file| file.swapped_copies))
                .sum::<u64>()
            + anonymous.swapped
            + vm.shard.monitor_swapped
            + vm.monitor_part_swapped,
    };
    row.host_bytes = row.base_bytes
        + row.clone_bytes
        + row.private_bytes
        + row.merged_bytes
        + row.copied_bytes
        + row.disk_bytes
        + row.monitor_bytes;
    row
}

/// Pages of guest memory that no process maps, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Unmapped {
    /// In memory: not mapped yet, or not any more.
    resident: u64,
    /// On the host's swap space.
    swapped: u64,
}

/// The memory of each VM that is allocated and that no process maps. Frozen memory belongs to all VMs that
/// map it, in equal parts.
fn unmapped_memory(vms: &[VmReading]) -> Vec<Unmapped> {
    let mut allocated = BTreeMap::new();
    for file in vms
        .iter()
        .flat_map(|vm| &vm.files)
        .filter(|file| file.guest_memory)
    {
        allocated.insert(file.id, file.allocated);
    }
    let mut unmapped = vec![Unmapped::default(); vms.len()];
    for (id, allocated) in allocated {
        let mapped: Vec<&Mapped> = vms
            .iter()
            .flat_map(|vm| [vm.shard.own.get(&id), vm.shard.frozen.get(&id)])
            .flatten()
            .collect();
        let here: u64 = mapped.iter().map(|file| file.proportional).sum();
        // Each VM that maps the file sees the same of it as swapped out.
        let swapped = mapped.iter().map(|file| file.swapped_of_file).max().unwrap_or(0);
        let left = allocated.saturating_sub(here + swapped);
        let holds = |what: fn(&VmReading, FileId) -> bool| -> Vec<usize> {
            let matching = vms.iter().enumerate().filter(|(_, vm)| what(vm, id));
            matching.map(|(index, _)| index).collect()
        };
        let holders = [
            holds(|vm, id| vm.shard.own.contains_key(&id)),
            holds(|vm, id| vm.shard.frozen.contains_key(&id)),
            holds(|vm, id| vm.files.iter().any(|file| file.id == id)),
        ];
        if let Some(holders) = holders.iter().find(|holders| !holders.is_empty()) {
            for index in holders {
                unmapped[*index].resident += left / holders.len() as u64;
                unmapped[*index].swapped += swapped / holders.len() as u64;
            }
        }
    }
    unmapped
}

/// Bytes of each file that shards map. Their parts add up to each page once.
fn mapped_files(vms: &[VmReading]) -> BTreeMap<FileId, u64> {
    let mut mapped = BTreeMap::new();
    for vm in vms {
        for (id, file) in vm.shard.base.iter().chain(&vm.shard.programs) {
            *mapped.entry(*id).or_default() += file.proportional;
        }
    }
    mapped
}
