//! Changes of a disk relative to its base.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::own_clusters::{ClusterKind, OwnClusters};
use super::{ExclusiveDisk, PIECE_BYTES, Progress, read, refused, runs, sectors};
use crate::disk::open::resolve;
use crate::disk::{DiskError, Format, SECTOR_BYTES};

/// A range that differs from the base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Offset on the disk, in bytes.
    pub offset: u64,
    /// Length of the range, bytes.
    pub bytes: u64,
}

/// Changes of a disk relative to its base.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diff {
    /// The disk.
    pub path: PathBuf,
    /// Base of the disk.
    pub base: PathBuf,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Data in the disk's own file, equal to the base or not, in bytes.
    pub held_bytes: u64,
    /// The sum of the changes.
    pub changed_bytes: u64,
    /// The ranges that differ, by offset, in sectors.
    pub changes: Vec<Change>,
}

/// Compares a qcow2 disk with its base, sector by sector.
pub fn diff(path: &Path, said: Option<Format>, progress: Progress<'_>) -> Result<Diff, DiskError> {
    let disk = ExclusiveDisk::open(path, said, false)?;
    if disk.layers.len() < 2 {
        return Err(refused(path, "stands on no base; only overlays can be compared"));
    }
    let failed = |source| DiskError::io(path, "comparing it with its base")(source);
    let own = OwnClusters::open(&disk.layers[0].file).map_err(failed)?;
    let below = disk.store(1, true).map_err(failed)?;
    let base = resolve(path, own.header.backing.as_deref().unwrap_or_default())?;
    let size = sectors(own.header.size);
    let mut diff = Diff {
        path: path.to_owned(),
        base,
        size_bytes: size,
        held_bytes: 0,
        changed_bytes: 0,
        changes: Vec::new(),
    };
    let mut memory = [vec![0; PIECE_BYTES as usize], vec![0; PIECE_BYTES as usize]];
    let mut at = 0;
    while at < size {
        let (held, length) = own.run(at, size - at, PIECE_BYTES).map_err(failed)?;
        if held != ClusterKind::Nothing {
            let [new, old] = memory.each_mut().map(|memory| &mut memory[..length as usize]);
            own.read(new, at).map_err(failed)?;
            read(&*below, old, at).map_err(failed)?;
            diff.held_bytes += length;
            for run in runs(new.len(), SECTOR_BYTES as usize, |sector| {
                new[sector.clone()] != old[sector]
            }) {
                diff.add(at + run.start as u64, run.len() as u64);
            }
        }
        at += length;
        progress(at, size);
    }
    Ok(diff)
}

impl Diff {
    fn add(&mut self, offset: u64, bytes: u64) {
        self.changed_bytes += bytes;
        match self.changes.last_mut() {
            Some(last) if last.offset + last.bytes == offset => last.bytes += bytes,
            _ => self.changes.push(Change { offset, bytes }),
        }
    }
}
