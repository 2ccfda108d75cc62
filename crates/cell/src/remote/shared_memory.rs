//! The memory that two hosts share, as the lanes of a VM's shards use it: pipes beside their connections.
//!
//! After the slots of the links of cells there is one for each pair of cells of different hosts:
//!
//! ```text
//! proof     a page
//! lane 0    four pipes: control from the lower-numbered cell, control from the higher-numbered one,
//!           bulk from the lower-numbered cell, bulk from the higher-numbered one
//! lane 1    ...
//! ```
//!
//! A slot is used by one VM at a time on each host. Its user holds a lock on a byte of the file; there is one
//! byte for each host of the two, as a test may have both on one machine. The lock is of the open file
//! description, which the shard maps its pipes from: it lasts until no process can reach them any more. The
//! caller takes the slot, writes a number into the proof, and sends it with the first connection of the two
//! shards. The callee takes the slot too, checks the number, empties the pipes, and confirms that. Without
//! the confirmation the connections carry everything.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use config::cluster::Site;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use page::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use shard_api::launch::{LanePipes, PipesAt};
use urpc::host::{MemoryError, SharedPipe};
use urpc::pipe::Pipe;

use crate::cluster::link::proof::{self, Proof};
use crate::cluster::link::shared::links_bytes;

/// Maximum number of a shard's lanes: each is a thread, in addition to those of the vCPUs.
pub(crate) const LANES_MAX: usize = 4;
/// 16 KiB: 1,000 messages.
const CONTROL_WORDS: usize = 1 << 11;
/// 128 KiB: 31 pages, more than are prefetched at once.
const BULK_WORDS: usize = 1 << 14;
const LANE_BYTES: u64 = 2 * (room(CONTROL_WORDS) + room(BULK_WORDS));
const SLOT_BYTES: u64 = proof::BYTES + LANES_MAX as u64 * LANE_BYTES;
/// Time limit for a slot to be free: its last user may be about to end.
const SLOT_TIMEOUT: Duration = Duration::from_millis(200);
const SLOT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Bytes of a pipe, which begins at a page.
const fn room(words: usize) -> u64 {
    (Pipe::bytes(words) as u64).next_multiple_of(PAGE_BYTES)
}

/// The shared memory of two shards: a slot if both have the memory, none where the cluster's file names none,
/// or the reason why they use none.
pub type SlotResult = Result<Option<ShmSlot>, LanesError>;

/// A reason why two shards use no shared memory.
#[derive(Debug, thiserror::Error)]
pub enum LanesError {
    /// The memory of this host.
    #[error("shared memory {path}: {error}")]
    Memory {
        /// The file.
        path: String,
        /// Reason why the file has no place for lanes.
        error: LaneSlotError,
    },
    /// A slot that can't be mapped.
    #[error("{0}")]
    Map(MemoryError),
    /// The caller's host has other memory.
    #[error("cell {0} sees other memory than this host")]
    OtherMemory(u16),
    /// The refusal of the called host.
    #[error("{0} does not see this host's shared memory, or uses it for another VM")]
    NotSeen(String),
}

/// A reason why a slot is not claimed.
#[derive(Debug, thiserror::Error)]
pub enum LaneSlotError {
    /// A file that can't be opened.
    #[error("{0}")]
    Open(io::Error),
    /// A file that is too short.
    #[error("{error}; links of these cells and lanes of their VMs need {needed} bytes of it")]
    TooShort {
        /// The error of mapping the last slot.
        error: MemoryError,
        /// Length of all slots, bytes.
        needed: u64,
    },
    /// A slot in use.
    #[error("another VM of these two cells uses it")]
    Taken,
    /// A lock that fails.
    #[error("{0}")]
    Lock(io::Error),
}

/// A caller's offer of shared memory.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// The caller's cell.
    cell: u16,
    /// The number that the caller has written into the proof.
    number: u64,
}

/// The slot of two cells, which no other VM of this host uses.
#[derive(Debug)]
pub struct ShmSlot {
    memory: File,
    start: u64,
    /// Whether this host's cell has the lower number.
    is_lower: bool,
}

impl ShmSlot {
    /// Takes the slot of this host's cell `me` and `peer`.
    pub fn hold(site: &Site, me: u16, peer: u16) -> SlotResult {
        let pairs = site.sharing_pairs();
        let pair = [me.min(peer), me.max(peer)];
        let here = site.hosts.iter().find(|host| host.name == site.here);
        let path = here.and_then(|host| host.shared_memory.as_deref());
        let (Some(number), Some(path)) = (pairs.iter().position(|known| *known == pair), path) else {
            return Ok(None);
        };
        let held = Self::take(path, pairs.len(), number, me < peer);
        held.map(Some).map_err(|error| LanesError::Memory {
            path: path.display().to_string(),
            error,
        })
    }

    fn take(path: &Path, pairs: usize, number: usize, is_lower: bool) -> Result<Self, LaneSlotError> {
        let open = OpenOptions::new().read(true).write(true).open(path);
        let start = |number: usize| links_bytes(pairs) + number as u64 * SLOT_BYTES;
        let mut place = Self {
            memory: open.map_err(LaneSlotError::Open)?,
            start: start(pairs - 1),
            is_lower,
        };
        // The last slot shows whether there is room for all.
        if let Err(error) = place.last_pipe() {
            let needed = start(pairs);
            return Err(LaneSlotError::TooShort { error, needed });
        }
        place.start = start(number);
        let deadline = Instant::now() + SLOT_TIMEOUT;
        loop {
            match place.lock() {
                Ok(()) => return Ok(place),
                Err(Errno::EAGAIN | Errno::EACCES) if Instant::now() < deadline => {
                    std::thread::sleep(SLOT_POLL_INTERVAL);
                }
                Err(Errno::EAGAIN | Errno::EACCES) => {
                    return Err(LaneSlotError::Taken);
                }
                Err(error) => return Err(LaneSlotError::Lock(error.into())),
            }
        }
    }

    fn lock(&self) -> nix::Result<()> {
        let byte = self.start + u64::from(!self.is_lower);
        let lock = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: byte.cast_signed(),
            l_len: 1,
            l_pid: 0,
        };
        fcntl(&self.memory, FcntlArg::F_OFD_SETLK(&lock)).map(drop)
    }

    fn proof(&self) -> Result<Proof, MemoryError> {
        Proof::at(&self.memory, self.start)
    }

    fn last_pipe(&self) -> Result<SharedPipe, MemoryError> {
        let PipesAt {
            outgoing,
            incoming,
            words,
        } = self.pipes(LANES_MAX - 1).bulk;
        SharedPipe::at(&self.memory, outgoing.max(incoming), words)
    }

    /// Makes the offer of the caller, of cell `me`.
    ///
    /// # Errors
    /// If the host has no memory left to map the slot.
    pub fn offer(&self, me: u16) -> io::Result<Offer> {
        let number = self.proof().map_err(io::Error::other)?.leave();
        Ok(Offer { cell: me, number })
    }

    /// Handles an offer in the callee, of cell `me`: takes the slot with the caller's, if both see the same
    /// memory, and empties its pipes.
    pub fn accept(site: &Site, me: u16, offer: &Offer) -> SlotResult {
        let Some(place) = Self::hold(site, me, offer.cell)? else {
            return Ok(None);
        };
        let seen = place.see(offer.number).map_err(LanesError::Map)?;
        match seen {
            true => Ok(Some(place)),
            false => Err(LanesError::OtherMemory(offer.cell)),
        }
    }

    fn see(&self, number: u64) -> Result<bool, MemoryError> {
        if !self.proof()?.has(number) {
            return Ok(false);
        }
        for lane in 0..LANES_MAX {
            let LanePipes { control, bulk } = self.pipes(lane);
            for at in [control, bulk] {
                SharedPipe::at(&self.memory, at.outgoing, at.words)?.clear();
                SharedPipe::at(&self.memory, at.incoming, at.words)?.clear();
            }
        }
        Ok(true)
    }

    /// The positions of a lane's pipes, as this host's cell uses them.
    pub fn pipes(&self, lane: usize) -> LanePipes {
        let mut at = self.start + proof::BYTES + lane as u64 * LANE_BYTES;
        let mut both = |words: usize| {
            let (from_lower, from_higher) = (at, at + room(words));
            at += 2 * room(words);
            let [outgoing, incoming] = match self.is_lower {
                true => [from_lower, from_higher],
                false => [from_higher, from_lower],
            };
            PipesAt {
                outgoing,
                incoming,
                words,
            }
        };
        LanePipes {
            control: both(CONTROL_WORDS),
            bulk: both(BULK_WORDS),
        }
    }

    /// The file to map the pipes from. It keeps the slot.
    pub fn memory(&self) -> &File {
        &self.memory
    }

    /// The same file, with the slot.
    pub fn into_memory(self) -> File {
        self.memory
    }
}

#[cfg(test)]
mod tests;
