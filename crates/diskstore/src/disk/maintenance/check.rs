//! Whether a disk's files are sound.
//!
//! Of a qcow2 file: every table and cluster that is named lies in the file and on a cluster's border; none is used more
//! often than it is counted; the marks that say "used once" are right. Clusters counted more often than used are
//! leaked, which costs their space only. Of what is below: that it is there and can be opened. Of a raw file there is
//! nothing more to check: any bytes are a disk.

use std::fs::File;
use std::io;
use std::path::Path;

use super::qcow2_map::{Entry, Map, Place};
use super::{ExclusiveDisk, Progress, refused};
use crate::disk::{DiskError, Format};

/// Clusters of the largest file that is checked: 4 TiB at 64 KiB, for which 512 MiB are needed.
const CLUSTERS_MAX: u64 = 1 << 26;
/// The same of a file that is checked because a VM starts: 1 TiB, for which 128 MiB are needed.
const CLUSTERS_AT_START_MAX: u64 = 1 << 24;
/// Faults that are described; the others are counted.
const TOLD_MAX: usize = 20;

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The file's format.
    pub format: Format,
    /// Files that the disk is made of, with those below.
    pub files: usize,
    /// Faults that make the disk read wrongly, or will when it is written.
    pub faults: u64,
    /// The first of them.
    pub told: Vec<String>,
    /// Bytes that belong to nothing.
    pub leaked_bytes: u64,
    /// Holds bitmaps, so that what belongs to them is not told from leaked clusters, and none are counted.
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
        let map = Map::read(&layer.file).map_err(|why| refused(path, why))?;
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

/// The first fault of a qcow2 file that is to be written, if it has one. A file that is too large, or has features that
/// are not read here, is left to [`check`].
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

/// How often each cluster is used and how often it is counted.
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

    /// Reads the counts, and uses the clusters that they are in.
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
            // Blocks of the same size, there or not.
            first = first.saturating_add(map.counts_of_a_block());
        }
        Ok(())
    }

    /// Walks an L1 table, its L2 tables and what they name. Only those of the disk as it is now have marks to check.
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
                // A fault already. Reading it for each of its users is what a made-up file would have us do for hours.
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

    /// Uses one whole cluster; false if it cannot be one.
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
