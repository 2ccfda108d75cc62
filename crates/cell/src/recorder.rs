//! The record of a running VM in the registry, which several threads update.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use locks::IgnorePoison;
use registry::vms::{Entry, Record};

use crate::link::not_running;

/// The record, while the VM has one. Cheap to clone; all clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorder(Arc<Mutex<Option<Recorded>>>);

#[derive(Debug)]
struct Recorded {
    entry: Entry,
    record: Record,
}

/// Keeps the VM's entry while it lives.
pub(crate) struct Recording<'a>(&'a Recorder);

impl Recorder {
    /// Keeps `record` in `entry` from now on, as the record of this VM.
    ///
    /// # Errors
    /// If the record can't be written.
    pub(crate) fn begin(&self, entry: Entry, record: Record) -> io::Result<Recording<'_>> {
        entry.write(&record)?;
        *self.lock() = Some(Recorded { entry, record });
        Ok(Recording(self))
    }

    /// Changes the record. A change that can't be written is written with the next one: the record is for
    /// people, and a VM runs without.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Record)) {
        if let Some(recorded) = &mut *self.lock() {
            change(&mut recorded.record);
            let _ = recorded.entry.write(&recorded.record);
        }
    }

    /// Changes the record, and writes the change.
    ///
    /// # Errors
    /// If the VM has no record, or the change can't be written: then there is none.
    pub(crate) fn try_change(&self, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        let mut recorded = self.lock();
        let recorded = recorded.as_mut().ok_or_else(not_running)?;
        let mut next = recorded.record.clone();
        change(&mut next);
        recorded.entry.write(&next)?;
        recorded.record = next;
        Ok(())
    }

    /// Reads the record; none before its VM starts and after it has ended.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Record) -> T) -> Option<T> {
        self.lock().as_ref().map(|recorded| read(&recorded.record))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Recorded>> {
        // A panic of another thread leaves at most a change half made, which the next one completes.
        self.0.lock().ignore_poison()
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // The entry goes with its lock and its directory.
        *self.0.lock() = None;
    }
}
