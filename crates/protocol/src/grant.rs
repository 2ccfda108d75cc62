//! Memory that cells give one another, as typed grants (Multikernel, SOSP '09, section 4.7; Cellular Disco, SOSP '99, section
//! 5.1).
//!
//! Guest memory has no addresses that could be handed out: it is what a file in memory takes of the host. So a grant is an
//! amount: so many bytes of one *home*, the cell whose nodes they are on, with one *holder*, free or in one VM. Grants of one
//! home, holder and VM are one; part of a grant can go to another VM or to another holder, which is what splitting it is.
//!
//! 1. What a holder has is *free*, or the memory of one VM. The holder alone gives free memory to a VM, and has it back when the
//!    VM ends.
//! 2. A grant changes its holder in two phases, since order matters. Giving: the home *reserves* the memory, keeps in writing
//!    that it is given, and only then says so; the holder has it when it hears that, and tells. Giving back: the home asks, and
//!    the holder gives what is free, or keeps all; the home has it when it hears that.
//! 3. The home's count is never less than the holder's. It is in writing before a word of it is said, so a home that starts
//!    anew counts what it has given even if the holder is dead or hangs. A holder that starts anew has what its home says; one
//!    that lives knows better than a home that starts anew.
//! 4. VMs outlive both processes. A new life is told of those that run and what they have ([`Ledger::find`]); it is theirs
//!    whatever anybody says.
//!
//! The two cells concerned and nobody else keep the count, so that no third one's old word can bring back a grant that is
//! over. Links deliver in order and once until one side is dead, as for [`crate::agreement`]; two lives are linked once.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::CellId;
use crate::agreement::CellNumber;

/// Bytes by cell: of which home, or with which holder.
pub type Amounts = BTreeMap<CellNumber, u64>;

/// What cells send one another.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// First on every link, both ways.
    Hello {
        /// What the sender has given the receiver.
        given: u64,
        /// What the sender has of the receiver's; none if its life knows of no life of the receiver yet.
        held: Option<u64>,
    },
    /// This is the receiver's now.
    Give {
        /// So much.
        bytes: u64,
    },
    /// The answer: the sender has it.
    Taken {
        /// As given.
        bytes: u64,
    },
    /// The sender would like this back.
    Recall {
        /// So much.
        bytes: u64,
    },
    /// The answer: it is the receiver's again.
    Back {
        /// As asked.
        bytes: u64,
    },
    /// The other answer: less than that is free, and all of it stays.
    Kept {
        /// As asked.
        bytes: u64,
    },
}

/// What is to be done, in this order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Effect {
    /// Put in writing what is given, all of it, before anything that follows is done.
    Keep(Amounts),
    /// Send a message.
    Send(CellId, Message),
    /// The holder has what it was given.
    Taken(CellNumber),
    /// The holder has given back what it was asked for.
    Back(CellNumber),
    /// The holder keeps it: it is not free.
    Kept(CellNumber),
}

/// Why it can't be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Refusal {
    /// The other cell is dead, or has not said hello yet.
    NotMet,
    /// There is only so much, bytes.
    Short(u64),
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Link {
    cell: CellId,
    said_hello: bool,
}

/// The memory that one cell holds: bytes by home, and the VMs that use them.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Ledger {
    me: CellId,
    /// What is here, whoever holds it.
    bytes: u64,
    /// Of it, what others hold. Kept in writing.
    given: Amounts,
    /// What this cell holds of others, for each that this life has heard of it from.
    held: Amounts,
    /// What each VM has, by the VM's name and by home, this cell among them.
    vms: BTreeMap<String, Amounts>,
    links: BTreeMap<CellNumber, Link>,
}

impl Ledger {
    /// A cell without links that has `bytes`; `given` is what is in writing.
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

    /// What this cell has given, by holder.
    pub fn given(&self) -> &Amounts {
        &self.given
    }

    /// What this cell has of others, by home.
    pub fn held(&self) -> &Amounts {
        &self.held
    }

    /// What a VM has, by home.
    pub fn parts(&self, vm: &str) -> Option<&Amounts> {
        self.vms.get(vm)
    }

    /// What of this cell's own memory is free.
    pub fn own_free(&self) -> u64 {
        let given: u64 = self.given.values().sum();
        self.bytes.saturating_sub(given + self.used_of(self.me.number))
    }

    /// What is free, of all homes that live.
    pub fn free(&self) -> u64 {
        let lenders = self.held.keys().map(|home| self.free_of(*home));
        self.own_free() + lenders.sum::<u64>()
    }

    fn used_of(&self, home: CellNumber) -> u64 {
        self.vms.values().filter_map(|parts| parts.get(&home)).sum()
    }

    /// What is free of another home's, if that lives: nothing new is to depend on a dead one.
    fn free_of(&self, home: CellNumber) -> u64 {
        let held = self.held.get(&home).filter(|_| self.met(home).is_some());
        held.map_or(0, |held| held.saturating_sub(self.used_of(home)))
    }

    fn met(&self, number: CellNumber) -> Option<CellId> {
        let link = self.links.get(&number).filter(|link| link.said_hello);
        link.map(|link| link.cell)
    }

    /// Whether all linked cells have said what this one has given them and has of theirs.
    pub fn is_ready(&self) -> bool {
        self.links.values().all(|link| link.said_hello)
    }

    /// Gives free memory to a VM: this cell's own first, then of few others. `None` if there is not so much, or the VM has
    /// memory already.
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

    /// Frees what a VM had.
    pub fn vacate(&mut self, vm: &str) {
        self.vms.remove(vm);
    }

    /// Gives another cell so much of this one's own memory. [`Effect::Taken`] comes when it has it.
    ///
    /// # Errors
    /// If the other is not there, or so much is not free.
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

    /// Asks a holder for so much of what it was given. [`Effect::Back`] or [`Effect::Kept`] says what came of it.
    ///
    /// # Errors
    /// If the other is not there, or has not so much of this cell's.
    pub fn recall(&mut self, from: CellNumber, bytes: u64) -> Result<Vec<Effect>, Refusal> {
        let cell = self.met(from).ok_or(Refusal::NotMet)?;
        let given = self.given.get(&from).copied().unwrap_or(0);
        if given < bytes {
            return Err(Refusal::Short(given));
        }
        Ok(vec![Effect::Send(cell, Message::Recall { bytes })])
    }

    /// There is a link to a cell now. An earlier life of it is dead.
    pub fn link(&mut self, cell: CellId) -> Vec<Effect> {
        let said_hello = false;
        self.links.insert(cell.number, Link { cell, said_hello });
        let given = self.given.get(&cell.number).copied().unwrap_or(0);
        let held = self.held.get(&cell.number).copied();
        vec![Effect::Send(cell, Message::Hello { given, held })]
    }

    /// A cell is dead. What it has, its VMs have.
    pub fn dead(&mut self, cell: CellId) {
        if self.links.get(&cell.number).is_some_and(|link| link.cell == cell) {
            self.links.remove(&cell.number);
        }
    }

    /// Has back all that a dead cell holds. It must be certain that no VM uses it, and that none of its lives starts again.
    pub fn write_off(&mut self, holder: CellNumber) -> Vec<Effect> {
        if self.links.contains_key(&holder) {
            return Vec::new();
        }
        self.is_held(holder, 0)
    }

    /// A message has come. One from a cell without a link is nothing.
    pub fn take(&mut self, from: CellId, message: Message) -> Vec<Effect> {
        let home = from.number;
        match self.links.get_mut(&home) {
            Some(link) if link.cell == from => link.said_hello |= matches!(message, Message::Hello { .. }),
            _ => return Vec::new(),
        }
        match message {
            Message::Hello { given, held } => {
                // A life that has held it knows what it still has; a new one holds what it is told.
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

    /// A holder has so much.
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
