//! The folder of a user's templates.
//!
//! ```text
//! <data>/templates/KEY/template.json     basis, size, time
//! <data>/templates/KEY/snapshot/         the snapshot
//! <data>/templates/KEY/used              modified at each start from the template
//! <data>/templates/KEY.lock              shared while a start reads the template, exclusive for changes
//! <data>/templates/.making-PID-KEY/      a template that is being made
//! <data>/templates/.removing-PID-KEY/    a template that is being removed
//! ```

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diskstore::disk::SECTOR_BYTES;
use diskstore::image::Record;
use hostfiles::lock::{self, Flock, Share};
use hostfiles::private;
use policy::templates::{TemplateUse, to_remove};
use serde::{Deserialize, Serialize};

use super::basis::{Basis, Key};
use super::{TemplateError, at};
use crate::snapshot;
use crate::snapshot::directory::Directory;

const DESCRIPTION: &str = "template.json";
const SNAPSHOT: &str = "snapshot";
const USED: &str = "used";
const PLACEHOLDER: &str = "placeholder";
/// Size of the file that stands for a template's disks beside the image's: the least that a disk may have.
pub const PLACEHOLDER_SECTORS: u64 = 1;
const MAKING: &str = ".making-";
const REMOVING: &str = ".removing-";
const LOCK: &str = ".lock";
/// Greatest length of a description, bytes.
const DESCRIPTION_BYTES_MAX: u64 = 64 << 10;

/// Content of `template.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Description {
    basis: Basis,
    /// Bytes of the disk that the snapshot takes.
    bytes: u64,
    /// Seconds since 1970.
    made_s: u64,
}

/// A template in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateEntry {
    /// Its key.
    pub key: Key,
    /// Everything that it stands on.
    pub basis: Basis,
    /// Bytes of the disk that it takes.
    pub bytes: u64,
    /// Time when it was made, seconds since 1970.
    pub made_s: u64,
    /// Time of the last start from it, seconds since 1970.
    pub used_s: u64,
}

/// The templates of one data directory.
#[derive(Clone, Debug)]
pub struct TemplateStore {
    directory: PathBuf,
    /// Users who may own a template's files, beside root.
    owners: Vec<u32>,
}

/// A template that is not removed while this lives.
#[derive(Debug)]
pub struct Template {
    /// Its key.
    pub key: Key,
    /// Directory of its snapshot.
    pub snapshot: PathBuf,
    _lock: Flock<File>,
}

/// The result of a search.
#[derive(Debug)]
pub enum Found {
    /// The template, whose use was recorded.
    Ready(Template),
    /// There is none.
    Missing,
    /// It was cut off or changed, for this reason.
    Damaged(String),
}

/// The state of a template on the disk.
enum Check {
    Whole,
    Missing,
    /// It was cut off or changed, for this reason.
    Damaged(String),
}

/// The start of making a template.
#[derive(Debug)]
pub enum Begun {
    /// Another process made it meanwhile.
    Made(Template),
    /// This process is to make it.
    Making(Box<Making>),
}

/// A template that is being made. It is removed unless it is published.
#[derive(Debug)]
pub struct Making {
    /// Its key.
    pub key: Key,
    basis: Basis,
    folder: PathBuf,
    place: PathBuf,
    lock: Option<Flock<File>>,
}

impl TemplateStore {
    /// Opens the store in the data directory `data`, and creates it when absent.
    pub fn open(data: &Path, owners: &[u32]) -> Result<Self, TemplateError> {
        let directory = data.join("templates");
        private::directories(&directory).map_err(at(&directory))?;
        Ok(Self {
            directory,
            owners: owners.to_vec(),
        })
    }

    /// Seeks the template of `basis`, and records its use.
    pub fn find(&self, basis: &Basis) -> Result<Found, TemplateError> {
        let key = self.key(basis)?;
        let lock = self.lock(&key, Share::Shared, lock::LIMIT)?;
        Ok(match self.check(&key, basis)? {
            Check::Whole => Found::Ready(self.template(key, lock)),
            Check::Missing => Found::Missing,
            Check::Damaged(why) => Found::Damaged(why),
        })
    }

    /// Begins to make the template of `basis`. Waits for another process that makes it, for at most `limit`.
    /// A damaged one is removed.
    pub fn begin(&self, basis: &Basis, limit: Duration) -> Result<Begun, TemplateError> {
        let key = self.key(basis)?;
        let lock = loop {
            let lock = self.lock(&key, Share::Exclusive, limit)?;
            match self.check(&key, basis)? {
                Check::Whole => return Ok(Begun::Made(self.template(key, lock))),
                Check::Missing => break lock,
                // The lock's file goes, too, and the next lock is on another.
                Check::Damaged(_) => self.discard(&key)?,
            }
        };
        self.clear_remains(&key)?;
        let folder = self
            .directory
            .join(format!("{MAKING}{}-{key}", std::process::id()));
        fs::DirBuilder::new()
            .mode(private::DIRECTORY_MODE)
            .create(&folder)
            .map_err(at(&folder))?;
        Ok(Begun::Making(Box::new(Making {
            place: self.directory.join(key.as_str()),
            key,
            basis: basis.clone(),
            folder,
            lock: Some(lock),
        })))
    }

    fn key(&self, basis: &Basis) -> Result<Key, TemplateError> {
        basis.key().map_err(at(&self.directory))
    }

    fn template(&self, key: Key, lock: Flock<File>) -> Template {
        Template {
            snapshot: self.directory.join(key.as_str()).join(SNAPSHOT),
            key,
            _lock: lock,
        }
    }

    /// Checks that the template `key` is there, whole, and that of `basis`, and records its use. The caller
    /// has the key's lock.
    fn check(&self, key: &Key, basis: &Basis) -> Result<Check, TemplateError> {
        let folder = self.directory.join(key.as_str());
        if !folder.is_dir() {
            return Ok(Check::Missing);
        }
        match describe(&folder) {
            Ok(description) if description.basis == *basis => {}
            Ok(_) => return Ok(Check::Damaged("its name is another template's".to_owned())),
            Err(error) => return Ok(Check::Damaged(error.to_string())),
        }
        let opened = Directory::open(&folder.join(SNAPSHOT), &self.owners)
            .and_then(|directory| snapshot::open(&directory));
        if let Err(error) = opened {
            return Ok(Check::Damaged(error.to_string()));
        }
        let used = folder.join(USED);
        touch(&used).map_err(at(&used))?;
        Ok(Check::Whole)
    }

    /// Lists the templates by key. Those that can't be read are left out.
    pub fn list(&self) -> Result<Vec<TemplateEntry>, TemplateError> {
        let mut entries: Vec<TemplateEntry> = self
            .names()?
            .iter()
            .filter_map(|name| self.entry(Key::parse(name)?))
            .collect();
        entries.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(entries)
    }

    fn entry(&self, key: Key) -> Option<TemplateEntry> {
        let folder = self.directory.join(key.as_str());
        let Description { basis, bytes, made_s } = describe(&folder).ok()?;
        let used = fs::metadata(folder.join(USED)).and_then(|about| about.modified());
        Some(TemplateEntry {
            key,
            basis,
            bytes,
            made_s,
            used_s: used.map_or(made_s, seconds),
        })
    }

    fn names(&self) -> Result<Vec<String>, TemplateError> {
        let entries = fs::read_dir(&self.directory).map_err(at(&self.directory))?;
        Ok(entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect())
    }

    /// Removes the template `key`; false if there is none, or a start reads it.
    pub fn remove(&self, key: &Key) -> Result<bool, TemplateError> {
        if !self.directory.join(key.as_str()).is_dir() {
            return Ok(false);
        }
        let path = self.lock_path(key);
        let file = private::lock_file(&path).map_err(at(&path))?;
        let Some(_lock) = lock::at_once(file, Share::Exclusive).map_err(at(&path))? else {
            return Ok(false);
        };
        self.discard(key).map(|()| true)
    }

    /// Removes the templates that `is_gone` selects; returns those that were removed.
    pub fn remove_each(
        &self,
        is_gone: impl Fn(&TemplateEntry) -> bool,
    ) -> Result<Vec<TemplateEntry>, TemplateError> {
        let mut removed = Vec::new();
        for entry in self.list()?.into_iter().filter(is_gone) {
            if self.remove(&entry.key)? {
                removed.push(entry);
            }
        }
        Ok(removed)
    }

    /// Removes the templates of an image that has other files now.
    pub fn remove_stale(&self, record: &Record) -> Result<Vec<TemplateEntry>, TemplateError> {
        self.remove_each(|entry| entry.basis.image == record.name && entry.basis.is_stale(record))
    }

    /// Removes the least recently used templates until all take `limit` bytes at most. `kept` stays.
    pub fn fit(&self, limit: u64, kept: &Key) -> Result<Vec<TemplateEntry>, TemplateError> {
        let entries = self.list()?;
        let uses: Vec<TemplateUse> = entries
            .iter()
            .map(|entry| TemplateUse {
                bytes: entry.bytes,
                used_s: entry.used_s,
                is_kept: entry.key == *kept,
            })
            .collect();
        let gone = to_remove(&uses, limit);
        self.remove_each(|entry| gone.iter().any(|index| entries[*index].key == entry.key))
    }

    /// Removes the template under its exclusive lock. An interrupted removal leaves only remains.
    fn discard(&self, key: &Key) -> Result<(), TemplateError> {
        let folder = self.directory.join(key.as_str());
        let grave = self
            .directory
            .join(format!("{REMOVING}{}-{key}", std::process::id()));
        fs::rename(&folder, &grave).map_err(at(&folder))?;
        let lock = self.lock_path(key);
        fs::remove_file(&lock).map_err(at(&lock))?;
        fs::remove_dir_all(&grave).map_err(at(&grave))
    }

    /// Removes what dead processes have left: all remains of `key`, whose lock this process has, and those of
    /// keys that no process has locked.
    fn clear_remains(&self, key: &Key) -> Result<(), TemplateError> {
        for name in self.names()? {
            let rest = [MAKING, REMOVING]
                .iter()
                .find_map(|prefix| name.strip_prefix(prefix));
            let Some(of) = rest.and_then(|rest| Key::parse(rest.split_once('-')?.1)) else {
                continue;
            };
            let path = self.lock_path(&of);
            let free = of == *key
                || match File::open(&path) {
                    Ok(file) => matches!(lock::at_once(file, Share::Exclusive), Ok(Some(_))),
                    Err(error) => error.kind() == ErrorKind::NotFound && name.starts_with(REMOVING),
                };
            if free {
                let remains = self.directory.join(&name);
                match fs::remove_dir_all(&remains) {
                    // Another process has removed it, too.
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    removed => removed.map_err(at(&remains))?,
                }
            }
        }
        Ok(())
    }

    fn lock_path(&self, key: &Key) -> PathBuf {
        self.directory.join(format!("{key}{LOCK}"))
    }

    /// Locks the key. A removal unlinks the lock's file, so a lock on an unlinked file is taken again.
    fn lock(&self, key: &Key, share: Share, limit: Duration) -> Result<Flock<File>, TemplateError> {
        let path = self.lock_path(key);
        loop {
            let file = private::lock_file(&path).map_err(at(&path))?;
            let lock = lock::within(&path, file, share, limit).map_err(at(&path))?;
            let own = lock.metadata().map_err(at(&path))?.ino();
            if fs::metadata(&path).is_ok_and(|about| about.ino() == own) {
                return Ok(lock);
            }
        }
    }
}

impl Making {
    /// The directory in which the snapshot is to be written; it does not exist.
    pub fn snapshot(&self) -> PathBuf {
        self.folder.join(SNAPSHOT)
    }

    /// Creates the file that stands for each of the template's disks beside the image's: zeroes, which no VM
    /// gets.
    pub fn placeholder(&self) -> Result<PathBuf, TemplateError> {
        let path = self.folder.join(PLACEHOLDER);
        private::new_file(&path)
            .and_then(|file| file.set_len(PLACEHOLDER_SECTORS * SECTOR_BYTES))
            .map_err(at(&path))?;
        Ok(path)
    }

    /// Everything that the template stands on.
    pub fn basis(&self) -> &Basis {
        &self.basis
    }

    /// Makes the written snapshot, which takes `bytes`, a template. All of it is on the disk before it has
    /// its name.
    pub fn publish(mut self, bytes: u64) -> Result<Template, TemplateError> {
        let path = self.folder.join(DESCRIPTION);
        let description = Description {
            basis: self.basis.clone(),
            bytes,
            made_s: seconds(SystemTime::now()),
        };
        let write = || -> io::Result<()> {
            let mut file = private::new_file(&path)?;
            file.write_all(&serde_json::to_vec_pretty(&description)?)?;
            file.sync_all()?;
            touch(&self.folder.join(USED))?;
            File::open(self.snapshot())?.sync_all()?;
            File::open(&self.folder)?.sync_all()?;
            fs::rename(&self.folder, &self.place)?;
            File::open(self.place.parent().unwrap_or(&self.place))?.sync_all()
        };
        write().map_err(at(&path))?;
        let lock = self
            .lock
            .take()
            .ok_or_else(|| at(&path)(ErrorKind::InvalidInput.into()))?;
        Ok(Template {
            key: self.key.clone(),
            snapshot: self.place.join(SNAPSHOT),
            _lock: lock,
        })
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // The next maker removes what can't be removed now.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Reads the description of the template in `folder`.
fn describe(folder: &Path) -> io::Result<Description> {
    let file = File::open(folder.join(DESCRIPTION))?;
    let mut text = Vec::new();
    file.take(DESCRIPTION_BYTES_MAX).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Sets the time of a file's last change to now; creates a missing file.
fn touch(path: &Path) -> io::Result<()> {
    private::lock_file(path)?.set_modified(SystemTime::now())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
