//! Page table entries of this process (`/proc/PID/pagemap`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::pages::PAGE_BYTES;

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;
/// The page is in one page table only, once.
const EXCLUSIVE: u64 = 1 << 56;
const ENTRY_BYTES: usize = 8;

/// Entry of one page of a private mapping.
#[derive(Clone, Copy)]
pub(super) struct Entry(u64);

impl Entry {
    /// Returns whether the page is in memory and private to this process, instead of the file's.
    pub fn is_written(self) -> bool {
        self.0 & (PRESENT | SWAPPED) == PRESENT && self.0 & OF_FILE == 0
    }

    /// Returns whether the page is private, but not in this page table alone: the host's scanner merged it
    /// with equal ones, or it is the host's page of zeroes.
    pub fn is_merged(self) -> bool {
        self.is_written() && self.0 & EXCLUSIVE == 0
    }

    /// Returns whether the page is in this process's page table, or swapped out of it.
    pub fn is_present(self) -> bool {
        self.0 & (PRESENT | SWAPPED) != 0
    }

    /// Returns whether the page is private to this process, in memory or swapped out.
    pub fn is_private(self) -> bool {
        self.is_written() || self.0 & SWAPPED != 0
    }
}

/// Returns the entries of the `pages` pages from address `host` on.
pub(super) fn read(pagemap: &File, host: u64, pages: u64) -> io::Result<impl Iterator<Item = Entry>> {
    let mut bytes = vec![0; pages as usize * ENTRY_BYTES];
    pagemap.read_exact_at(&mut bytes, host / PAGE_BYTES * ENTRY_BYTES as u64)?;
    Ok((0..pages as usize).map(move |page| {
        let mut entry = [0; ENTRY_BYTES];
        entry.copy_from_slice(&bytes[page * ENTRY_BYTES..][..ENTRY_BYTES]);
        Entry(u64::from_le_bytes(entry))
    }))
}
