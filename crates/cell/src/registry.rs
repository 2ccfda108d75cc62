//! The VMs of this user that run now: a directory for each, locked by the monitor that runs it.
//!
//! A monitor that dies releases its locks, so an entry that can be locked is stale: whoever looks removes it. No daemon
//! keeps the list, and no crash leaves a name taken.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::cluster::interface::Part;
use crate::runtime;

/// The guests' addresses on the socket device start here; 0 to 2 are reserved.
const CID_FIRST: u32 = 3;

/// What is known of a running VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Its name.
    pub name: String,
    /// What it does now.
    pub state: State,
    /// The monitor's process.
    pub monitor_pid: u32,
    /// The shard's process, while there is one.
    pub shard_pid: Option<i32>,
    /// The processes of its other shards, when it spans cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub part_pids: Vec<i32>,
    /// Seconds since 1970.
    pub started_unix_s: u64,
    /// How often the guest started, reboots included.
    pub boots: u32,
    /// Its address on the socket device.
    pub cid: u32,
    /// The cell that it runs in, in a cluster.
    #[serde(default)]
    pub cell: Option<u16>,
    /// Of its memory, what is other cells'.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowed: Vec<Part>,
    /// What of it is in which cell, its home first, when it spans cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub span: Vec<policy::span::Part>,
    /// What of the sandbox could not be applied.
    pub sandbox_missing: Vec<String>,
    /// What it was started from.
    pub spec: config::VmSpec,
}

/// What a VM does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its files are being opened, or it reboots.
    Starting,
    /// Its vCPUs run.
    Running,
}

/// Why the registry can't do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Two VMs of one name.
    #[error("a VM named {0} is running already; choose another name, or end it with `mirrorball stop {0}`")]
    Taken(String),
    /// No such VM.
    #[error("no VM named {name} is running; {others}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        others: String,
    },
    /// The runtime directory.
    #[error("the directory of running VMs cannot be used: {0}")]
    Host(#[from] io::Error),
}

/// The registry.
#[derive(Debug)]
pub struct Registry {
    vms: PathBuf,
}

/// An entry of ours: the name is taken until this is dropped, and nothing of it is left then.
#[derive(Debug)]
pub struct Entry {
    folder: PathBuf,
    _lock: Flock<File>,
}

impl Registry {
    /// The registry of this user.
    pub fn open() -> io::Result<Self> {
        Self::at(&runtime::directory()?)
    }

    /// This user's for the parts that VMs of other hosts have here.
    pub fn of_parts() -> io::Result<Self> {
        Self::at(&Self::parts_directory()?)
    }

    /// What is in that one. It is not made if there was never any.
    pub fn listed_parts() -> io::Result<Vec<Record>> {
        let directory = Self::parts_directory()?;
        if !directory.exists() {
            return Ok(Vec::new());
        }
        Self::at(&directory)?.list()
    }

    fn parts_directory() -> io::Result<PathBuf> {
        Ok(runtime::directory()?.join("parts"))
    }

    /// The registry in a runtime directory.
    pub fn at(directory: &Path) -> io::Result<Self> {
        let vms = directory.join("vms");
        fs::DirBuilder::new().recursive(true).mode(0o711).create(&vms)?;
        Ok(Self { vms })
    }

    /// Takes a name.
    pub fn claim(&self, name: &str) -> Result<Entry, RegistryError> {
        let _guard = self.guard()?;
        let folder = self.vms.join(name);
        if folder.exists() && !remove_stale(&folder)? {
            return Err(RegistryError::Taken(name.to_owned()));
        }
        fs::DirBuilder::new().mode(0o711).create(&folder)?;
        let lock = File::create(folder.join("lock"))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, error)| io::Error::from(error))?;
        Ok(Entry { folder, _lock: lock })
    }

    /// An address for a guest on the socket device, different for each VM until numbers wrap around.
    pub fn next_cid(&self) -> io::Result<u32> {
        let _guard = self.guard()?;
        let file = self.vms.join(".cid");
        let last = fs::read_to_string(&file)
            .ok()
            .and_then(|text| text.trim().parse::<u32>().ok());
        let next = last
            .and_then(|cid| cid.checked_add(1))
            .filter(|cid| *cid < u32::MAX)
            .unwrap_or(CID_FIRST);
        fs::write(file, next.to_string())?;
        Ok(next)
    }

    /// Every running VM, by name. Entries of dead monitors are removed on the way.
    pub fn list(&self) -> io::Result<Vec<Record>> {
        let _guard = self.guard()?;
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.vms)?.flatten() {
            let folder = entry.path();
            if !folder.is_dir() || remove_stale(&folder)? {
                continue;
            }
            // One that is being made has no record yet.
            if let Ok(record) = read(&folder) {
                records.push(record);
            }
        }
        records.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(records)
    }

    /// The directory of a running VM.
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

    /// Serialises changes of the directory between processes.
    fn guard(&self) -> io::Result<Flock<File>> {
        let file = File::create(self.vms.join(".lock"))?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error.into())
    }
}

/// Removes an entry whose monitor is dead; false when it lives.
fn remove_stale(folder: &Path) -> io::Result<bool> {
    if let Ok(lock) = File::open(folder.join("lock"))
        && Flock::lock(lock, FlockArg::LockExclusiveNonblock).is_err()
    {
        return Ok(false);
    }
    fs::remove_dir_all(folder)?;
    Ok(true)
}

/// The record of a VM's directory.
pub fn read(folder: &Path) -> io::Result<Record> {
    Ok(serde_json::from_slice(&fs::read(folder.join("vm.json"))?)?)
}

impl Entry {
    /// The VM's directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Replaces the record, whole.
    pub fn write(&self, record: &Record) -> io::Result<()> {
        let new = self.folder.join("vm.json.new");
        fs::write(&new, serde_json::to_vec_pretty(record)?)?;
        fs::rename(new, self.folder.join("vm.json"))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // What can't be removed now is stale, and removed by the next who looks.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_until_its_entry_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path()).unwrap();
        let entry = registry.claim("a").unwrap();
        assert!(matches!(registry.claim("a"), Err(RegistryError::Taken(name)) if name == "a"));
        registry.claim("b").unwrap();
        drop(entry);
        registry.claim("a").unwrap();
    }

    #[test]
    fn what_a_dead_monitor_left_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path()).unwrap();
        let left = directory.path().join("vms/dead");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("lock"), "").unwrap();
        fs::write(left.join("console.sock"), "").unwrap();
        assert!(registry.list().unwrap().is_empty());
        assert!(!left.exists());
        assert!(matches!(
            registry.find("dead"),
            Err(RegistryError::Unknown { .. })
        ));
    }

    #[test]
    fn addresses_differ() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path()).unwrap();
        let cids: Vec<_> = (0..4).map(|_| registry.next_cid().unwrap()).collect();
        assert_eq!(cids, [3, 4, 5, 6]);
    }
}
