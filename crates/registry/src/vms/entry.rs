//! The entry of one VM: its directory, its lock, and the removal of a stale one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hostfiles::lock::{self, Flock, Share};
use hostfiles::private;

use super::at;
use super::record::{self, Record};

/// Age from which an unlocked entry counts as left from an interrupted claim or removal.
pub(super) const UNLOCKED_MAX: Duration = Duration::from_secs(10);

/// An entry of this process. The name is taken until this is dropped, which removes the directory.
#[derive(Debug)]
pub struct Entry {
    folder: PathBuf,
    /// Held as long as the entry exists; a successor takes the same open lock over.
    lock: Flock<File>,
}

impl Entry {
    /// Creates a locked entry, whose directory must not exist.
    pub(super) fn create(folder: PathBuf) -> io::Result<Self> {
        DirBuilder::new().mode(private::DIRECTORY_MODE).create(&folder)?;
        match claimed(&folder) {
            Ok(lock) => Ok(Self { folder, lock }),
            Err(error) => {
                // An entry that can't be removed now becomes stale later.
                let _ = fs::remove_dir_all(&folder);
                Err(error)
            }
        }
    }

    /// Takes over the entry of a predecessor of this process, with its open `lock`.
    ///
    /// # Errors
    /// If `lock` is not locked by the predecessor.
    pub fn adopt(folder: PathBuf, lock: File) -> io::Result<Self> {
        let held = lock::at_once(lock, Share::Exclusive)?;
        let lock = held.ok_or_else(|| at(&folder)(io::ErrorKind::ResourceBusy.into()))?;
        Ok(Self { folder, lock })
    }

    /// Returns the open lock, for a successor of this process.
    pub fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// The VM's directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Replaces the record atomically, so that readers see the old one or the new one.
    pub fn write(&self, record: &Record) -> io::Result<()> {
        let record = serde_json::to_vec_pretty(record)?;
        hostfiles::replace_volatile_file(&self.folder.join(record::FILE), private::FILE_MODE, &record)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // An entry that can't be removed now is stale, and the next command removes it.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Locks a new entry.
fn claimed(folder: &Path) -> io::Result<Flock<File>> {
    let path = folder.join("lock");
    let file = private::new_file(&path).map_err(at(&path))?;
    lock::at_once(file, Share::Exclusive)?.ok_or_else(|| at(&path)(io::ErrorKind::ResourceBusy.into()))
}

/// Removes an entry whose monitor is dead, and passes its record to `removed`, if it has one. Returns false
/// if the monitor is alive.
pub(super) fn remove_stale(folder: &Path, removed: impl FnOnce(Record)) -> io::Result<bool> {
    let path = folder.join("lock");
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path);
    let _lock = match opened {
        Ok(file) => match lock::at_once(file, Share::Exclusive).map_err(at(&path))? {
            Some(lock) => Some(lock),
            None => return Ok(false),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => match age(folder) {
            Ok(age) if age < UNLOCKED_MAX => return Ok(false),
            Ok(_) => None,
            // Its monitor has just removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(error) => return Err(error),
        },
        Err(error) => return Err(at(&path)(error)),
    };
    let record = record::read(folder);
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(folder)(error)),
        _ => {}
    }
    // A missing record means that the VM had not begun to start.
    if let Ok(record) = record {
        removed(record);
    }
    Ok(true)
}

/// The time since the content of a directory changed.
fn age(folder: &Path) -> io::Result<Duration> {
    let changed = folder.symlink_metadata().and_then(|about| about.modified());
    let changed = changed.map_err(at(folder))?;
    Ok(SystemTime::now().duration_since(changed).unwrap_or_default())
}
