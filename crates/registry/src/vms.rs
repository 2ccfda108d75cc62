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

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hostfiles::lock::{self, Flock, Share};
use hostfiles::private;
use serde::{Deserialize, Serialize};

use crate::cluster::admission::Limits;
use crate::cluster::interface::LentMemory;
use crate::journal::{Change, Journal};
use crate::monitor::NameRules;
use crate::runtime;
use crate::share_group::ShareGroup;

/// File that marks a directory of this program; all of its entries may be removed.
const MARKER: &str = ".mirrorball";
const GUARD: &str = ".lock";
const LAST_CID: &str = ".cid";
/// Age from which an unlocked entry counts as left from an interrupted claim or removal.
const UNLOCKED_MAX: Duration = Duration::from_secs(10);

/// First guest address (CID) on the socket device; 0 to 2 are reserved.
const CID_FIRST: u32 = 3;

/// Default time limit of a boot, from its start until the guest's agent replies, in seconds.
pub const BOOT_LIMIT_S: u64 = 120;

/// Last boot of a VM's guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Boot {
    /// Time limit of a boot, from its start until the agent replies, in seconds.
    pub limit_s: u64,
    /// Time of the last start or reboot, in seconds since 1970; none before the first start.
    #[serde(default)]
    pub begun_unix_s: Option<u64>,
}

impl Default for Boot {
    fn default() -> Self {
        Self {
            limit_s: BOOT_LIMIT_S,
            begun_unix_s: None,
        }
    }
}

/// The record of a running VM, which is `vm.json` in its directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The VM's name.
    pub name: String,
    /// State of its vCPUs.
    pub state: State,
    /// The process id of its monitor.
    pub monitor_pid: u32,
    /// The process id of its shard, while there is one.
    pub shard_pid: Option<i32>,
    /// The process id of its keeper, while it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeper_pid: Option<i32>,
    /// Process ids of its network processes: passt and frame filters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub card_pids: Vec<u32>,
    /// Process ids of its secondary shards, when it spans cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub part_pids: Vec<i32>,
    /// Start time, in seconds since 1970.
    pub started_unix_s: u64,
    /// Number of boots, reboots included.
    pub boots: u32,
    /// The last boot.
    #[serde(default)]
    pub boot: Boot,
    /// Guest address on the socket device.
    pub cid: u32,
    /// Its cell, in a cluster of its user's.
    #[serde(default)]
    pub cell: Option<u16>,
    /// Its placement in the host's cluster, which root owns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_place: Option<HostPlace>,
    /// Memory that its cell borrowed for it, by lender.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowed: Vec<LentMemory>,
    /// Its shards, the home shard first, when it spans cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub span: Vec<policy::span::Part>,
    /// Layers of the sandbox that could not be applied.
    pub sandbox_missing: Vec<String>,
    /// Kernel cookies of the cores that it runs on alone, one per shard; none without `core_scheduling`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub core_cookies: Vec<u64>,
    /// Names of its disks whose writes wait for space on the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub full_disks: Vec<String>,
    /// Whether it is paused.
    #[serde(default)]
    pub paused: bool,
    /// Its share group.
    #[serde(default)]
    pub share_group: Option<ShareGroup>,
    /// Its files that VMs of another group map; it reads copies of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept_apart: Vec<PathBuf>,
    /// User id of the API's member that started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<u32>,
    /// Rules by which its files were opened, if its names came from another user or another host. They hold
    /// for its clones, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<NameRules>,
    /// CPUs of pinned vCPUs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pins: BTreeMap<u8, Vec<usize>>,
    /// Cell of each of these pins, if the VM spans cells.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pin_cells: BTreeMap<u8, u16>,
    /// CPUs of pins that were dropped, and the reason, by vCPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dropped_pins: BTreeMap<u8, String>,
    /// Its current spec, with the changes since its start.
    pub spec: config::VmSpec,
}

impl Record {
    /// Creates the record of a VM that this process starts. `cid` is the guest's address on the socket
    /// device.
    pub fn new(name: String, spec: config::VmSpec, cid: u32) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            name,
            state: State::Starting,
            monitor_pid: std::process::id(),
            shard_pid: None,
            keeper_pid: None,
            card_pids: Vec::new(),
            part_pids: Vec::new(),
            started_unix_s: now.map_or(0, |now| now.as_secs()),
            boots: 0,
            boot: Boot::default(),
            cid,
            cell: None,
            host_place: None,
            borrowed: Vec::new(),
            span: Vec::new(),
            sandbox_missing: Vec::new(),
            core_cookies: Vec::new(),
            full_disks: Vec::new(),
            paused: false,
            pins: BTreeMap::new(),
            pin_cells: BTreeMap::new(),
            dropped_pins: BTreeMap::new(),
            share_group: None,
            kept_apart: Vec::new(),
            member: None,
            names: None,
            spec,
        }
    }
}

impl Record {
    /// Whether the VM uses CPUs or memory of this cell.
    pub fn depends_on(&self, cell: u16) -> bool {
        self.cell == Some(cell)
            || self.span.iter().any(|part| part.cell == cell)
            || self.borrowed.iter().any(|part| part.cell == cell)
    }
}

/// A placement in a cluster that another user owns.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct HostPlace {
    /// The cell.
    pub cell: u16,
    /// Enforcement of the cell's CPU and memory limits.
    pub limits: Limits,
}

/// State of a VM's vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its files are being opened, or it reboots.
    Starting,
    /// Its vCPUs run.
    Running,
}

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

/// An entry of this process. The name is taken until this is dropped, which removes the directory.
#[derive(Debug)]
pub struct Entry {
    folder: PathBuf,
    /// None once it is handed over.
    lock: Flock<File>,
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
        DirBuilder::new().mode(private::DIRECTORY_MODE).create(&folder)?;
        match claimed(&folder) {
            Ok(lock) => Ok(Entry { folder, lock }),
            Err(error) => {
                // An entry that can't be removed now becomes stale later.
                let _ = fs::remove_dir_all(&folder);
                Err(error.into())
            }
        }
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

/// Locks a new entry.
fn claimed(folder: &Path) -> io::Result<Flock<File>> {
    let path = folder.join("lock");
    let file = private::new_file(&path).map_err(at(&path))?;
    lock::at_once(file, Share::Exclusive)?.ok_or_else(|| at(&path)(io::ErrorKind::ResourceBusy.into()))
}

/// Removes an entry whose monitor is dead, and passes its record to `removed`, if it has one. Returns false
/// if the monitor is alive.
fn remove_stale(folder: &Path, removed: impl FnOnce(Record)) -> io::Result<bool> {
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
    let record = read(folder);
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

/// Adds the path to an error.
fn at(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Reads the record in a VM's directory.
pub fn read(folder: &Path) -> io::Result<Record> {
    Ok(serde_json::from_slice(&fs::read(folder.join("vm.json"))?)?)
}

impl Entry {
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
        hostfiles::replace_volatile_file(&self.folder.join("vm.json"), private::FILE_MODE, &record)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // An entry that can't be removed now is stale, and the next command removes it.
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
    fn name_stays_taken_while_a_successor_has_the_open_lock() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path()).unwrap();
        let entry = registry.claim("a").unwrap();
        let (folder, left) = (entry.folder().to_owned(), entry.lock().try_clone_to_owned());
        let left = File::from(left.unwrap());
        // The predecessor ends like a monitor that hands its VM over: without a destructor.
        std::mem::forget(entry);
        assert!(matches!(registry.claim("a"), Err(RegistryError::Taken(_))));
        let adopted = Entry::adopt(folder.clone(), left).unwrap();
        assert!(matches!(registry.claim("a"), Err(RegistryError::Taken(_))));
        let foreign = File::open(folder.join("lock")).unwrap();
        assert!(
            Entry::adopt(folder, foreign).is_err(),
            "another opening of the file"
        );
        drop(adopted);
        registry.claim("a").unwrap();
    }

    #[test]
    fn entry_of_a_dead_monitor_is_removed() {
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
    fn end_that_no_process_saw_is_noted_once_by_the_command_that_finds_it() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path()).unwrap();
        let entry = registry.claim("lost").unwrap();
        entry.write(&record("lost")).unwrap();
        // As after the death of its monitor and its keeper: the lock is free and the directory exists.
        let folder = entry.folder().to_owned();
        let kept = fs::read(folder.join("vm.json")).unwrap();
        drop(entry);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("lock"), "").unwrap();
        fs::write(folder.join("vm.json"), kept).unwrap();
        for _ in 0..2 {
            assert!(registry.list().unwrap().is_empty());
        }
        let mut events = crate::journal::Reader::from_start(Journal::at(directory.path()));
        let event = events.next_entry().unwrap().expect("the end").known().unwrap();
        assert!(
            matches!(&event.change, Change::VmEnded { vm, status: None, why: Some(_) } if vm == "lost"),
            "{event:?}"
        );
        assert_eq!(events.next_entry().unwrap(), None);
    }

    #[test]
    fn entry_that_is_removed_while_entries_are_listed_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        Registry::at(directory.path()).unwrap();
        // As if its monitor had removed it since its name was read.
        assert!(remove_stale(&directory.path().join("vms/gone"), drop).unwrap());
    }

    /// The lock of each can't be opened, as for a process at its limit of open files, or shows nothing.
    #[test]
    fn an_entry_is_removed_only_when_its_lock_was_taken() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path()).unwrap();
        let vms = directory.path().join("vms");
        let living = vms.join("living");
        fs::create_dir(&living).unwrap();
        fs::write(living.join("console.sock"), "").unwrap();
        // A link to itself, which no process can open.
        std::os::unix::fs::symlink("lock", living.join("lock")).unwrap();
        let error = registry.list().unwrap_err().to_string();
        assert!(error.contains("living/lock"), "{error}");
        assert!(matches!(registry.claim("living"), Err(RegistryError::Host(_))));
        assert!(living.join("console.sock").exists());
        fs::remove_dir_all(&living).unwrap();
        // An entry that is being created or removed, and then the remains of one.
        let young = vms.join("young");
        fs::create_dir(&young).unwrap();
        assert!(registry.list().unwrap().is_empty() && young.exists());
        assert!(matches!(registry.claim("young"), Err(RegistryError::Taken(_))));
        let long_ago = SystemTime::now() - 2 * UNLOCKED_MAX;
        File::open(&young).unwrap().set_modified(long_ago).unwrap();
        assert!(registry.list().unwrap().is_empty() && !young.exists());
    }

    #[test]
    fn a_directory_of_other_files_is_refused_and_loses_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let precious = directory.path().join("vms/precious");
        fs::create_dir_all(&precious).unwrap();
        fs::write(precious.join("disk.raw"), "all").unwrap();
        for _ in 0..2 {
            let error = Registry::at(directory.path()).unwrap_err().to_string();
            assert!(
                error.contains("not made by mirrorball") && error.contains("help: "),
                "{error}"
            );
            assert_eq!(fs::read(precious.join("disk.raw")).unwrap(), b"all");
        }
        fs::remove_dir_all(&precious).unwrap();
        Registry::at(directory.path()).unwrap().claim("a").unwrap();
        Registry::at(directory.path()).unwrap();
    }

    #[test]
    fn files_of_the_registry_are_closed_to_other_users() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path()).unwrap();
        let entry = registry.claim("a").unwrap();
        registry.next_cid().unwrap();
        entry.write(&record("a")).unwrap();
        assert_eq!(read(entry.folder()).unwrap().name, "a");
        let vms = directory.path().join("vms");
        for (folder, count) in [(vms.as_path(), 4), (entry.folder(), 2)] {
            let entries: Vec<_> = fs::read_dir(folder).unwrap().map(Result::unwrap).collect();
            assert_eq!(entries.len(), count, "{entries:?}");
            for entry in entries {
                let about = entry.metadata().unwrap();
                let wanted = match about.is_dir() {
                    true => private::DIRECTORY_MODE,
                    false => 0o600,
                };
                assert_eq!(about.permissions().mode() & 0o7777, wanted, "{entry:?}");
            }
        }
    }

    #[test]
    fn a_guard_that_is_held_is_an_error_that_names_the_holder() {
        let directory = tempfile::tempdir().unwrap();
        let mut registry = Registry::at(directory.path()).unwrap();
        registry.limit = Duration::from_millis(100);
        let held = registry.guard().unwrap();
        let error = registry.list().unwrap_err().to_string();
        let holder = format!("process {}", std::process::id());
        assert!(error.contains("vms/.lock") && error.contains(&holder), "{error}");
        drop(held);
        registry.list().unwrap();
    }

    fn record(name: &str) -> Record {
        let spec = config::parse("vm.toml", "image = \"x\"").unwrap();
        Record::new(name.to_owned(), spec, CID_FIRST)
    }

    #[test]
    fn addresses_differ() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::at(directory.path()).unwrap();
        let cids: Vec<_> = (0..4).map(|_| registry.next_cid().unwrap()).collect();
        assert_eq!(cids, [3, 4, 5, 6]);
    }
}
