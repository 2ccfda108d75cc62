//! A virtual paging disk: a disk whose pages are references to slots of the VM's paging file (Cellular Disco,
//! section 5.3, figure 9).
//!
//! A guest that swaps writes pages that may be paged out already. Without this disk such a page is read from
//! the paging file, written to the guest's disk, and is in both. Here the disk's page refers to the slot that
//! the guest's page has: no byte moves. A read makes the guest's page refer to the disk's slot, and takes an
//! access when the page is touched, if ever.
//!
//! A slot is immutable and counts its references ([`PagingSlots`]). So a write to the guest's page, and one
//! to the disk's page, take another slot, and change nothing of the other page.

use super::paging_slots::PagingSlots;
use super::resident_set::{PageState, ResidentSet};

/// Indirection table of the disk: 4 bytes for each page.
#[derive(Debug)]
pub struct PagingDisk {
    /// The slot of each page plus one; 0 for a page of zeroes. So memory that no entry has used is not
    /// touched.
    entries: Vec<u32>,
    used: u32,
}

/// Step that a write of a page of the disk by a page of the guest needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// None: the disk's page is zero, as the guest's page is.
    Zero,
    /// None: the disk's page refers to the slot of the guest's page.
    Shared,
    /// The bytes of the guest's page, which is in memory, have to be copied to a slot, and
    /// [`PagingDisk::set`] called.
    Copy,
    /// The same, but the guest's page is not in memory: its slot has as many references as it can count.
    ReadAndCopy,
}

/// Step that a read of a page of the disk into a page of the guest needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// The guest's page is zero, as the disk's page is.
    Zero {
        /// Whether the page has to be removed from memory before a touch is recorded.
        remove: bool,
    },
    /// The guest's page is paged out, to the slot of the disk's page.
    Shared {
        /// Whether the page has to be removed from memory before a touch is recorded.
        remove: bool,
    },
    /// The slot's bytes have to be copied into the guest's page: the slot has as many references as it can
    /// count.
    Copy,
}

impl PagingDisk {
    /// Creates a disk of `pages` pages of zeroes.
    pub fn new(pages: u32) -> Self {
        Self {
            entries: vec![0; pages as usize],
            used: 0,
        }
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Returns the number of pages with a slot.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Returns the slot of a page of the disk, if it has one.
    pub fn slot(&self, at: u32) -> Option<u32> {
        self.entries[at as usize].checked_sub(1)
    }

    /// Replaces the content of a page of the disk by that of `slot`, whose reference becomes the disk's, or
    /// by zeroes. Releases the slot that the page had.
    pub fn set(&mut self, at: u32, slot: Option<u32>, slots: &mut PagingSlots) {
        let before = self.slot(at);
        match (before, slot) {
            // Memory of an entry that was never used is not touched.
            (None, None) => return,
            (None, Some(_)) => self.used += 1,
            (Some(_), None) => self.used -= 1,
            (Some(_), Some(_)) => {}
        }
        self.entries[at as usize] = slot.map_or(0, |slot| slot + 1);
        if let Some(before) = before {
            slots.release(before);
        }
    }

    /// Writes a page of the guest to a page of the disk, without its bytes if they are not in memory.
    pub fn put(&mut self, at: u32, page: u32, set: &ResidentSet, slots: &mut PagingSlots) -> Put {
        if set.state(page) == PageState::Zero {
            self.set(at, None, slots);
            return Put::Zero;
        }
        match set.slot(page).filter(|_| set.has_slots_content(page)) {
            Some(slot) if self.share(at, slot, slots) => Put::Shared,
            _ if set.is_in_memory(page) => Put::Copy,
            _ => Put::ReadAndCopy,
        }
    }

    /// Has a page of the disk refer to the slot of a page of the guest, which has the same content. Returns
    /// false, and changes nothing, if the slot has as many references as it can count.
    pub fn share(&mut self, at: u32, slot: u32, slots: &mut PagingSlots) -> bool {
        // The reference is added before the former one of the same slot, if it is, is released.
        let is_shared = slots.share(slot);
        if is_shared {
            self.set(at, Some(slot), slots);
        }
        is_shared
    }

    /// Reads a page of the disk into a page of the guest, whose content is lost, without bytes.
    pub fn fetch(&self, at: u32, page: u32, set: &mut ResidentSet, slots: &mut PagingSlots) -> Fetch {
        let slot = self.slot(at);
        if slot.is_some_and(|slot| !slots.share(slot)) {
            return Fetch::Copy;
        }
        let remove = set.is_in_memory(page);
        let before = match slot {
            Some(slot) => set.replace(page, slot),
            None => set.release(page),
        };
        if let Some(before) = before {
            slots.release(before);
        }
        match slot {
            Some(_) => Fetch::Shared { remove },
            None => Fetch::Zero { remove },
        }
    }
}

#[cfg(test)]
mod tests;
