//! The VMs of the cell that this process serves, each on a thread of its own.
//!
//! A VM whose adoption has ended two processes of the cell, by a fault or an error, is set aside: its keeper has a monitor serve it.
//! The count is a file in the VM's directory while its adoption is under way.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hostfiles::private;
use keeper::socket::Socket;
use registry::control::{Request, ask};
use registry::vms::{self, Record, Registry};
use shard_api::Platform;

use crate::handle::Handle;
use crate::monitor::adopt_for_cell;
use crate::vm::keeper::KEEPER_SOCKET;

/// The file with the number of adoptions that were begun and not completed.
const BEGUN: &str = "adoptions";
/// Adoptions that may fail before the VM is set aside.
const FAILURES_MAX: u32 = 2;
/// Time that a VM has to be adopted before it is ended in another way.
const ADOPTION_LIMIT: Duration = Duration::from_secs(5);
/// Time between two looks whether it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Time that a VM has to end that another process serves.
const KILL_LIMIT: Duration = Duration::from_secs(30);

/// Adopts the cell's VMs. Cheap to clone; all clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Adoptions {
    cell: u16,
    platform: Platform,
    /// The VMs that are being adopted or served, with a handle once they are served.
    adopted: Arc<Mutex<BTreeMap<String, Option<Handle>>>>,
}

impl Adoptions {
    pub(super) fn new(cell: u16, platform: Platform) -> Self {
        Self {
            cell,
            platform,
            adopted: Arc::default(),
        }
    }

    /// Adopts the VMs that an earlier process of the cell left.
    ///
    /// # Errors
    /// If the registry can't be read.
    pub(super) fn begin_all(&self) -> io::Result<()> {
        let registry = Registry::open()?;
        for record in registry.list()? {
            // One over several hosts has none, and one whose monitor still starts it is adopted when that monitor asks.
            let has_socket =
                || Ok::<_, io::Error>(registry.folder_of(&record.name)?.join(KEEPER_SOCKET).exists());
            if record.cell == Some(self.cell)
                && has_socket()?
                && let Err(error) = self.begin(&record.name, false)
            {
                eprintln!("cell {}: {}: {error}", self.cell, record.name);
            }
        }
        Ok(())
    }

    /// Has the VM's keeper wait for the end of the process that serves it now, and serves it from then on; `again`, if it was set
    /// aside.
    ///
    /// # Errors
    /// If the VM is not of this cell, was set aside, or its keeper can't be reached.
    pub(super) fn begin(&self, name: &str, again: bool) -> io::Result<()> {
        let folder = Registry::open()?.folder_of(name)?;
        let record = vms::read(&folder)?;
        if record.cell != Some(self.cell) {
            return Err(io::Error::other("the VM has no place in this cell"));
        }
        if again {
            end_attempt(&folder);
        }
        self.begin_in(&folder, record)
    }

    /// Ends a VM because of a failed cell, also one that ran in that cell. Nothing waits for its end.
    pub(super) fn end(&self, name: &str, failed: u16) {
        let end = || {
            let folder = Registry::open()?.folder_of(name)?;
            let record = vms::read(&folder)?;
            let why = format!("cell {failed}, of which the VM used CPUs or memory, has failed");
            let adoptions = self.clone();
            let end = move || adoptions.end_now(&record, &folder, &why);
            std::thread::Builder::new().name("end".into()).spawn(end)
        };
        if let Err(error) = end() {
            eprintln!("cell {}: {name} is not ended: {error}", self.cell);
        }
    }

    /// Ends the VM of `record`; adopts it first if nobody serves it, so that its client learns why.
    fn end_now(&self, record: &Record, folder: &Path, why: &str) {
        if !self.adopted().contains_key(&record.name) {
            let adopted = self.begin_in(folder, record.clone());
            // One that can't be adopted is ended below.
            let _ = adopted;
        }
        let deadline = Instant::now() + ADOPTION_LIMIT;
        while Instant::now() < deadline {
            match self.adopted().get(&record.name).cloned() {
                Some(Some(vm)) => return vm.end_as_lost(why.to_owned()),
                Some(None) => {}
                None => break,
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        // By whoever serves it.
        let _ = ask(folder, &Request::Kill, Some(KILL_LIMIT));
    }

    /// Adopts the VM in `folder`.
    fn begin_in(&self, folder: &Path, record: Record) -> io::Result<()> {
        let name = record.name.clone();
        if self.adopted().contains_key(&name) {
            return Ok(());
        }
        let failures = failures(folder)?;
        let connection = Socket::connect(&folder.join(KEEPER_SOCKET))?;
        begin_attempt(folder, failures)?;
        self.adopted().insert(name.clone(), None);
        let (adoptions, folder) = (self.clone(), folder.to_owned());
        let serve = move || adoptions.serve(connection, &record.name, &folder);
        let begun = std::thread::Builder::new().name(name.clone()).spawn(serve);
        if begun.is_err() {
            self.adopted().remove(&name);
        }
        begun.map(drop)
    }

    /// Serves a VM, until it has ended or another process has to.
    fn serve(&self, keeper: OwnedFd, name: &str, folder: &Path) {
        let served = |vm: &Handle| {
            end_attempt(folder);
            self.adopted().insert(name.to_owned(), Some(vm.clone()));
        };
        if let Err(error) = adopt_for_cell(keeper, self.platform, served) {
            eprintln!("cell {}: {name} is not adopted: {error}", self.cell);
            // The process that serves it has not ended.
            if error.kind() == io::ErrorKind::TimedOut {
                end_attempt(folder);
            }
        }
        self.adopted().remove(name);
    }

    fn adopted(&self) -> MutexGuard<'_, BTreeMap<String, Option<Handle>>> {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adoptions of the VM that have failed in a row.
///
/// # Errors
/// If it was set aside for them.
fn failures(folder: &Path) -> io::Result<u32> {
    let failures: u32 = match fs::read_to_string(folder.join(BEGUN)) {
        Ok(text) => text.trim().parse().unwrap_or(FAILURES_MAX),
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error),
    };
    if failures >= FAILURES_MAX {
        return Err(io::Error::other(format!(
            "the VM was set aside, since its adoption failed {failures} times; help: `mirrorball cluster adopt VM` tries again"
        )));
    }
    Ok(failures)
}

/// Counts an adoption as failed until its end.
fn begin_attempt(folder: &Path, failures: u32) -> io::Result<()> {
    let text = (failures + 1).to_string();
    hostfiles::replace_volatile_file(&folder.join(BEGUN), private::FILE_MODE, text.as_bytes())
}

/// The adoption did not fail, and those before it count no longer.
fn end_attempt(folder: &Path) {
    // Without a file none was counted.
    let _ = fs::remove_file(folder.join(BEGUN));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_is_set_aside_when_two_adoptions_have_failed_in_a_row() {
        let directory = tempfile::tempdir().unwrap();
        let begin = || begin_attempt(directory.path(), failures(directory.path())?);
        for _ in 0..5 {
            begin().unwrap();
            end_attempt(directory.path());
        }
        begin().unwrap();
        begin().unwrap();
        let error = begin().unwrap_err().to_string();
        assert!(error.contains("set aside") && error.contains("help: "), "{error}");
        end_attempt(directory.path());
        begin().unwrap();
        fs::write(directory.path().join(BEGUN), "x").unwrap();
        assert!(begin().is_err(), "a count that makes no sense");
    }
}
