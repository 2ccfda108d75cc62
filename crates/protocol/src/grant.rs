//! Memory that cells give one another, as typed grants (Multikernel, SOSP '09, section 4.7; Cellular Disco,
//! SOSP '99, section 5.1).
//!
//! Guest memory has no addresses that could be allocated: it is host memory that a memfd takes. So a grant
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
//! 4. A holder may also request memory, and return it without a request. The home decides on a request
//!    ([`Effect::Requested`]); the amounts that it gave on request are counted apart, in both cells, so that
//!    memory which a command lent is returned by a command only. They never exceed the amount held.
//! 5. VMs outlive both processes. A new life is given the VMs that run, with their memory ([`Ledger::find`]).
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
        /// Part of `given` that the receiver requested.
        #[serde(default)]
        given_on_request: u64,
        /// Part of `held` that the sender requested.
        #[serde(default)]
        held_on_request: u64,
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
    /// Requests memory of the receiver.
    Request {
        /// Bytes requested.
        bytes: u64,
    },
    /// Reply to [`Message::Request`]: gives the memory.
    Lent {
        /// Bytes, as in [`Message::Request`].
        bytes: u64,
    },
    /// Reply to [`Message::Request`]: the receiver gets nothing.
    Declined {
        /// Bytes, as in [`Message::Request`].
        bytes: u64,
    },
    /// Requests back the free part of the memory that the receiver requested, at most `bytes`.
    Release {
        /// Maximum amount, in bytes.
        bytes: u64,
    },
    /// The receiver has this memory back: a reply to [`Message::Release`], or of the sender's own accord.
    Return {
        /// Bytes returned; 0 if a [`Message::Release`] found nothing free.
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
    /// A cell requests so many bytes. The caller decides, and calls [`Ledger::reply`].
    Requested(CellNumber, u64),
    /// This home has given so many bytes on request.
    Lent(CellNumber, u64),
    /// This home has declined a request for so many bytes.
    Declined(CellNumber, u64),
    /// This holder has returned so many bytes that it had requested.
    Returned(CellNumber, u64),
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
    /// The part of `given` that holders requested, by holder. Persisted.
    given_on_request: Amounts,
    /// The part of `held` that this cell requested, by home.
    held_on_request: Amounts,
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
            given_on_request: Amounts::new(),
            held_on_request: Amounts::new(),
            vms: BTreeMap::new(),
            links: BTreeMap::new(),
        }
    }

    /// Sets the persisted amounts that holders requested, by holder. More than was given to a holder counts
    /// as all of it.
    pub fn set_given_on_request(&mut self, mut amounts: Amounts) {
        amounts.retain(|holder, bytes| {
            *bytes = (*bytes).min(amount(&self.given, *holder));
            *bytes > 0
        });
        self.given_on_request = amounts;
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

    /// Returns the part of [`Self::given`] that holders requested, by holder.
    pub fn given_on_request(&self) -> &Amounts {
        &self.given_on_request
    }

    /// Returns the bytes of a home that are free and that this cell requested, which it can return.
    pub fn returnable(&self, home: CellNumber) -> u64 {
        self.free_of(home).min(amount(&self.held_on_request, home))
    }

    /// Returns the free bytes of each live home but this cell.
    pub fn available(&self) -> impl Iterator<Item = (CellNumber, u64)> + '_ {
        self.held.keys().map(|home| (*home, self.free_of(*home)))
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
        lenders.fold(self.own_free(), u64::saturating_add)
    }

    /// Returns the bytes of a home that this cell's VMs have.
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

    /// Gives a VM these parts of free memory, by home. `None` if a part is not free, or the VM has memory
    /// already.
    pub fn occupy_parts(&mut self, vm: String, parts: Amounts) -> Option<&Amounts> {
        let is_free = |(home, bytes): (&CellNumber, &u64)| match *home == self.me.number {
            true => self.own_free() >= *bytes,
            false => self.free_of(*home) >= *bytes,
        };
        if self.vms.contains_key(&vm) || !parts.iter().all(is_free) {
            return None;
        }
        Some(self.vms.entry(vm).or_insert(parts))
    }

    /// Gives a VM that has memory `bytes` more of a home. Returns false, without effect, if so much is not
    /// free, or the VM has no memory.
    pub fn extend(&mut self, vm: &str, home: CellNumber, bytes: u64) -> bool {
        let free = match home == self.me.number {
            true => self.own_free(),
            false => self.free_of(home),
        };
        let Some(parts) = self.vms.get_mut(vm).filter(|_| free >= bytes) else {
            return false;
        };
        if bytes > 0 {
            let part = parts.entry(home).or_default();
            *part = part.saturating_add(bytes);
        }
        true
    }

    /// Reduces a VM's memory to these parts, by home; the rest is free. Returns false, without effect, if the
    /// VM has less than that of a home.
    pub fn reduce(&mut self, vm: &str, parts: Amounts) -> bool {
        let Some(before) = self.vms.get_mut(vm) else {
            return false;
        };
        if parts.iter().any(|(home, bytes)| amount(before, *home) < *bytes) {
            return false;
        }
        *before = parts;
        true
    }

    /// Returns the number of this cell's VMs that have memory.
    pub fn vms(&self) -> usize {
        self.vms.len()
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

    /// Requests `bytes` of another cell's memory. [`Effect::Lent`] or [`Effect::Declined`] reports the
    /// outcome; none does if that cell dies before.
    ///
    /// # Errors
    /// [`Refusal::NotMet`] without a hello of the other cell.
    pub fn request(&mut self, of: CellNumber, bytes: u64) -> Result<Vec<Effect>, Refusal> {
        let cell = self.met(of).ok_or(Refusal::NotMet)?;
        Ok(vec![Effect::Send(cell, Message::Request { bytes })])
    }

    /// Replies to a request ([`Effect::Requested`]): gives the memory if `agrees` and so much is free.
    pub fn reply(&mut self, to: CellNumber, bytes: u64, agrees: bool) -> Vec<Effect> {
        let Some(cell) = self.met(to) else {
            return Vec::new();
        };
        if !agrees || bytes == 0 || self.own_free() < bytes {
            return vec![Effect::Send(cell, Message::Declined { bytes })];
        }
        *self.given.entry(to).or_default() += bytes;
        *self.given_on_request.entry(to).or_default() += bytes;
        let send = Effect::Send(cell, Message::Lent { bytes });
        vec![Effect::Keep(self.given.clone()), send]
    }

    /// Requests back what is free of the memory that a holder requested, at most `bytes`.
    /// [`Effect::Returned`] reports the amount; none does if the holder dies before.
    ///
    /// # Errors
    /// [`Refusal::NotMet`] without a hello of the holder.
    pub fn release(&mut self, from: CellNumber, bytes: u64) -> Result<Vec<Effect>, Refusal> {
        let cell = self.met(from).ok_or(Refusal::NotMet)?;
        Ok(vec![Effect::Send(cell, Message::Release { bytes })])
    }

    /// Returns `bytes` that this cell requested of a home and that are free.
    ///
    /// # Errors
    /// [`Refusal::NotMet`] without a hello of the home; [`Refusal::Short`] if fewer bytes are returnable.
    pub fn give_back(&mut self, to: CellNumber, bytes: u64) -> Result<Vec<Effect>, Refusal> {
        let cell = self.met(to).ok_or(Refusal::NotMet)?;
        let returnable = self.returnable(to);
        if returnable < bytes {
            return Err(Refusal::Short(returnable));
        }
        Ok(vec![self.send_back(cell, bytes)])
    }

    fn send_back(&mut self, to: CellId, bytes: u64) -> Effect {
        for amounts in [&mut self.held, &mut self.held_on_request] {
            if let Some(held) = amounts.get_mut(&to.number) {
                *held = held.saturating_sub(bytes);
            }
        }
        Effect::Send(to, Message::Return { bytes })
    }

    /// Adds a link to a cell. An earlier life of that cell is dead.
    pub fn link(&mut self, cell: CellId) -> Vec<Effect> {
        let said_hello = false;
        self.links.insert(cell.number, Link { cell, said_hello });
        let hello = Message::Hello {
            given: amount(&self.given, cell.number),
            held: self.held.get(&cell.number).copied(),
            given_on_request: amount(&self.given_on_request, cell.number),
            held_on_request: amount(&self.held_on_request, cell.number),
        };
        vec![Effect::Send(cell, hello)]
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
            Message::Hello {
                given,
                held,
                given_on_request,
                held_on_request,
            } => {
                // An incarnation with a count keeps it; a new one takes its home's count.
                if !self.held.contains_key(&home) && given > 0 {
                    self.held.insert(home, given);
                    self.held_on_request.insert(home, given_on_request.min(given));
                }
                let Some(held) = held else {
                    return Vec::new();
                };
                let before = amount(&self.given_on_request, home);
                set(&mut self.given_on_request, home, held_on_request);
                let effects = self.is_held(home, held);
                if effects.is_empty() && before != amount(&self.given_on_request, home) {
                    return vec![Effect::Keep(self.given.clone())];
                }
                effects
            }
            Message::Give { bytes } => {
                let held = self.held.entry(home).or_default();
                *held = held.saturating_add(bytes);
                vec![Effect::Send(from, Message::Taken { bytes })]
            }
            Message::Taken { .. } => vec![Effect::Taken(home)],
            Message::Recall { bytes } => {
                if self.free_of(home) < bytes {
                    return vec![Effect::Send(from, Message::Kept { bytes })];
                }
                if let Some(held) = self.held.get_mut(&home) {
                    *held -= bytes;
                    // Loans by command are recalled first.
                    let requested = amount(&self.held_on_request, home).min(*held);
                    set(&mut self.held_on_request, home, requested);
                }
                vec![Effect::Send(from, Message::Back { bytes })]
            }
            Message::Back { bytes } => {
                let given = amount(&self.given, home);
                let mut effects = self.is_held(home, given.saturating_sub(bytes));
                effects.push(Effect::Back(home));
                effects
            }
            Message::Kept { .. } => vec![Effect::Kept(home)],
            Message::Request { bytes } => vec![Effect::Requested(home, bytes)],
            Message::Lent { bytes } => {
                for amounts in [&mut self.held, &mut self.held_on_request] {
                    let held = amounts.entry(home).or_default();
                    *held = held.saturating_add(bytes);
                }
                vec![Effect::Lent(home, bytes)]
            }
            Message::Declined { bytes } => vec![Effect::Declined(home, bytes)],
            Message::Release { bytes } => {
                let bytes = bytes.min(self.returnable(home));
                vec![self.send_back(from, bytes)]
            }
            Message::Return { bytes } => {
                let requested = amount(&self.given_on_request, home).saturating_sub(bytes);
                set(&mut self.given_on_request, home, requested);
                let given = amount(&self.given, home);
                let mut effects = self.is_held(home, given.saturating_sub(bytes));
                effects.push(Effect::Returned(home, bytes));
                effects
            }
        }
    }

    /// Sets the count of a holder, and persists it if it changes.
    fn is_held(&mut self, by: CellNumber, bytes: u64) -> Vec<Effect> {
        let was = match bytes {
            0 => self.given.remove(&by).unwrap_or(0),
            _ => self.given.insert(by, bytes).unwrap_or(0),
        };
        let requested = amount(&self.given_on_request, by).min(bytes);
        set(&mut self.given_on_request, by, requested);
        if was == bytes {
            return Vec::new();
        }
        vec![Effect::Keep(self.given.clone())]
    }
}

/// The amount of one cell.
fn amount(amounts: &Amounts, cell: CellNumber) -> u64 {
    amounts.get(&cell).copied().unwrap_or(0)
}

/// Sets the amount of one cell.
fn set(amounts: &mut Amounts, cell: CellNumber, bytes: u64) {
    match bytes {
        0 => _ = amounts.remove(&cell),
        _ => _ = amounts.insert(cell, bytes),
    }
}
