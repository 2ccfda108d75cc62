//! Links between hosts that share memory: a ring in each direction, beside the stream of [`super::stream`].
//!
//! Every pair of cells has a slot in that memory. The caller clears the slot, writes a random number there,
//! and sends the number over the stream. A callee that finds the number sees the same memory, and messages
//! then go through the rings. The stream carries heartbeats, which detect the death of a host, and doorbells
//! to a side that is blocked, as hosts share no futex. A slot that an earlier link of this process still uses
//! is left alone: the new link uses the stream alone.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use config::cluster::Site;
use locks::lock;
use page::PAGE_LEN;
use protocol::CellId;
use urpc::Ring;
use urpc::host::{Block, Doorbell, SharedRing, end};

use super::proof::{self, Proof};
use super::ring::{LINES, Rings};
use super::{Link, Transport, stream};

/// Length of a ring, which begins at a page, bytes.
const RING_BYTES: u64 = Ring::bytes(LINES).next_multiple_of(PAGE_LEN) as u64;
/// Bytes of a pair's slot.
const SLOT_BYTES: u64 = proof::BYTES + 2 * RING_BYTES;
/// Approximate time until the other side is awake: a message through TLS and two threads.
const CALL_NS: u64 = 50_000;
/// The message that wakes a side that is blocked.
const CALL: &[u8] = b"call";

/// The memory that this host shares with others.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    file: Arc<File>,
    /// The pair of cells of each slot.
    pairs: Arc<Vec<[u16; 2]>>,
    used: Arc<Mutex<BTreeSet<usize>>>,
}

/// The slot of a pair, used by no other link of this process.
#[derive(Debug)]
pub struct LinkSlot {
    proof: Proof,
    outgoing: SharedRing,
    incoming: SharedRing,
    /// A second handle of the incoming ring, to be closed when the other side is gone.
    watched: SharedRing,
    user: User,
}

/// Marks a slot as used for as long as it lives.
#[derive(Debug)]
struct User {
    used: Arc<Mutex<BTreeSet<usize>>>,
    place: usize,
}

/// Bytes of the links of so many pairs of cells, from the beginning of the memory.
pub(crate) fn links_bytes(pairs: usize) -> u64 {
    pairs as u64 * SLOT_BYTES
}

impl SharedMemory {
    /// Opens the shared memory of the host that `site` is for; none if it shares none.
    ///
    /// # Errors
    /// If it can't be opened or is too small.
    pub fn open(site: &Site) -> io::Result<Option<Self>> {
        let here = site.hosts.iter().find(|host| host.name == site.here);
        let path = here.and_then(|host| host.shared_memory.as_deref());
        path.map(|path| Self::of(path, site.sharing_pairs())).transpose()
    }

    pub(in crate::cluster) fn of(path: &Path, pairs: Vec<[u16; 2]>) -> io::Result<Self> {
        let shown = |why: &dyn std::fmt::Display| {
            io::Error::other(format!("shared memory {}: {why}", path.display()))
        };
        let file = OpenOptions::new().read(true).write(true).open(path);
        let memory = Self {
            file: Arc::new(file.map_err(|error| shown(&error))?),
            pairs: Arc::new(pairs),
            used: Arc::default(),
        };
        // The last slot shows whether there is room for all.
        if let Some(last) = memory.pairs.len().checked_sub(1)
            && let Err(error) = memory.ring(last, Part::FromHigher)
        {
            let needed = links_bytes(memory.pairs.len());
            return Err(shown(&format_args!(
                "{error}; these cells need {needed} bytes of it"
            )));
        }
        Ok(memory)
    }

    /// Clears the slot of two cells and writes a number that only a process which sees it can know. None if
    /// the pair has no slot, or an earlier link still uses it.
    pub fn offer(&self, me: u16, peer: u16) -> Option<(LinkSlot, u64)> {
        let mut place = self.place(me, peer)?;
        place.outgoing.clear();
        place.incoming.clear();
        let number = place.proof.leave();
        Some((place, number))
    }

    /// The slot of two cells, if it has that number.
    pub fn accept(&self, me: u16, peer: u16, number: u64) -> Option<LinkSlot> {
        let place = self.place(me, peer)?;
        place.proof.has(number).then_some(place)
    }

    fn place(&self, me: u16, peer: u16) -> Option<LinkSlot> {
        let pair = [me.min(peer), me.max(peer)];
        let number = self.pairs.iter().position(|known| *known == pair)?;
        let [outgoing, incoming] = if me < peer {
            [Part::FromLower, Part::FromHigher]
        } else {
            [Part::FromHigher, Part::FromLower]
        };
        let user = self.user(number)?;
        let ring = |part| self.ring(number, part).ok();
        Some(LinkSlot {
            proof: Proof::at(&self.file, number as u64 * SLOT_BYTES).ok()?,
            outgoing: ring(outgoing)?,
            incoming: ring(incoming)?,
            watched: ring(incoming)?,
            user,
        })
    }

    fn user(&self, place: usize) -> Option<User> {
        let is_free = lock(&self.used).insert(place);
        is_free.then(|| User {
            used: self.used.clone(),
            place,
        })
    }

    fn ring(&self, place: usize, part: Part) -> io::Result<SharedRing> {
        let offset = proof::BYTES
            + match part {
                Part::FromLower => 0,
                Part::FromHigher => RING_BYTES,
            };
        SharedRing::at(&self.file, place as u64 * SLOT_BYTES + offset, LINES).map_err(io::Error::other)
    }
}

/// The rings of a slot, after its proof.
#[derive(Clone, Copy)]
enum Part {
    /// The ring from the lower-numbered cell.
    FromLower,
    /// The ring from the higher-numbered cell.
    FromHigher,
}

impl LinkSlot {
    /// The link to `peer`, beside `stream`; `silence` is the time after which a silent stream counts as dead.
    pub fn link(self, peer: CellId, stream: UnixStream, silence: Duration) -> io::Result<Link> {
        let socket = stream.try_clone()?;
        let (writing, mut reading) = stream::beating(peer, stream, silence)?;
        let doorbell = Arc::new(Doorbell::new(move || _ = stream::write_to(&writing, CALL)));
        let block = Block::Doorbell(doorbell.clone());
        let watched = (self.watched, block.clone());
        let watch = move || {
            let mut bytes = Vec::new();
            while stream::read(&mut reading, &mut bytes).is_ok() {
                if bytes == CALL {
                    doorbell.ring();
                }
            }
            end(&watched.0, &watched.1);
        };
        let rings = Rings {
            outgoing: self.outgoing,
            incoming: self.incoming,
            block,
            block_ns: CALL_NS,
            keep: Arc::new(self.user),
        };
        Ok(rings.link(peer, Transport::Shared, socket, watch))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        lock(&self.used).remove(&self.place);
    }
}
