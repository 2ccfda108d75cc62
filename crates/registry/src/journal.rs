//! Journal of the events of this user's VMs and cells on this host, in order.
//!
//! The journal has two files in the directory `events` of the runtime directory, `current` and `previous`, of
//! at most 1 MiB each. The process that changes a state appends the event: a VM's monitor or cell, a cell's
//! guard, or a command. `mirrorball events` and the API read it ([`reader`]).
//!
//! An event is a line of JSON, written by one call to a file that is open for appending (`O_APPEND`), under a
//! lock. The lock is released when its holder dies. A stopped holder delays other writers by 1 s; then they
//! write without the lock. A writer that is killed during the call leaves an unterminated line. The next
//! writer starts a new line, and readers report a gap.
//!
//! A file's first line has the journal's number, which is new when the directory is, and the file's
//! generation. Both and an offset form a [`Token`]: the position after an event, from which a reader
//! continues.

mod reader;
mod token;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hostfiles::AtomicFile;
use hostfiles::lock::{self, Share};
use hostfiles::private;
use serde::{Deserialize, Serialize};

pub use reader::{Entry, Reader};
pub use token::{Token, TokenError};

use crate::runtime;

/// Maximum size of each of the two files, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Time limit for the lock.
const LOCK_LIMIT: Duration = Duration::from_secs(1);
/// Maximum length of a reason in an event, in characters.
const WHY_MAX: usize = 1000;
/// Maximum length of a file's first line, in bytes.
const HEADER_MAX: usize = 128;
/// Maximum rotations during one scan of the files, after which the scan fails.
const ROTATIONS_MAX: u32 = 100;

/// A change of a VM or a cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Change {
    /// A VM has its name and its place; the monitor opens its files.
    VmStarting {
        /// The VM's name.
        vm: String,
        /// Cell of the VM, in a cluster.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cell: Option<u16>,
    },
    /// The VM's vCPUs run for the first time.
    VmRunning {
        /// The VM's name.
        vm: String,
    },
    /// The vCPUs run again after a reboot, a reset, or an end after which the VM restarts.
    VmRebooted {
        /// The VM's name.
        vm: String,
        /// The number of its boots.
        boots: u32,
    },
    /// The VM has ended and restarts.
    VmStartsAgain {
        /// Name of the VM.
        vm: String,
        /// Reason for the end.
        why: String,
    },
    /// The VM was paused.
    VmPaused {
        /// The VM's name.
        vm: String,
    },
    /// The VM was resumed.
    VmResumed {
        /// The VM's name.
        vm: String,
    },
    /// The set of disks whose writes wait for space on the host has changed.
    VmFullDisks {
        /// The VM's name.
        vm: String,
        /// Disks that wait now.
        disks: Vec<String>,
    },
    /// Another process has taken over serving the VM.
    VmAdopted {
        /// The VM's name.
        vm: String,
        /// Id of that process.
        pid: u32,
        /// Cell of the VM, in a cluster.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cell: Option<u16>,
    },
    /// The VM did not start.
    VmFailed {
        /// The VM's name.
        vm: String,
        /// Reason and help.
        why: String,
    },
    /// The VM has ended.
    VmEnded {
        /// The VM's name.
        vm: String,
        /// Exit status of `mirrorball run`; none if no process observed the end.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        status: Option<u8>,
        /// Reason; none for the guest's power-off.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// A process of the cell has started.
    CellUp {
        /// Number of the cell.
        cell: u16,
        /// Incarnation number of the process, counted from the cell's first.
        life: u32,
        /// Id of the process.
        pid: u32,
    },
    /// The cell's process was ended on request.
    CellDown {
        /// Number of the cell.
        cell: u16,
    },
    /// The cell's process has died. Its guard starts the next one if it can.
    CellDied {
        /// Number of the cell.
        cell: u16,
        /// Cause of death.
        why: String,
    },
    /// The cell has failed: its CPUs and its memory count as lost.
    CellFailed {
        /// Number of the cell.
        cell: u16,
    },
    /// The cell was cordoned: it takes no new VM.
    CellCordoned {
        /// Number of the cell.
        cell: u16,
    },
    /// The cell's cordon has ended.
    CellUncordoned {
        /// Number of the cell.
        cell: u16,
    },
    /// Events are missing here: the requested position is gone, or an event was truncated. Readers create
    /// this event; it is in no file.
    Gap {
        /// Reason for the gap.
        why: String,
    },
}

/// A change and its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Time, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The change; in JSON its fields lie beside the time.
    #[serde(flatten)]
    pub change: Change,
}

impl Event {
    fn now(change: Change) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let unix_ms = now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
        Self { unix_ms, change }
    }
}

impl Change {
    /// Truncates texts that others chose.
    fn bounded(mut self) -> Self {
        let why = match &mut self {
            Self::VmStartsAgain { why, .. }
            | Self::VmFailed { why, .. }
            | Self::VmEnded { why: Some(why), .. }
            | Self::CellDied { why, .. } => why,
            _ => return self,
        };
        if let Some((end, _)) = why.char_indices().nth(WHY_MAX) {
            why.truncate(end);
            why.push_str(" ...");
        }
        self
    }
}

/// The first line of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    journal: u64,
    generation: u64,
}

impl Header {
    fn line(self) -> io::Result<Vec<u8>> {
        let mut line = serde_json::to_vec(&self)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Reads the header of a file and the offset after it.
    fn of(file: &File) -> io::Result<(Self, u64)> {
        let mut start = [0; HEADER_MAX];
        let count = file.read_at(&mut start, 0)?;
        let line = start[..count].split_inclusive(|byte| *byte == b'\n').next();
        let line = line.filter(|line| line.ends_with(b"\n"));
        let line = line.ok_or_else(|| io::Error::other("a file of events has no first line"))?;
        Ok((serde_json::from_slice(line)?, line.len() as u64))
    }
}

/// An open file of a journal, its header, and the offset after it.
type JournalFile = (Header, u64, File);

/// The journal of a runtime directory. The first event creates its files.
#[derive(Clone, Debug)]
pub struct Journal {
    directory: PathBuf,
    bytes_max: u64,
    lock_limit: Duration,
}

impl Journal {
    /// The journal of this user.
    ///
    /// # Errors
    /// Those of the runtime directory.
    pub fn open() -> io::Result<Self> {
        Ok(Self::at(&runtime::directory()?))
    }

    /// Returns the journal below a runtime directory.
    pub fn at(runtime: &Path) -> Self {
        Self {
            directory: runtime.join("events"),
            bytes_max: FILE_BYTES_MAX,
            lock_limit: LOCK_LIMIT,
        }
    }

    /// Whether the journal has files.
    pub fn exists(&self) -> bool {
        self.directory.join("current").exists()
    }

    /// Appends an event.
    ///
    /// # Errors
    /// If it can't be written, as on a full disk.
    pub fn append(&self, change: Change) -> io::Result<()> {
        private::directories(&self.directory)?;
        let mut line = serde_json::to_vec(&Event::now(change.bounded()))?;
        line.push(b'\n');
        let lock = self.directory.join("lock");
        // A stopped lock holder must not stop a VM.
        let held = lock::within(
            &lock,
            private::lock_file(&lock)?,
            Share::Exclusive,
            self.lock_limit,
        )
        .ok();
        let mut file = self.current()?;
        let mut length = file.metadata()?.len();
        if held.is_some() && length + line.len() as u64 > self.bytes_max {
            self.rotate(&file)?;
            file = self.current()?;
            length = file.metadata()?.len();
        }
        if !ends_a_line(&file, length)? {
            line.insert(0, b'\n');
        }
        match file.write(&line)? {
            count if count == line.len() => Ok(()),
            _ => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    /// Opens the newest file for appending and reading. Creates a missing one.
    fn current(&self) -> io::Result<File> {
        let path = self.directory.join("current");
        let open = || File::options().read(true).append(true).open(&path);
        match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                let nanoseconds = now.map_or(0, |now| now.as_nanos());
                // The numbers of two journals differ unless both were created in the same nanosecond.
                let journal = (nanoseconds % u128::from(u64::MAX)) as u64;
                let first = Header {
                    journal,
                    generation: 1,
                };
                let new = AtomicFile::beside(&path)?;
                new.file().write_all_at(&first.line()?, 0)?;
                match new.publish_new() {
                    // Another writer has created it first.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    made => made?,
                }
                open()
            }
            opened => opened,
        }
    }

    /// Starts the next file. `current` always exists; an interrupted rotation is done again.
    fn rotate(&self, current: &File) -> io::Result<()> {
        let (header, _) = Header::of(current)?;
        let (path, previous) = (self.directory.join("current"), self.directory.join("previous"));
        match fs::remove_file(&previous) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::hard_link(&path, &previous)?;
        let next = Header {
            generation: header.generation + 1,
            ..header
        };
        hostfiles::replace_volatile_file(&path, private::FILE_MODE, &next.line()?)
    }

    /// Returns the existing files, the oldest first.
    fn files(&self) -> io::Result<Vec<JournalFile>> {
        self.files_by(|name| self.open_file(name))
    }

    /// Does the same with the files that `open` opens. No rotation between two calls hides a file: if
    /// `previous` is the same before and after `current` was opened, no rotation has finished meanwhile.
    fn files_by(
        &self,
        mut open: impl FnMut(&str) -> io::Result<Option<JournalFile>>,
    ) -> io::Result<Vec<JournalFile>> {
        let header = |file: &Option<JournalFile>| file.as_ref().map(|(header, ..)| *header);
        let mut previous = open("previous")?;
        for _ in 0..ROTATIONS_MAX {
            let current = open("current")?;
            let again = open("previous")?;
            if header(&again) == header(&previous) {
                // An interrupted rotation has given one file both names.
                let current = current.filter(|current| header(&previous) != Some(current.0));
                return Ok(previous.into_iter().chain(current).collect());
            }
            previous = again;
        }
        Err(io::Error::other("the files of events change too fast to be read"))
    }

    fn open_file(&self, name: &str) -> io::Result<Option<JournalFile>> {
        match File::open(self.directory.join(name)) {
            Ok(file) => {
                let (header, start) = Header::of(&file)?;
                Ok(Some((header, start, file)))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Appends an event to this user's journal. An event that can't be written is dropped: a full disk ends no
/// VM.
pub fn note(change: Change) {
    let _ = Journal::open().and_then(|journal| journal.append(change));
}

fn ends_a_line(file: &File, length: u64) -> io::Result<bool> {
    let mut last = [0];
    let Some(at) = length.checked_sub(1) else {
        return Ok(true);
    };
    Ok(file.read_at(&mut last, at)? == 0 || last == *b"\n")
}

#[cfg(test)]
mod tests;
