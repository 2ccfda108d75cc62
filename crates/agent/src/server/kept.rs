//! Programs that outlive their client's connection for a while, by the ids that their clients chose.
//!
//! The thread that serves such a program owns it. Another client attaches by putting its connection into the
//! program's slot, and the thread takes it from there. So a program has one client at a time, the last one.

mod backlog;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use locks::IgnorePoison;
use nix::sys::eventfd::{EfdFlags, EventFd};

pub(super) use self::backlog::{Backlog, Chunk};
use super::refuse;
use crate::wire::Wire;

/// Time for which a program without a client runs on, and for which its status is kept.
pub const KEEP_LIMIT: Duration = Duration::from_secs(60);
/// Greatest number of kept programs.
pub const KEPT_MAX: usize = 16;
/// Greatest length of an id.
const ID_BYTES_MAX: usize = 64;

/// The kept programs of this agent.
static TABLE: Table = Table(Mutex::new(BTreeMap::new()));

/// Kept programs by their ids.
struct Table(Mutex<BTreeMap<String, Arc<Slot>>>);

/// Receives the connection of the next client.
#[derive(Debug)]
struct Slot {
    next: Mutex<Option<Wire>>,
    /// Readable while there is one.
    event: EventFd,
}

/// Reason why a program is not kept.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeepError {
    /// The id is invalid.
    #[error("an id has 1 to {ID_BYTES_MAX} letters, digits, dots, hyphens and underscores")]
    Id,
    /// Another program has the id.
    #[error("a kept program has this id already; help: use another one, or attach to that")]
    Taken,
    /// There are too many.
    #[error("{KEPT_MAX} programs are kept already; help: attach to one and end it")]
    Full,
    /// The guest has no descriptors left.
    #[error("the program can't be kept: {0}")]
    Io(#[from] io::Error),
}

/// The entry of a kept program in the table, until dropped.
#[derive(Debug)]
pub(super) struct Entry {
    id: String,
    slot: Arc<Slot>,
}

impl Entry {
    /// Enters a program.
    pub fn begin(id: &str) -> Result<Self, KeepError> {
        TABLE.begin(id)
    }

    /// Takes the connection of a client that has attached.
    pub fn take_next(&self) -> Option<Wire> {
        let mut next = self.slot.next.lock().ignore_poison();
        // It has no count if no client has attached.
        let _ = self.slot.event.read();
        next.take()
    }
}

impl AsFd for Entry {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.slot.event.as_fd()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        TABLE.0.lock().ignore_poison().remove(&self.id);
        // From here on no other client has the slot. A client may have come too late.
        if let Some(mut late) = self.take_next() {
            // A client that is gone needs no reason.
            let _ = refuse(&mut late, &unknown(&self.id));
        }
    }
}

/// Passes a client's connection to the program with this id, whose thread answers it. The connection that the
/// program had ends.
///
/// # Errors
/// If the client is gone.
pub(super) fn attach(mut wire: Wire, id: &str) -> io::Result<()> {
    let table = TABLE.0.lock().ignore_poison();
    let Some(slot) = table.get(id) else {
        drop(table);
        return refuse(&mut wire, &unknown(id));
    };
    // Under the table's lock, so that the entry is not dropped meanwhile.
    let mut next = slot.next.lock().ignore_poison();
    let replaced = next.replace(wire);
    // Under the slot's lock, too: the program's thread would else take the connection before it is announced,
    // and then end it for an announcement of no other one. The counter can't be full.
    let _ = slot.event.write(1);
    drop(next);
    drop(table);
    replaced.map_or(Ok(()), |mut replaced| refuse(&mut replaced, REPLACED))
}

/// The reason for a client whose place another one takes.
pub(super) const REPLACED: &str = "another client has attached to the program";

fn unknown(id: &str) -> String {
    // The client may have sent any text.
    let id: String = id
        .chars()
        .filter(|c| !c.is_control())
        .take(ID_BYTES_MAX)
        .collect();
    format!("no kept program has the id {id:?}: it may have ended, or had no client for too long")
}

fn is_id(id: &str) -> bool {
    (1..=ID_BYTES_MAX).contains(&id.len())
        && id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

impl Table {
    fn begin(&self, id: &str) -> Result<Entry, KeepError> {
        if !is_id(id) {
            return Err(KeepError::Id);
        }
        let mut table = self.0.lock().ignore_poison();
        if table.contains_key(id) {
            return Err(KeepError::Taken);
        }
        if table.len() >= KEPT_MAX {
            return Err(KeepError::Full);
        }
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event = EventFd::from_flags(flags).map_err(io::Error::from)?;
        let next = Mutex::new(None);
        let slot = Arc::new(Slot { next, event });
        table.insert(id.to_owned(), slot.clone());
        let id = id.to_owned();
        Ok(Entry { id, slot })
    }
}

#[cfg(test)]
mod tests;
