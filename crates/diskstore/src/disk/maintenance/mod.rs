//! Maintenance of disks that no VM uses: commit, diff, compact and check, and the overlays that VMs left.
//!
//! Invariants:
//! * The disk is locked as by a VM that uses it exclusively. If a VM has it, the error names that VM and
//!   nothing is done. A base that is only read is shared with its other users.
//! * A kill at any moment loses nothing. A file is replaced by a complete one under its name, holes are only
//!   punched where zeroes are, and a base that a commit was writing still has the whole overlay above it:
//!   commit again.

mod check;
mod commit;
mod compact;
mod diff;
mod overlays;
mod own_clusters;
mod qcow2_map;
mod repair;
mod replace;

pub use check::{Report, check, first_fault};
pub use commit::{Committed, Target, base, commit};
pub use compact::{Compacted, compact};
pub use diff::{Change, Diff, diff};
pub use overlays::{Overlay, Overlays};
pub use repair::repair;

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::lock::Lock;
use super::lock::Share;
use super::open::Chain;
use super::{DiskError, Format, Layer, SECTOR_BYTES, Segments, Store, assemble};

/// Receives the bytes done and the total bytes.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Bytes per step; a multiple of the block and at least half of the largest cluster.
const PIECE_BYTES: u64 = 1 << 20;
/// Unit in which zeroes are skipped and equal bytes are not written: the page size of the host's file
/// systems.
const BLOCK_BYTES: usize = 4096;

/// A disk that no other process uses while this lives.
struct ExclusiveDisk {
    layers: Vec<Layer>,
    _locks: Vec<Lock>,
}

impl ExclusiveDisk {
    /// Opens a disk and its base.
    fn open(path: &Path, said: Option<Format>, writable: bool) -> Result<Self, DiskError> {
        let mut chain = Chain::new("");
        chain
            .add(path, said, Share::Exclusive, writable)
            .map_err(stop_first)?;
        Ok(Self {
            layers: chain.layers,
            _locks: chain.locks,
        })
    }

    /// The disk as its VM sees it, or only the layers from `first` down.
    fn store(&self, first: usize, read_only: bool) -> io::Result<Arc<dyn Store>> {
        let copy = |layer: &Layer| Ok((layer.file.try_clone()?, layer.format));
        let layers: io::Result<Vec<_>> = self.layers[first..].iter().map(copy).collect();
        assemble(layers?, read_only)
    }
}

/// Replaces the help of an error about a disk in use, for maintenance instead of a VM's start.
fn stop_first(error: DiskError) -> DiskError {
    match error {
        DiskError::InUse {
            path, how, holder, ..
        } => DiskError::InUse {
            path,
            how,
            holder,
            help: "stop it first",
        },
        error => error,
    }
}

fn refused(path: &Path, why: impl Into<String>) -> DiskError {
    DiskError::Refused {
        path: path.to_owned(),
        why: why.into(),
    }
}

fn sectors(bytes: u64) -> u64 {
    bytes / SECTOR_BYTES * SECTOR_BYTES
}

/// Reads from a disk; bytes after its end are zeroes.
fn read(disk: &dyn Store, into: &mut [u8], offset: u64) -> io::Result<()> {
    let there = disk.size().saturating_sub(offset).min(into.len() as u64) as usize;
    let (there, behind) = into.split_at_mut(there);
    behind.fill(0);
    let mut segments = Segments::new();
    // SAFETY: no other code uses the slice until the read has ended.
    unsafe { segments.push(there.as_mut_ptr(), there.len()) };
    disk.read(&segments, offset)
}

/// Writes to a disk.
fn write(disk: &dyn Store, from: &mut [u8], offset: u64) -> io::Result<()> {
    let mut segments = Segments::new();
    // SAFETY: no other code uses the slice until the write has ended.
    unsafe { segments.push(from.as_mut_ptr(), from.len()) };
    disk.write(&segments, offset)
}

/// Writes those blocks of `unit` bytes of `new` that differ from `old`; zeroes take no space. Returns the
/// number of bytes written.
fn put_changed(to: &dyn Store, new: &mut [u8], old: &[u8], at: u64, unit: usize) -> io::Result<u64> {
    let changed = |zero: bool| {
        runs(new.len(), unit, |block| {
            new[block.clone()] != old[block.clone()] && is_zero(&new[block]) == zero
        })
    };
    let (zeroes, data) = (changed(true), changed(false));
    let mut written = 0;
    for run in zeroes {
        to.write_zeroes(at + run.start as u64, run.len() as u64, true)?;
        written += run.len() as u64;
    }
    for run in data {
        written += run.len() as u64;
        write(to, &mut new[run.clone()], at + run.start as u64)?;
    }
    Ok(written)
}

fn is_zero(bytes: &[u8]) -> bool {
    // Compares the first byte and then each with the one before it, as a fast comparison of two slices.
    bytes
        .first()
        .is_none_or(|first| *first == 0 && bytes[1..] == bytes[..bytes.len() - 1])
}

/// Yields the runs of blocks of `unit` bytes for which `wanted` holds, as ranges of `0..bytes`.
fn runs(
    bytes: usize,
    unit: usize,
    wanted: impl Fn(std::ops::Range<usize>) -> bool,
) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for start in (0..bytes).step_by(unit) {
        let block = start..(start + unit).min(bytes);
        if wanted(block.clone()) {
            match runs.last_mut() {
                Some(last) if last.end == start => last.end = block.end,
                _ => runs.push(block),
            }
        }
    }
    runs
}
