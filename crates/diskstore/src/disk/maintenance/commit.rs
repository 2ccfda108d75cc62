//! Commits an overlay's changes to its base, or merges both into a new file.

use std::fs::Metadata;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::own_clusters::{ClusterKind, OwnClusters};
use super::replace::ReplacementFile;
use super::{
    BLOCK_BYTES, ExclusiveDisk, PIECE_BYTES, Progress, is_zero, put_changed, read, refused, runs, sectors,
    stop_first, write,
};
use crate::disk::fingerprint::Fingerprint;
use crate::disk::format::{decide, record_raw};
use crate::disk::header::Header;
use crate::disk::lock::Share;
use crate::disk::open::{Chain, below, open_locked};
use crate::disk::{DiskError, Format, Layer, Store, assemble, qcow2};

/// Destination of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The overlay's base. The overlay is empty afterwards.
    Base,
    /// A new file without a base, with the overlay and everything below it. The overlay is unchanged.
    New {
        /// Path of the file, which must not exist.
        path: PathBuf,
        /// Format in which it is written.
        format: Format,
    },
}

/// Result of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The written file.
    pub into: PathBuf,
    /// Amount of data written to it, bytes.
    pub written_bytes: u64,
}

/// Returns the base of the overlay at `path`.
pub fn base(path: &Path, said: Option<Format>) -> Result<PathBuf, DiskError> {
    base_of(path, said).map(|base| base.path)
}

/// Returns the base of an overlay; an error if the file at `path` has none.
fn base_of(path: &Path, said: Option<Format>) -> Result<Base, DiskError> {
    let (file, lock) = open_locked(path, false, Share::Exclusive, "").map_err(stop_first)?;
    let known = decide(path, &file, said)?;
    let none = || refused(path, "stands on no base; there is nothing to commit");
    if known.format != Format::Qcow2 {
        return Err(none());
    }
    let header = Header::read(&file, true).map_err(|why| refused(path, why.to_string()))?;
    let (base, format) = below(path, &file, &header, known.trusted)?.ok_or_else(none)?;
    Ok(Base {
        overlay: ExclusiveDisk {
            layers: vec![Layer {
                file,
                format: Format::Qcow2,
            }],
            _locks: vec![lock],
        },
        header,
        path: base,
        format,
    })
}

/// An overlay and its recorded base.
struct Base {
    overlay: ExclusiveDisk,
    header: Header,
    path: PathBuf,
    format: Option<Format>,
}

/// Commits the changes of the overlay at `overlay`.
///
/// The caller must ensure that no other overlay uses the same base: it would see the changes as damage.
pub fn commit(
    overlay: &Path,
    said: Option<Format>,
    target: &Target,
    progress: Progress<'_>,
) -> Result<Committed, DiskError> {
    match target {
        Target::Base => into_base(overlay, said, progress),
        Target::New { path, format } => into_new(overlay, said, path, *format, progress),
    }
}

fn into_base(path: &Path, said: Option<Format>, progress: Progress<'_>) -> Result<Committed, DiskError> {
    let overlay = base_of(path, said)?;
    let about = overlay.overlay.layers[0].file.metadata();
    let owner = about.map_err(DiskError::io(path, "looking at it"))?.uid();
    let fit = |base: std::io::Result<Metadata>| {
        let base_owner = base.map_err(DiskError::io(&overlay.path, "looking at it"))?.uid();
        match may_write_base(owner, base_owner, geteuid().as_raw()) {
            true => Ok(()),
            false => Err(refused(path, foreign_base(&overlay.path, owner, base_owner))),
        }
    };
    fit(std::fs::metadata(&overlay.path))?;
    let mut chain = Chain::new("");
    let base_bytes = chain
        .add(&overlay.path, overlay.format, Share::Exclusive, true)
        .map_err(stop_first)?;
    // The name may refer to another file by now.
    fit(chain.layers[0].file.metadata())?;
    let size = sectors(overlay.header.size);
    if size > base_bytes {
        let why = format!(
            "is larger than its base ({size} bytes over {base_bytes}); commit it into a new file: --to FILE"
        );
        return Err(refused(path, why));
    }
    let failed = DiskError::io(&overlay.path, "writing the changes to it");
    // From here until it is empty, the overlay equals the content that its base is being given, and fits it
    // at every moment.
    Fingerprint::forget(&overlay.overlay.layers[0].file);
    let base = ExclusiveDisk {
        layers: chain.layers,
        _locks: chain.locks,
    };
    let base_format = base.layers[0].format;
    let written_bytes = base
        .store(0, false)
        .and_then(|store| {
            let own = OwnClusters::open(&overlay.overlay.layers[0].file)?;
            let written = bring_down(&own, &*store, size, progress)?;
            store.write_back()?;
            base.layers[0].file.sync_all()?;
            Ok(written)
        })
        .map_err(failed)?;
    let name = overlay.header.backing.as_deref().unwrap_or_default();
    let emptied = ReplacementFile::begin(path).and_then(|new| {
        let bytes = overlay.header.cluster_bytes;
        qcow2::create(
            new.file().try_clone()?,
            overlay.header.size,
            bytes,
            Some((name, base_format)),
        )?;
        Fingerprint::of(base.layers[0].file.as_fd())?.record(new.file());
        new.replace(&overlay.overlay.layers[0].file)
    });
    emptied.map_err(DiskError::io(path, "emptying it after the commit"))?;
    Ok(Committed {
        into: overlay.path,
        written_bytes,
    })
}

/// Whether the changes of an overlay may go into its base. An overlay names its base itself, so another
/// user's overlay could name any file that the caller may write.
fn may_write_base(overlay_owner: u32, base_owner: u32, own: u32) -> bool {
    overlay_owner == own || overlay_owner == base_owner
}

fn foreign_base(base: &Path, overlay_owner: u32, base_owner: u32) -> String {
    format!(
        "belongs to user {overlay_owner} and names as its base {}, which belongs to user {base_owner}; \
         help: commit it into a \
         new file (--to FILE), or, if that base is meant, make yourself the overlay's owner (chown)",
        base.display()
    )
}

/// Writes the overlay's data where the base differs.
fn bring_down(
    own: &OwnClusters,
    base: &dyn Store,
    size: u64,
    progress: Progress<'_>,
) -> std::io::Result<u64> {
    let mut memory = [vec![0; PIECE_BYTES as usize], vec![0; PIECE_BYTES as usize]];
    let (mut at, mut written) = (0, 0);
    while at < size {
        let (held, length) = own.run(at, size - at, PIECE_BYTES)?;
        if held != ClusterKind::Nothing {
            let [new, old] = memory.each_mut().map(|memory| &mut memory[..length as usize]);
            own.read(new, at)?;
            read(base, old, at)?;
            written += put_changed(base, new, old, at, BLOCK_BYTES)?;
        }
        at += length;
        progress(at, size);
    }
    Ok(written)
}

fn into_new(
    overlay: &Path,
    said: Option<Format>,
    path: &Path,
    format: Format,
    progress: Progress<'_>,
) -> Result<Committed, DiskError> {
    if path.symlink_metadata().is_ok() {
        return Err(refused(path, "exists already; choose another name, or remove it"));
    }
    let disk = ExclusiveDisk::open(overlay, said, false)?;
    let failed = DiskError::io(path, "making it");
    let written = disk.store(0, true).and_then(|disk| {
        let new = ReplacementFile::begin(path)?;
        match format {
            Format::Qcow2 => qcow2::create(new.file().try_clone()?, disk.size(), qcow2::CLUSTER_BYTES, None)?,
            _ => {
                new.file().set_len(disk.size())?;
                record_raw(new.file());
            }
        }
        let copy = assemble(vec![(new.file().try_clone()?, format)], false)?;
        let written = copy_all(&*disk, &*copy, progress)?;
        copy.write_back()?;
        drop(copy);
        new.publish_new()?;
        Ok(written)
    });
    Ok(Committed {
        into: path.to_owned(),
        written_bytes: written.map_err(failed)?,
    })
}

/// Copies all non-zero data.
fn copy_all(from: &dyn Store, to: &dyn Store, progress: Progress<'_>) -> std::io::Result<u64> {
    let size = from.size();
    let mut memory = vec![0; PIECE_BYTES as usize];
    let (mut at, mut written) = (0, 0);
    while at < size {
        let (zero, length) = from.known_zero(at, size - at);
        let length = if zero { length } else { length.min(PIECE_BYTES) };
        if !zero {
            let piece = &mut memory[..length as usize];
            read(from, piece, at)?;
            for run in runs(piece.len(), BLOCK_BYTES, |block| !is_zero(&piece[block])) {
                written += run.len() as u64;
                write(to, &mut piece[run.clone()], at + run.start as u64)?;
            }
        }
        at += length;
        progress(at, size);
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_of_another_user_reaches_only_that_users_base() {
        let (root, alice, bob) = (0, 1001, 1002);
        assert!(may_write_base(root, root, root) && may_write_base(root, alice, root));
        assert!(may_write_base(alice, alice, root) && may_write_base(alice, bob, alice));
        assert!(!may_write_base(alice, root, root) && !may_write_base(alice, bob, root));
    }
}
