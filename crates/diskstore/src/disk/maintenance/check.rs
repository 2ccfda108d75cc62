//! Checks the integrity of a disk's files.
//!
//! For a qcow2 file: every named table and cluster lies in the file and at a cluster boundary; no cluster's
//! refcount is below its uses; the flags for "refcount is one" are right. Clusters whose refcount exceeds
//! their uses are leaked, which costs only space. For backing files: they exist and can be opened. A raw file
//! needs no further check: any bytes are a valid disk.

use std::fs::File;
use std::io;
use std::path::Path;

use super::qcow2_map::{Entry, Map, Place};
use super::{ExclusiveDisk, Progress, refused};
use crate::disk::{DiskError, Format};

/// Maximum clusters of a checked file: 4 TiB at 64 KiB, for which 512 MiB are needed.
const CLUSTERS_MAX: u64 = 1 << 26;
/// Maximum for a check at a VM's start: 1 TiB, for which 128 MiB are needed.
const CLUSTERS_AT_START_MAX: u64 = 1 << 24;
/// Maximum number of faults that are described; the others are only counted.
const TOLD_MAX: usize = 20;

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The file's format.
    pub format: Format,
    /// Number of the disk's files, backing files included.
    pub files: usize,
    /// Number of faults that make the disk read wrongly, now or after a write.
    pub faults: u64,
    /// Descriptions of the first faults.
    pub told: Vec<String>,
    /// Bytes of leaked clusters.
    pub leaked_bytes: u64,
    /// Whether the file has bitmaps. Their clusters can't be distinguished from leaked ones, so none are
    /// counted.
    pub bitmaps: bool,
}

/// Checks the disk at `path`.
pub fn check(path: &Path, said: Option<Format>, progress: Progress<'_>) -> Result<Report, DiskError> {
    let disk = ExclusiveDisk::open(path, said, false)?;
    let layer = &disk.layers[0];
    let mut report = Report {
        format: layer.format,
        files: disk.layers.len(),
        faults: 0,
        told: Vec::new(),
        leaked_bytes: 0,
        bitmaps: false,
    };
    if layer.format == Format::Qcow2 {
        let map = Map::read(&layer.file).map_err(|why| refused(path, why.to_string()))?;
        let clusters = map.length.div_ceil(map.cluster_bytes);
        if clusters > CLUSTERS_MAX {
            let why = format!("has {clusters} clusters, more than are checked here; use qemu-img check");
            return Err(refused(path, why));
        }
        report.bitmaps = map.bitmaps;
        Count::new(&map, &mut report, clusters as usize)
            .all(progress)
            .map_err(DiskError::io(path, "reading its tables"))?;
    }
    Ok(report)
}

/// Returns the first fault of a qcow2 file that is to be written, if it has one. A file that is too large, or
/// has unsupported features, is left to [`check`].
pub fn first_fault(file: &File) -> io::Result<Option<String>> {
    let Ok(map) = Map::read(file) else {
        return Ok(None);
    };
    let clusters = map.length.div_ceil(map.cluster_bytes);
    if clusters > CLUSTERS_AT_START_MAX {
        return Ok(None);
    }
    let mut report = Report {
        format: Format::Qcow2,
        files: 1,
        faults: 0,
        told: Vec::new(),
        leaked_bytes: 0,
        bitmaps: map.bitmaps,
    };
    Count::new(&map, &mut report, clusters as usize).all(&mut |_, _| {})?;
    Ok(report.told.into_iter().next())
}

/// Uses and refcount of each cluster.
struct Count<'a> {
    map: &'a Map<'a>,
    report: &'a mut Report,
    used: Vec<u32>,
    counted: Vec<u32>,
}

impl<'a> Count<'a> {
    fn new(map: &'a Map<'a>, report: &'a mut Report, clusters: usize) -> Self {
        Self {
            map,
            report,
            used: vec![0; clusters],
            counted: vec![0; clusters],
        }
    }

    fn all(mut self, progress: Progress<'_>) -> std::io::Result<()> {
        let map = self.map;
        self.use_range(Place { offset: 0, bytes: 1 }, "the header");
        self.use_range(map.refcount_table, "the refcount table");
        self.refcounts()?;
        self.use_range(map.snapshot_table, "the snapshot table");
        for snapshot in &map.snapshots {
            self.tables(*snapshot, false, &mut |_, _| {})?;
        }
        self.tables(map.l1, true, progress)?;
        self.compare();
        Ok(())
    }

    /// Reads the refcounts, and counts the clusters that hold them as used.
    fn refcounts(&mut self) -> std::io::Result<()> {
        let map = self.map;
        let mut first = 0_usize;
        for word in map.table(map.refcount_table)? {
            let offset = word & !0x1FF;
            if offset != 0 && self.use_cluster(offset, "a refcount block") {
                let counts = map.refcounts(offset)?;
                for (index, count) in counts.iter().enumerate() {
                    match self.counted.get_mut(first.saturating_add(index)) {
                        Some(counted) => *counted = u32::try_from(*count).unwrap_or(u32::MAX),
                        None if *count > 0 && !map.bitmaps => self.report.leaked_bytes += map.cluster_bytes,
                        None => {}
                    }
                }
            }
            // Blocks have the same size, present or not.
            first = first.saturating_add(map.counts_of_a_block());
        }
        Ok(())
    }

    /// Walks an L1 table, its L2 tables and their clusters. Only those of the current disk have flags to
    /// check.
    fn tables(&mut self, l1: Place, now: bool, progress: Progress<'_>) -> std::io::Result<()> {
        let map = self.map;
        self.use_range(l1, "an L1 table");
        let words = map.table(l1)?;
        for (index, word) in words.iter().enumerate() {
            progress(index as u64, words.len() as u64);
            let Entry::At { offset, alone } = map.l1_entry(*word) else {
                continue;
            };
            if !self.use_cluster(offset, "an L2 table") {
                continue;
            }
            self.mark(now, offset, alone, "L2 table");
            let cluster = (offset / map.cluster_bytes) as usize;
            if self.used[cluster] > self.counted[cluster] {
                // Already a fault. Reading the table for each of its users would let a crafted file occupy us
                // for hours.
                continue;
            }
            let place = Place {
                offset,
                bytes: map.cluster_bytes,
            };
            for word in map.table(place)? {
                match map.l2_entry(word) {
                    Entry::Nothing => {}
                    Entry::Compressed(place) => self.use_range(place, "compressed data"),
                    Entry::At { offset, alone } => {
                        if self.use_cluster(offset, "data") {
                            self.mark(now, offset, alone, "data");
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Counts a use of one whole cluster; false if the offset can't be a cluster.
    fn use_cluster(&mut self, offset: u64, what: &str) -> bool {
        if !offset.is_multiple_of(self.map.cluster_bytes) {
            self.fault(format!("{what} at {offset:#x} is not on a cluster's border"));
            return false;
        }
        self.use_range(
            Place {
                offset,
                bytes: self.map.cluster_bytes,
            },
            what,
        );
        offset < self.map.length
    }

    fn use_range(&mut self, place: Place, what: &str) {
        if place.bytes == 0 {
            return;
        }
        let first = place.offset / self.map.cluster_bytes;
        let last = place.offset.saturating_add(place.bytes - 1) / self.map.cluster_bytes;
        if last >= self.used.len() as u64 {
            self.fault(format!(
                "{what} at {:#x} is behind the end of the file",
                place.offset
            ));
            return;
        }
        for used in &mut self.used[first as usize..=last as usize] {
            *used = used.saturating_add(1);
        }
    }

    fn mark(&mut self, now: bool, offset: u64, alone: bool, what: &str) {
        let counted = self.counted[(offset / self.map.cluster_bytes) as usize];
        if now && alone != (counted == 1) {
            let mark = if alone { "used once" } else { "shared" };
            self.fault(format!(
                "{what} at {offset:#x} is marked {mark}, but counted {counted} times"
            ));
        }
    }

    fn compare(&mut self) {
        for cluster in 0..self.used.len() {
            let (used, counted) = (self.used[cluster], self.counted[cluster]);
            let offset = cluster as u64 * self.map.cluster_bytes;
            if used > counted {
                self.fault(format!(
                    "the cluster at {offset:#x} is used {used} times, but counted {counted}"
                ));
            } else if used < counted && !self.map.bitmaps {
                self.report.leaked_bytes += self.map.cluster_bytes;
            }
        }
    }

    fn fault(&mut self, text: String) {
        self.report.faults += 1;
        if self.report.told.len() < TOLD_MAX {
            self.report.told.push(text);
        }
    }
}
