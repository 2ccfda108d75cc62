//! The VMs of the cell that this process serves, each on a thread of its own.
//!
//! A VM whose adoption has ended two processes of the cell, by a fault or an error, is set aside: its keeper has a monitor serve it.
//! The count is a file in the VM's directory while its adoption is under way.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hostfiles::private;
use keeper::socket::Socket;
use registry::vms::{self, Record, Registry};
use shard_api::Platform;

use crate::monitor::adopt_for_cell;
use crate::vm::keeper::KEEPER_SOCKET;

/// The file with the number of adoptions that were begun and not completed.
const BEGUN: &str = "adoptions";
/// Adoptions that may fail before the VM is set aside.
const FAILURES_MAX: u32 = 2;

/// Adopts the cell's VMs. Cheap to clone; all clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Adoptions {
    cell: u16,
    platform: Platform,
    /// The VMs that are being adopted or served.
    adopted: Arc<Mutex<BTreeSet<String>>>,
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
            let has_socket = || Ok::<_, io::Error>(registry.folder_of(&record.name)?.join(KEEPER_SOCKET).exists());
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
        if !self.adopted().insert(name.to_owned()) {
            return Ok(());
        }
        if again {
            end_attempt(&folder);
        }
        let adoptions = self.clone();
        let begun = failures(&folder).and_then(|failures| {
            let connection = Socket::connect(&folder.join(KEEPER_SOCKET))?;
            begin_attempt(&folder, failures)?;
            let serve = move || adoptions.serve(connection, &record, &folder);
            std::thread::Builder::new().name(name.to_owned()).spawn(serve)
        });
        if begun.is_err() {
            self.adopted().remove(name);
        }
        begun.map(drop)
    }

    /// Serves the VM of `record`, until it has ended or another process has to.
    fn serve(&self, keeper: OwnedFd, record: &Record, folder: &Path) {
        let served = || end_attempt(folder);
        if let Err(error) = adopt_for_cell(keeper, self.platform, served) {
            eprintln!("cell {}: {} is not adopted: {error}", self.cell, record.name);
            // The process that serves it has not ended.
            if error.kind() == io::ErrorKind::TimedOut {
                end_attempt(folder);
            }
        }
        self.adopted().remove(&record.name);
    }

    fn adopted(&self) -> MutexGuard<'_, BTreeSet<String>> {
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
