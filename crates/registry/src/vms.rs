//! Entries of this user's running VMs: one directory each, which the VM's monitor has locked.
//!
//! A monitor claims an entry before it opens the VM's files, writes the record, and drops the entry when the
//! VM has ended. Commands, the API, and restarted cells list the entries and read their records.
//!
//! A monitor that dies releases its locks. So an entry that can be locked is stale, and the next command
//! removes it. No daemon keeps the list, and no crash leaves a name taken. An entry whose lock can't be
//! opened is not stale: the error may be local, such as a limit of open files.
//!
//! Directories are removed only below a directory with a marker file, so a wrong runtime directory loses
//! nothing. All files are private, because a user who can open a lock can hold it.

mod entry;
mod record;
#[cfg(test)]
mod tests;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hostfiles::lock::{self, Flock, Share};
use hostfiles::private;

pub use self::entry::Entry;
use self::entry::remove_stale;
pub use self::record::{BOOT_LIMIT_S, Boot, HostPlace, Record, State, read};
use crate::journal::{Change, Journal};
use crate::runtime;

/// File that marks a directory of this program; all of its entries may be removed.
const MARKER: &str = ".mirrorball";
const GUARD: &str = ".lock";
const LAST_CID: &str = ".cid";
/// First guest address (CID) on the socket device; 0 to 2 are reserved.
const CID_FIRST: u32 = 3;

/// A failure of the registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A running VM has the name.
    #[error("a VM named {0} is running already; choose another name, or end it with `mirrorball stop {0}`")]
    Taken(String),
    /// No running VM has the name.
    #[error("no VM named {name} is running; {others}")]
    Unknown {
        /// Requested name.
        name: String,
        /// Existing names, as a part of a sentence.
        others: String,
    },
    /// The runtime directory can't be used.
    #[error("the directory of running VMs cannot be used: {0}")]
    Host(#[from] io::Error),
}

/// The entries below one runtime directory.
#[derive(Debug)]
pub struct Registry {
    vms: PathBuf,
    /// Time limit for the directory's lock.
    limit: Duration,
    /// Journal for ends of VMs that no process observed; none for shards of other hosts' VMs.
    journal: Option<Journal>,
}

impl Registry {
    /// The registry of this user.
    pub fn open() -> io::Result<Self> {
        Self::at(&runtime::directory()?)
    }

    /// The registry of the shards on this host that belong to VMs of other hosts.
    pub fn of_secondary_shards() -> io::Result<Self> {
        Ok(Self {
            journal: None,
            ..Self::at(&Self::parts_directory()?)?
        })
    }

    /// Returns the records of [`Registry::of_secondary_shards`], without creating its directory.
    pub fn listed_secondary_shards() -> io::Result<Vec<Record>> {
        let directory = Self::parts_directory()?;
        if !directory.exists() {
            return Ok(Vec::new());
        }
        Self::of_secondary_shards()?.list()
    }

    fn parts_directory() -> io::Result<PathBuf> {
        Ok(runtime::directory()?.join("parts"))
    }

    /// The registry below a runtime directory.
    pub fn at(directory: &Path) -> io::Result<Self> {
        let vms = directory.join("vms");
        DirBuilder::new()
            .recursive(true)
            .mode(private::DIRECTORY_MODE)
            .create(&vms)?;
        mark(&vms)?;
        let limit = lock::LIMIT;
        let journal = Some(Journal::at(directory));
        Ok(Self { vms, limit, journal })
    }

    /// Claims a name, and removes a stale entry of it.
    ///
    /// # Errors
    /// [`RegistryError::Taken`] if a VM of that name runs or is starting.
    pub fn claim(&self, name: &str) -> Result<Entry, RegistryError> {
        let _guard = self.guard()?;
        let folder = self.vms.join(name);
        if folder.symlink_metadata().is_ok() && !self.remove_stale(&folder)? {
            return Err(RegistryError::Taken(name.to_owned()));
        }
        Ok(Entry::create(folder)?)
    }

    /// Returns a new guest address on the socket device. Addresses repeat only when the number wraps around.
    pub fn next_cid(&self) -> io::Result<u32> {
        let _guard = self.guard()?;
        let file = self.vms.join(LAST_CID);
        let last = fs::read_to_string(&file)
            .ok()
            .and_then(|text| text.trim().parse::<u32>().ok());
        let next = last
            .and_then(|cid| cid.checked_add(1))
            .filter(|cid| *cid < u32::MAX)
            .unwrap_or(CID_FIRST);
        hostfiles::replace_volatile_file(&file, private::FILE_MODE, next.to_string().as_bytes())?;
        Ok(next)
    }

    /// Returns the records of all running VMs, by name. Removes the entries of dead monitors.
    pub fn list(&self) -> io::Result<Vec<Record>> {
        let _guard = self.guard()?;
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.vms)? {
            let entry = entry?;
            let folder = entry.path();
            if !entry.file_type()?.is_dir() || self.remove_stale(&folder)? {
                continue;
            }
            // An entry that is being created has no record yet.
            if let Ok(record) = read(&folder) {
                records.push(record);
            }
        }
        records.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(records)
    }

    /// Returns the directory of a running VM.
    pub fn find(&self, name: &str) -> Result<PathBuf, RegistryError> {
        let running = self.list()?;
        if running.iter().any(|record| record.name == name) {
            return Ok(self.vms.join(name));
        }
        let names: Vec<_> = running.iter().map(|record| record.name.as_str()).collect();
        let others = if names.is_empty() {
            "none is".to_owned()
        } else {
            format!("running: {}", names.join(", "))
        };
        Err(RegistryError::Unknown {
            name: name.to_owned(),
            others,
        })
    }

    /// Returns the directory of a VM with this name, which may not exist.
    ///
    /// # Errors
    /// If no VM can have the name.
    pub fn folder_of(&self, name: &str) -> io::Result<PathBuf> {
        let mut parts = Path::new(name).components();
        match (parts.next(), parts.next()) {
            (Some(std::path::Component::Normal(part)), None) if part == name => Ok(self.vms.join(name)),
            _ => Err(io::Error::other(format!("{name:?} is no VM's name"))),
        }
    }

    /// Removes an entry whose monitor is dead, and records the end of its VM. Returns false if the monitor is
    /// alive.
    ///
    /// # Errors
    /// If the lock shows neither; the VM may run.
    fn remove_stale(&self, folder: &Path) -> io::Result<bool> {
        remove_stale(folder, |record| {
            let change = Change::VmEnded {
                vm: record.name,
                status: None,
                why: Some("the processes that looked after it were killed".to_owned()),
            };
            // The entry is removed in any case.
            self.journal
                .iter()
                .for_each(|journal| _ = journal.append(change.clone()));
        })
    }

    /// Serialises changes of the directory between processes.
    fn guard(&self) -> io::Result<Flock<File>> {
        let path = self.vms.join(GUARD);
        let file = private::lock_file(&path).map_err(at(&path))?;
        lock::within(&path, file, Share::Exclusive, self.limit)
    }
}

/// Marks a new directory as this program's. An older unmarked directory must be empty.
fn mark(vms: &Path) -> io::Result<()> {
    let marker = vms.join(MARKER);
    let is_marked = || match marker.symlink_metadata() {
        Ok(about) => Ok(about.is_file()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(at(&marker)(error)),
    };
    if is_marked()? {
        return Ok(());
    }
    for entry in fs::read_dir(vms)? {
        let name = entry?.file_name();
        // Another process may have marked it meanwhile, and created an entry.
        if ![MARKER, GUARD, LAST_CID].iter().any(|own| name == **own) && !is_marked()? {
            let why = format!(
                "{} has entries and was not made by mirrorball, which removes what it does not need there; \
                 help: set {} to another directory, or, if this one is left from an older version, remove it",
                vms.display(),
                runtime::VARIABLE
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
    }
    private::lock_file(&marker).map_err(at(&marker)).map(drop)
}

/// Adds the path to an error.
fn at(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
