//! Frees space of a disk's file that its content does not need.
//!
//! A raw file gets holes for its zeroes. A qcow2 file is rewritten without leaked clusters, zeroes, and data
//! that equals its base; it replaces the old file when it is smaller.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::own_clusters::{ClusterKind, OwnClusters};
use super::replace::ReplacementFile;
use super::{
    BLOCK_BYTES, ExclusiveDisk, PIECE_BYTES, Progress, is_zero, put_changed, read, refused, runs, sectors,
};
use crate::disk::raw::{hole, punch};
use crate::disk::{DiskError, Format, Store, qcow2};

/// Result of compacting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compacted {
    /// Space of the file before, in bytes.
    pub before_bytes: u64,
    /// Space of the file after, in bytes.
    pub after_bytes: u64,
}

/// Compacts a disk.
pub fn compact(path: &Path, said: Option<Format>, progress: Progress<'_>) -> Result<Compacted, DiskError> {
    let disk = ExclusiveDisk::open(path, said, true)?;
    let file = &disk.layers[0].file;
    let before_bytes = taken(file).map_err(DiskError::io(path, "looking at it"))?;
    let after = match disk.layers[0].format {
        Format::Qcow2 => rewrite(path, &disk, before_bytes, progress),
        _ => dig(file, progress).and_then(|()| taken(file)),
    };
    match after {
        Ok(after_bytes) => Ok(Compacted {
            before_bytes,
            after_bytes,
        }),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            let why = "lies on a file system without holes; copy it to one that has them (ext4, XFS, Btrfs)";
            Err(refused(path, why))
        }
        Err(error) => Err(DiskError::io(path, "compacting it")(error)),
    }
}

/// Space that a file takes. For a file that was just written, the value is exact only after a sync.
fn taken(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.blocks() * 512)
}

/// Punches holes for a file's blocks of zeroes.
fn dig(file: &File, progress: Progress<'_>) -> io::Result<()> {
    let store = raw_store(file)?;
    let size = store.size();
    let mut memory = vec![0; PIECE_BYTES as usize];
    let mut at = 0;
    while at < size {
        let (empty, length) = hole(file, at, size - at);
        let length = if empty { length } else { length.min(PIECE_BYTES) };
        if !empty {
            let piece = &mut memory[..length as usize];
            read(&*store, piece, at)?;
            for run in runs(piece.len(), BLOCK_BYTES, |block| is_zero(&piece[block])) {
                punch(file, at + run.start as u64, run.len() as u64)?;
            }
        }
        at += length;
        progress(at, size);
    }
    file.sync_all()
}

fn raw_store(file: &File) -> io::Result<std::sync::Arc<dyn Store>> {
    crate::disk::assemble(vec![(file.try_clone()?, Format::Raw)], true)
}

/// Rewrites the file, and replaces the old one if it is smaller; returns its space in bytes.
fn rewrite(path: &Path, disk: &ExclusiveDisk, before_bytes: u64, progress: Progress<'_>) -> io::Result<u64> {
    let own = OwnClusters::open(&disk.layers[0].file)?;
    let new = ReplacementFile::begin(path)?;
    new.inherit(&disk.layers[0].file)?;
    let backing = own
        .header
        .backing
        .as_deref()
        .zip(disk.layers.get(1).map(|layer| layer.format));
    qcow2::create(
        new.file().try_clone()?,
        own.header.size,
        own.header.cluster_bytes,
        backing,
    )?;
    let below = match disk.layers.len() {
        1 => None,
        _ => Some(disk.store(1, true)?),
    };
    let mut layers = vec![(new.file().try_clone()?, Format::Qcow2)];
    for layer in &disk.layers[1..] {
        layers.push((layer.file.try_clone()?, layer.format));
    }
    let target = crate::disk::assemble(layers, false)?;
    copy_needed(&own, below.as_deref(), &*target, progress)?;
    target.write_back()?;
    drop(target);
    new.file().sync_all()?;
    let after_bytes = taken(new.file())?;
    if after_bytes >= before_bytes {
        return Ok(before_bytes);
    }
    new.replace(&disk.layers[0].file)?;
    Ok(after_bytes)
}

/// Copies the clusters whose content differs from the lower layers.
fn copy_needed(
    own: &OwnClusters,
    below: Option<&dyn Store>,
    target: &dyn Store,
    progress: Progress<'_>,
) -> io::Result<()> {
    let size = sectors(own.header.size);
    let cluster = own.header.cluster_bytes;
    let piece_bytes = PIECE_BYTES.max(cluster);
    let mut memory = [vec![0; piece_bytes as usize], vec![0; piece_bytes as usize]];
    let mut at = 0;
    while at < size {
        let (held, length) = own.run(at, size - at, piece_bytes)?;
        if held != ClusterKind::Nothing {
            let [new, old] = memory.each_mut().map(|memory| &mut memory[..length as usize]);
            own.read(new, at)?;
            match below {
                Some(below) => read(below, old, at)?,
                None => old.fill(0),
            }
            put_changed(target, new, old, at, cluster as usize)?;
        }
        at += length;
        progress(at, size);
    }
    Ok(())
}
