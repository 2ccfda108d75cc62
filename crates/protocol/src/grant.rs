//! Memory that cells give one another, as typed grants (Multikernel, SOSP '09, section 4.7; Cellular Disco,
//! SOSP '99, section 5.1).
//!
//! Guest memory has no addresses that could be handed out: it is host memory that a memfd takes. So a grant
//! is an amount in bytes of one *home*, the cell whose NUMA nodes have the memory, with one *holder*, free or
//! in one VM. Grants with the same home, holder and VM are one. Part of a grant can go to another VM or to
//! another holder (splitting).
//!
//! 1. The memory of a holder is *free*, or that of one VM. Only the holder gives free memory to a VM; the
//!    memory is free again when the VM ends.
//! 2. A grant changes its holder in two phases, since order matters. Giving: the home *reserves* the memory,
//!    persists its count, and only then sends the grant; the holder has the memory on receipt, and confirms.
//!    Giving back: the home sends a request; the holder returns the memory if so much is free, or keeps all;
//!    the home has it on receipt.
//! 3. The home's count is never less than the holder's. It is persisted before it is announced, so a
//!    restarted home counts what it has given even if the holder is dead or hangs. A restarted holder takes
//!    the count of its home; a live holder's count overrides that of a restarted home.
//! 4. VMs outlive both processes. A new life is given the VMs that run, with their memory ([`Ledger::find`]).
//!    These VMs keep that memory whatever other cells report.
//!
//! Only the two cells concerned keep the count, so that no stale message of a third cell can restore a grant
//! that has ended. Links deliver in order and once until one side is dead, as for [`crate::agreement`]; two
//! lives are linked once.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::CellId;
use crate::agreement::CellNumber;

/// Bytes by cell: by home, or by holder.
pub type Amounts = BTreeMap<CellNumber, u64>;

/// Message between two cells.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// First message on every link, in both directions.
    Hello {
        /// Bytes that the sender has given the receiver.
        given: u64,
        /// Bytes of the receiver's memory that the sender holds; none if the sender's life has no count yet.
        held: Option<u64>,
    },
    /// Gives memory of the sender to the receiver.
    Give {
        /// Bytes given.
        bytes: u64,
    },
    /// Reply to [`Message::Give`]: the sender holds the memory.
    Taken {
        /// Bytes, as in [`Message::Give`].
        bytes: u64,
    },
    /// Requests memory of the sender back from the receiver.
    Recall {
        /// Bytes requested.
        bytes: u64,
    },
    /// Reply to [`Message::Recall`]: the receiver has its memory back.
    Back {
        /// Bytes, as in [`Message::Recall`].
        bytes: u64,
    },
    /// Reply to [`Message::Recall`]: fewer bytes are free, and the sender keeps all of them.
    Kept {
        /// Bytes, as in [`Message::Recall`].
        bytes: u64,
    },
}

/// Effect that the caller has to carry out, in the order of the list.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Effect {
    /// Persist all that this cell has given, by holder, before any later effect is carried out.
    Keep(Amounts),
    /// Send a message to a cell.
    Send(CellId, Message),
    /// This holder has confirmed a [`Message::Give`].
    Taken(CellNumber),
    /// This holder has returned the memory of a [`Message::Recall`].
    Back(CellNumber),
    /// This holder keeps the memory of a [`Message::Recall`]: not so much is free.
    Kept(CellNumber),
}

/// Reason why memory is not given or recalled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Refusal {
    /// The other cell is dead, or has not sent its hello.
    NotMet,
    /// Fewer bytes are available than requested: this many.
    Short(u64),
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Link {
    cell: CellId,
    said_hello: bool,
}

/// The memory that one cell has, has given and holds, in bytes, and the VMs that use the memory.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Ledger {
    me: CellId,
    /// Bytes of this cell's own memory, including granted ones.
    bytes: u64,
    /// Bytes of this cell's own memory that others hold, by holder. Persisted.
    given: Amounts,
    /// Bytes that this cell holds, by home, for each home of which this life has a count.
    held: Amounts,
    /// Bytes of each VM, by the VM's name and by home, this cell among the homes.
    vms: BTreeMap<String, Amounts>,
    links: BTreeMap<CellNumber, Link>,
}

impl Ledger {
    /// Returns a cell without links that has `bytes` of its own memory; `given` is the persisted count by
    /// holder.
    pub fn new(me: CellId, bytes: u64, mut given: Amounts) -> Self {
        given.remove(&me.number);
        Self {
            me,
            bytes,
            given,
            held: Amounts::new(),
            vms: BTreeMap::new(),
            links: BTreeMap::new(),
        }
    }

    /// Records the memory of a VM that outlived this cell's last process.
    pub fn find(&mut self, vm: String, parts: Amounts) {
        self.vms.insert(vm, parts);
    }

    /// Returns the bytes that this cell has given, by holder.
    pub fn given(&self) -> &Amounts {
        &self.given
    }

    /// Returns the bytes of other cells that this cell holds, by home.
    pub fn held(&self) -> &Amounts {
        &self.held
    }

    /// Returns the bytes that a VM has, by home; `None` for an unknown VM.
    pub fn parts(&self, vm: &str) -> Option<&Amounts> {
        self.vms.get(vm)
    }

    /// Returns the free bytes of this cell's own memory.
    pub fn own_free(&self) -> u64 {
        let given: u64 = self.given.values().sum();
        self.bytes.saturating_sub(given + self.used_of(self.me.number))
    }

    /// Returns the free bytes of all live homes, this cell among them.
    pub fn free(&self) -> u64 {
        let lenders = self.held.keys().map(|home| self.free_of(*home));
        self.own_free() + lenders.sum::<u64>()
    }

    fn used_of(&self, home: CellNumber) -> u64 {
        self.vms.values().filter_map(|parts| parts.get(&home)).sum()
    }

    /// Returns the free bytes of another home; 0 for a dead home, on which no new VM may depend.
    fn free_of(&self, home: CellNumber) -> u64 {
        let held = self.held.get(&home).filter(|_| self.met(home).is_some());
        held.map_or(0, |held| held.saturating_sub(self.used_of(home)))
    }

    fn met(&self, number: CellNumber) -> Option<CellId> {
        let link = self.links.get(&number).filter(|link| link.said_hello);
        link.map(|link| link.cell)
    }

    /// Whether all linked cells have sent their hellos, so that the counts are known.
    pub fn is_ready(&self) -> bool {
        self.links.values().all(|link| link.said_hello)
    }

    /// Gives `bytes` of free memory to a VM: this cell's own first, then that of as few homes as possible.
    /// `None` if fewer bytes are free, or the VM has memory already.
    pub fn occupy(&mut self, vm: String, bytes: u64) -> Option<&Amounts> {
        if self.vms.contains_key(&vm) || self.free() < bytes {
            return None;
        }
        let own = (self.me.number, self.own_free());
        let mut lenders: Vec<_> = self
            .held
            .keys()
            .map(|home| (*home, self.free_of(*home)))
            .collect();
        lenders.sort_by_key(|(_, free)| u64::MAX - free);
        let mut missing = bytes;
        let mut parts = Amounts::new();
        for (home, free) in [own].into_iter().chain(lenders) {
            let part = free.min(missing);
            missing -= part;
            if part > 0 {
                parts.insert(home, part);
            }
        }
        Some(self.vms.entry(vm).or_insert(parts))
    }

    /// Frees the memory of a VM.
    pub fn vacate(&mut self, vm: &str) {
        self.vms.remove(vm);
    }

    /// Gives `bytes` of this cell's own memory to another cell. [`Effect::Taken`] follows when that cell
    /// confirms.
    ///
    /// # Errors
    /// [`Refusal::NotMet`] without a hello of the other cell; [`Refusal::Short`] if fewer bytes are free.
    pub fn give(&mut self, to: CellNumber, bytes: u64) -> Result<Vec<Effect>, Refusal> {
        let cell = self.met(to).ok_or(Refusal::NotMet)?;
        let free = self.own_free();
        if free < bytes {
            return Err(Refusal::Short(free));
        }
        *self.given.entry(to).or_default() += bytes;
        let send = Effect::Send(cell, Message::Give { bytes });
        Ok(vec![Effect::Keep(self.given.clone()), send])
    }

    /// Requests `bytes` back from a holder. [`Effect::Back`] or [`Effect::Kept`] reports the outcome.
    ///
    /// # Errors
    /// [`Refusal::NotMet`] without a hello of the holder; [`Refusal::Short`] if the holder was given fewer
    /// bytes.
    pub fn recall(&mut self, from: CellNumber, bytes: u64) -> Result<Vec<Effect>, Refusal> {
        let cell = self.met(from).ok_or(Refusal::NotMet)?;
        let given = self.given.get(&from).copied().unwrap_or(0);
        if given < bytes {
            return Err(Refusal::Short(given));
        }
        Ok(vec![Effect::Send(cell, Message::Recall { bytes })])
    }

    /// Adds a link to a cell. An earlier life of that cell is dead.
    pub fn link(&mut self, cell: CellId) -> Vec<Effect> {
        let said_hello = false;
        self.links.insert(cell.number, Link { cell, said_hello });
        let given = self.given.get(&cell.number).copied().unwrap_or(0);
        let held = self.held.get(&cell.number).copied();
        vec![Effect::Send(cell, Message::Hello { given, held })]
    }

    /// Removes the link to a dead cell. The memory that the cell holds stays given, since its VMs may use it.
    pub fn dead(&mut self, cell: CellId) {
        if self.links.get(&cell.number).is_some_and(|link| link.cell == cell) {
            self.links.remove(&cell.number);
        }
    }

    /// Takes back all memory that a dead cell holds; does nothing while the cell is linked. The caller must
    /// be certain that no VM uses the memory, and that no life of the cell starts again.
    pub fn write_off(&mut self, holder: CellNumber) -> Vec<Effect> {
        if self.links.contains_key(&holder) {
            return Vec::new();
        }
        self.is_held(holder, 0)
    }

    /// Handles a message. A message from a cell without a link is ignored.
    pub fn take(&mut self, from: CellId, message: Message) -> Vec<Effect> {
        let home = from.number;
        match self.links.get_mut(&home) {
            Some(link) if link.cell == from => link.said_hello |= matches!(message, Message::Hello { .. }),
            _ => return Vec::new(),
        }
        match message {
            Message::Hello { given, held } => {
                // An incarnation with a count keeps it; a new one takes its home's count.
                if given > 0 || self.held.contains_key(&home) {
                    self.held.entry(home).or_insert(given);
                }
                held.map_or_else(Vec::new, |held| self.is_held(home, held))
            }
            Message::Give { bytes } => {
                *self.held.entry(home).or_default() += bytes;
                vec![Effect::Send(from, Message::Taken { bytes })]
            }
            Message::Taken { .. } => vec![Effect::Taken(home)],
            Message::Recall { bytes } => {
                if self.free_of(home) < bytes {
                    return vec![Effect::Send(from, Message::Kept { bytes })];
                }
                if let Some(held) = self.held.get_mut(&home) {
                    *held -= bytes;
                }
                vec![Effect::Send(from, Message::Back { bytes })]
            }
            Message::Back { bytes } => {
                let given = self.given.get(&home).copied().unwrap_or(0);
                let mut effects = self.is_held(home, given.saturating_sub(bytes));
                effects.push(Effect::Back(home));
                effects
            }
            Message::Kept { .. } => vec![Effect::Kept(home)],
        }
    }

    /// Sets the count of a holder, and persists it if it changes.
    fn is_held(&mut self, by: CellNumber, bytes: u64) -> Vec<Effect> {
        let was = match bytes {
            0 => self.given.remove(&by).unwrap_or(0),
            _ => self.given.insert(by, bytes).unwrap_or(0),
        };
        if was == bytes {
            return Vec::new();
        }
        vec![Effect::Keep(self.given.clone())]
    }
}
