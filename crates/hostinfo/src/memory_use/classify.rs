//! The kind of each mapping of a shard: a kind of guest memory, or the monitor's own.
//!
//! Guest memory is one memfd for each VM, mapped shared. Pages of disk images, kernels and initramfs files
//! are mapped privately over parts of it, or beside it as persistent memory; a clone maps the frozen memfd of
//! another VM privately. Memory of a VM that the host scans for equal pages is in no file, nor are zeroes
//! that a clone maps.

use std::collections::{BTreeMap, BTreeSet};

use super::smaps::{Area, FileId};

/// The name of guest memory among a shard's mappings.
pub const GUEST_MEMORY: &str = "/memfd:guest-memory";

/// The part of one file that a process maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mapped {
    /// Bytes of the file's pages that the process maps.
    pub resident: u64,
    /// The same, each page divided by the number of processes that map it.
    pub proportional: u64,
    /// Bytes that the process has copied to write to them.
    pub copied: u64,
    /// Bytes of the file swapped out.
    pub swapped_of_file: u64,
    /// Bytes of the copies swapped out.
    pub swapped_copies: u64,
}

impl Mapped {
    fn add(&mut self, area: &Area) {
        self.resident += area.of_file();
        self.proportional += area.part_of_file();
        // A merged copy is not this process's alone. The kernel does not tell its copies from pages of the
        // file, which count first.
        self.copied += match area.scanned {
            true => area.anonymous.min(area.proportional),
            false => area.anonymous,
        };
        self.swapped_of_file += area.swapped_of_file();
        self.swapped_copies += area.swapped_anonymous;
    }
}

/// Guest memory of a process that is in no file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anonymous {
    /// Bytes that only this process has.
    pub private: u64,
    /// Bytes of pages that the host's scanner merged with equal ones.
    pub merged_resident: u64,
    /// The same, each page divided by the number of its users.
    pub merged: u64,
    /// Bytes swapped out.
    pub swapped: u64,
}

impl Anonymous {
    fn add(&mut self, area: &Area) {
        let private = area.private.min(area.proportional);
        self.private += private;
        self.merged_resident += area.resident.saturating_sub(private);
        self.merged += area.proportional - private;
        self.swapped += area.swapped_anonymous;
    }

    fn join(&mut self, other: &Self) {
        self.private += other.private;
        self.merged_resident += other.merged_resident;
        self.merged += other.merged;
        self.swapped += other.swapped;
    }
}

/// The mappings of one process, or of all shards of a VM, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classified {
    /// The guest's own memory, which the guest writes to.
    pub own: BTreeMap<FileId, Mapped>,
    /// The guest's own memory that is in no file.
    pub anonymous: Anonymous,
    /// Memory of a VM that was cloned, which no process writes to any more.
    pub frozen: BTreeMap<FileId, Mapped>,
    /// Files whose pages the guest sees: disk images, kernel, initramfs.
    pub base: BTreeMap<FileId, Mapped>,
    /// Programs: the process's own, and libraries where it has some.
    pub programs: BTreeMap<FileId, Mapped>,
    /// Everything else, and the programs' proportional part, in bytes.
    pub monitor: u64,
    /// The part of `monitor` that is swapped out, in bytes.
    pub monitor_swapped: u64,
}

impl Classified {
    /// Adds another shard of the same VM, which maps the same memory. A page that both map is half in each
    /// proportional figure, so their sum counts it once. That sum is the resident figure then.
    pub fn join(&mut self, other: &Self) {
        for (mine, theirs) in [
            (&mut self.own, &other.own),
            (&mut self.frozen, &other.frozen),
            (&mut self.base, &other.base),
            (&mut self.programs, &other.programs),
        ] {
            for (file, mapped) in theirs {
                let sum = mine.entry(*file).or_default();
                sum.proportional += mapped.proportional;
                sum.copied += mapped.copied;
                sum.swapped_of_file = sum.swapped_of_file.max(mapped.swapped_of_file);
                sum.swapped_copies += mapped.swapped_copies;
                sum.resident = sum.proportional;
            }
        }
        self.anonymous.join(&other.anonymous);
        self.monitor += other.monitor;
        self.monitor_swapped += other.monitor_swapped;
    }
}

/// Sorts the mappings of a shard by kind.
pub fn classify(areas: &[Area]) -> Classified {
    // No guest page is mapped for this process to run, so a file with such a mapping is a program.
    let programs: BTreeSet<FileId> = areas
        .iter()
        .filter(|area| area.executable && area.file.inode != 0)
        .map(|area| area.file)
        .collect();
    let mut all = Classified::default();
    for area in areas {
        if is_anonymous_guest_memory(area) {
            all.anonymous.add(area);
            continue;
        }
        let kind = if programs.contains(&area.file) || !is_a_file(area) {
            all.monitor += area.proportional;
            all.monitor_swapped += area.swapped_anonymous;
            &mut all.programs
        } else if !area.name.starts_with(GUEST_MEMORY) {
            &mut all.base
        } else if area.shared {
            &mut all.own
        } else {
            &mut all.frozen
        };
        if is_a_file(area) {
            kind.entry(area.file).or_default().add(area);
        }
    }
    all
}

/// Whether guest memory without a file is mapped. A shard leaves no other memory of its own out of core
/// dumps.
fn is_anonymous_guest_memory(area: &Area) -> bool {
    area.undumped && area.file.inode == 0 && area.name.is_empty()
}

/// Whether a file is mapped, not memory that the kernel keeps as a file.
fn is_a_file(area: &Area) -> bool {
    let kept_as_one = ["/dev/zero", "/memfd:", "/anon_hugepage", "/SYSV", "/["]
        .iter()
        .any(|start| area.name.starts_with(start));
    let guest = area.name.starts_with(GUEST_MEMORY);
    area.file.inode != 0 && area.name.starts_with('/') && (guest || !kept_as_one)
}

/// Sorts the mappings of a process that holds no guest memory. All of them are the monitor's.
pub fn helper(areas: &[Area]) -> Classified {
    let mut all = classify(areas);
    let anonymous = std::mem::take(&mut all.anonymous);
    all.monitor += anonymous.private + anonymous.merged;
    all.monitor_swapped += anonymous.swapped;
    for kind in [&mut all.own, &mut all.frozen, &mut all.base] {
        for mapped in std::mem::take(kind).into_values() {
            all.monitor += mapped.proportional + mapped.copied;
            all.monitor_swapped += mapped.swapped_copies;
        }
    }
    all
}
