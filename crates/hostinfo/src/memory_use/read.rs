//! Reads the figures that [`account`] adds up: of each VM's shard, its monitor, its keeper, passt and frame
//! filters, and the files under them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use registry::vms::Record;

use super::account::{FileReading, MemoryUse, VmMemory, VmReading, account};
use super::classify::{Classified, classify, helper};
use super::host::HostMemory;
use super::page_cache;
use super::process::{self, OpenFile};
use super::smaps::FileId;
use crate::scanner::Scanner;

/// Returns the memory use of the VMs of `records`. A VM that ends meanwhile is omitted. The result names the
/// processes that this user may not read.
pub fn read(records: &[Record]) -> io::Result<MemoryUse> {
    let mut reader = Reader::default();
    let vms: Vec<VmReading> = records
        .iter()
        .filter_map(|record| reader.vm(record, records))
        .collect();
    // This process usually runs the same program as the monitors.
    reader.this_program();
    let files: Vec<FileReading> = reader.files.values().map(|file| reader.file(file)).collect();
    reader.unread.extend(untold(&files));
    let mut table = account(&vms, &files, HostMemory::now()?);
    table.scanner = Scanner::of_host().filter(|scanner| scanner.is_running || scanner.shared_bytes > 0);
    table.unread = reader.unread.into_iter().collect();
    Ok(table)
}

/// The memory use of one VM; none when it has ended. `others` are all VMs that run, with which it may share a
/// monitor.
pub fn read_one(record: &Record, others: &[Record]) -> Option<VmMemory> {
    let mut reader = Reader::default();
    let vm = reader.vm(record, others)?;
    let written = vm.files.iter().filter(|file| file.writable && !file.guest_memory);
    let files: Vec<FileReading> = written.map(|file| reader.file(file)).collect();
    account(&[vm], &files, HostMemory::default()).vms.pop()
}

/// Collects readings, and records which could not be read.
#[derive(Default)]
struct Reader {
    /// Files that VMs or their monitors have open.
    files: BTreeMap<FileId, OpenFile>,
    /// Bytes of files that monitors and their helpers map.
    mapped_elsewhere: BTreeMap<FileId, u64>,
    /// The part of each VM of a monitor, by the monitor's process.
    monitors: BTreeMap<u32, (u64, u64)>,
    unread: BTreeSet<String>,
}

impl Reader {
    fn vm(&mut self, record: &Record, all: &[Record]) -> Option<VmReading> {
        let pid = u32::try_from(record.shard_pid?).ok()?;
        let name = &record.name;
        let areas = self.take(&format!("the memory of {name}"), process::areas(pid))?;
        let mut page_tables = self.take(&format!("the page tables of {name}"), process::page_tables(pid))?;
        let mut shard = classify(&areas);
        for part in parts(record) {
            let areas = self.take(&format!("the memory of a shard of {name}"), process::areas(part));
            shard.join(&classify(&areas.unwrap_or_default()));
            page_tables += process::page_tables(part).unwrap_or(0);
        }
        let files = self
            .take(&format!("the open files of {name}"), process::open_files(pid))
            .unwrap_or_default();
        for file in files.iter().filter(|file| !file.guest_memory) {
            self.files.insert(file.id, file.clone());
        }
        // All shards execute the same program, which is none of their open files.
        if let Ok(program) = process::program(pid) {
            self.files.entry(program.id).or_insert(program);
        }
        let (monitor_part, monitor_part_swapped) = self.monitor(record.monitor_pid, all);
        Some(VmReading {
            name: name.clone(),
            memory: record.spec.memory.0,
            shard,
            page_tables,
            files,
            monitor_part,
            monitor_part_swapped,
        })
    }

    /// Returns the share of one VM in its monitor and in the processes that the monitor started beside
    /// shards: memory, and the swapped part of it.
    fn monitor(&mut self, pid: u32, all: &[Record]) -> (u64, u64) {
        if let Some(part) = self.monitors.get(&pid) {
            return *part;
        }
        let vms: Vec<&Record> = all.iter().filter(|record| record.monitor_pid == pid).collect();
        let shards: Vec<u32> = vms
            .iter()
            .flat_map(|record| parts(record).chain(record.shard_pid.and_then(|pid| u32::try_from(pid).ok())))
            .collect();
        let (mut bytes, mut swapped) = (0, 0);
        let mut processes = BTreeSet::from([pid]);
        processes.extend(process::descendants(pid, &shards));
        // A monitor that has taken its VM over is the parent of neither.
        processes.extend(vms.iter().flat_map(|record| &record.card_pids));
        processes.extend(vms.iter().filter_map(|record| keeper(record)));
        for process in processes {
            let what = if process == pid {
                "a monitor"
            } else {
                "a keeper or a card's process"
            };
            let Some(areas) = self.take(&format!("the memory of {what}"), process::areas(process)) else {
                continue;
            };
            let own = helper(&areas);
            self.count_programs(&own);
            bytes += own.monitor + process::page_tables(process).unwrap_or(0);
            swapped += own.monitor_swapped;
        }
        // The kernel and the initramfs are open in the monitor only.
        let open = process::open_files(pid).and_then(|mut files| {
            files.push(process::program(pid)?);
            Ok(files)
        });
        for file in self.take("the open files of a monitor", open).unwrap_or_default() {
            if !file.writable && !file.guest_memory {
                self.files.entry(file.id).or_insert(file);
            }
        }
        let count = vms.len().max(1) as u64;
        let part = (bytes / count, swapped / count);
        self.monitors.insert(pid, part);
        part
    }

    fn this_program(&mut self) {
        let pid = std::process::id();
        if let (Ok(program), Ok(areas)) = (process::program(pid), process::areas(pid)) {
            self.files.entry(program.id).or_insert(program);
            self.count_programs(&helper(&areas));
        }
    }

    fn count_programs(&mut self, process: &Classified) {
        for (id, mapped) in &process.programs {
            *self.mapped_elsewhere.entry(*id).or_default() += mapped.proportional;
        }
    }

    fn file(&self, file: &OpenFile) -> FileReading {
        FileReading {
            id: file.id,
            name: file.name.clone(),
            resident: file.open().and_then(|file| page_cache::resident(&file)).ok(),
            mapped_elsewhere: self.mapped_elsewhere.get(&file.id).copied().unwrap_or(0),
        }
    }

    /// The value, if it could be read. Remembers a refusal; a process that has ended is no refusal.
    fn take<T>(&mut self, what: &str, result: io::Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                if error.kind() == io::ErrorKind::PermissionDenied {
                    self.unread.insert(what.to_owned());
                }
                None
            }
        }
    }
}

/// The process of a VM's keeper.
fn keeper(record: &Record) -> Option<u32> {
    record.keeper_pid.and_then(|pid| u32::try_from(pid).ok())
}

/// Returns the processes of a VM's secondary shards.
fn parts(record: &Record) -> impl Iterator<Item = u32> {
    record.part_pids.iter().filter_map(|pid| u32::try_from(*pid).ok())
}

fn untold(files: &[FileReading]) -> Option<String> {
    let names: Vec<&str> = files
        .iter()
        .filter(|file| file.resident.is_none())
        .map(|file| file.name.as_str())
        .collect();
    (!names.is_empty()).then(|| format!("the page cache of {}", names.join(", ")))
}
