//! Detects changes to the base of a running VM's disk.
//!
//! Locks keep other VMs from writing a base, but not other programs. A VM whose base changed reads a mix of
//! two disks, while its kernel trusts its cached data; continuing would damage its own writes too.
//! [`BaseWatch`] remembers size and time of the last write of each base file; the VM's monitor checks them
//! periodically.
//!
//! Not detected: a write whose program resets the time before the next check (`rsync -t`, `touch -r`), and
//! writes to a block device, which leave no trace in it. Changes of attributes, names or links do not count
//! as writes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::Store;
use super::fingerprint::Fingerprint;

/// Base files of running disks in their original state.
#[derive(Debug, Default)]
pub struct BaseWatch {
    bases: Vec<Base>,
}

#[derive(Debug)]
struct Base {
    disk: String,
    file: OwnedFd,
    fingerprint: Fingerprint,
}

impl BaseWatch {
    /// Watches the bases of a disk in their present state. `disk` is its name in reports.
    pub fn watch(&mut self, disk: &str, store: &dyn Store) -> io::Result<()> {
        let files = store.files();
        store
            .bases()
            .into_iter()
            .try_for_each(|base| self.watch_file(disk, files[base]))
    }

    /// Watches one file in its present state.
    pub fn watch_file(&mut self, disk: &str, file: BorrowedFd<'_>) -> io::Result<()> {
        self.bases.push(Base {
            disk: disk.to_owned(),
            file: file.try_clone_to_owned()?,
            fingerprint: Fingerprint::of(file)?,
        });
        Ok(())
    }

    /// Returns the first disk whose base has changed, the kind of change, and the help; one `fstat` per base.
    pub fn changed(&self) -> Option<String> {
        self.bases.iter().find_map(Base::changed)
    }
}

impl Base {
    fn changed(&self) -> Option<String> {
        let disk = &self.disk;
        let what = match Fingerprint::of(self.file.as_fd()) {
            Ok(now) if now == self.fingerprint => return None,
            Ok(now) if now.bytes != self.fingerprint.bytes => {
                format!("went from {} to {} bytes", self.fingerprint.bytes, now.bytes)
            }
            Ok(_) => "was written".to_owned(),
            Err(error) => format!("can no longer be looked at ({error})"),
        };
        Some(format!(
            "{disk}: its base file {what} while the VM used it, so what the VM reads is no longer one disk; \
             put the file back as it was and start the VM anew, and change copies of a base only"
        ))
    }
}
