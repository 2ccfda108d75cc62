//! Locks of a cell: its process holds one, and its guard another.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hostfiles::lock::{Flock, Share, at_once, within};
use hostfiles::private;
use protocol::CellId;

use super::CellFiles;

/// Time for which a lock may be held by processes that only probe it ([`is_locked`]).
const PROBE_LIMIT: Duration = Duration::from_millis(200);

/// The exclusive right to run a cell, held until dropped.
#[derive(Debug)]
pub struct CellLock {
    /// Number and incarnation of the cell.
    pub id: CellId,
    _lock: Flock<File>,
}

/// The exclusive right to guard a cell, held until dropped.
#[derive(Debug)]
pub struct GuardLock {
    lock: Flock<File>,
    path: PathBuf,
}

impl GuardLock {
    /// Whether the cell is still the one that the guard began with: its files were not removed, by
    /// `cluster down`, and not made anew.
    pub fn is_current(&self) -> bool {
        let is_same =
            |now: fs::Metadata, held: fs::Metadata| (now.dev(), now.ino()) == (held.dev(), held.ino());
        match (fs::metadata(&self.path), self.lock.metadata()) {
            (Ok(now), Ok(held)) => is_same(now, held),
            // Without memory or descriptors nothing is known.
            (Err(error), _) => error.kind() != io::ErrorKind::NotFound,
            (_, Err(_)) => true,
        }
    }
}

impl CellFiles {
    /// Whether the cell's process runs.
    pub fn runs(&self) -> bool {
        is_locked(&self.0.join("lock"))
    }

    /// Whether a guard watches over the cell. A guard of the release before does not show.
    pub fn is_guarded(&self) -> bool {
        is_locked(&self.0.join("guard.lock"))
    }

    /// Makes this process the cell's guard.
    ///
    /// # Errors
    /// `ResourceBusy` if another process guards the cell.
    pub fn claim_guard(&self, number: u16) -> io::Result<GuardLock> {
        let path = self.0.join("guard.lock");
        let lock = claim_lock(&path)?;
        let lock = lock.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("cell {number} has a guard already"),
            )
        })?;
        Ok(GuardLock { lock, path })
    }

    /// Makes this process the cell's, with the next incarnation number.
    ///
    /// # Errors
    /// `ResourceBusy` if another process runs the cell.
    pub fn claim(&self, number: u16) -> io::Result<CellLock> {
        let lock = claim_lock(&self.0.join("lock"))?;
        let lock = lock.ok_or_else(|| {
            io::Error::new(io::ErrorKind::ResourceBusy, format!("cell {number} runs already"))
        })?;
        let life = self.life() + 1;
        self.set_life(life)?;
        Ok(CellLock {
            id: CellId { number, life },
            _lock: lock,
        })
    }
}

/// Acquires the lock of a file, or returns none if another process keeps it.
fn claim_lock(path: &Path) -> io::Result<Option<Flock<File>>> {
    match within(path, private::lock_file(path)?, Share::Exclusive, PROBE_LIMIT) {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether another process keeps the lock of a file. Holds the lock for a moment itself.
fn is_locked(path: &Path) -> bool {
    let Ok(lock) = File::open(path) else {
        return false;
    };
    !matches!(at_once(lock, Share::Shared), Ok(Some(_)))
}
