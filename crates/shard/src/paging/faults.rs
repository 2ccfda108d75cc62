//! Answers faults: maps pages that are in memory or zero, and reads back those that are paged out.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use dsm::{FAULTS_MAX, Fault, PAGE_LEN};
use locks::IgnorePoison;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use policy::memory::paging_slots::PagingSlots;
use policy::memory::resident_set::{Cached, READ_CLUSTER_PAGES, ReadDone, ResidentSet, Touch};

use super::cipher::{Seal, SealTable};
use super::guest_pages::for_runs;
use super::store::PageBuffer;
use super::{Paging, State};

/// Pages beyond the limit from which on faults wait for the writer, and no page is read before its touch: 1
/// MiB.
const OVERDRAFT_PAGES: u32 = 256;
/// Longest wait of a fault for the writer. The writer may itself wait for a device whose thread waits for the
/// fault, so the wait is bounded, and the limit is soft.
const EVICTION_WAIT: Duration = Duration::from_millis(5);

/// A read of successive slots.
struct Read {
    /// The page of each slot. A thread may wait for the first one.
    pages: Vec<u32>,
    slot: u32,
    seals: Vec<Seal>,
}

impl Read {
    /// Begins a read, with a reference of its own to each slot: a page may be released meanwhile, and the
    /// slot must not be written anew. A slot has as many as all threads' reads can take.
    fn new(pages: Vec<u32>, slot: u32, slots: &mut PagingSlots, seals: &SealTable) -> io::Result<Self> {
        let range = slot..slot + pages.len() as u32;
        for slot in range.clone() {
            if !slots.share_for_read(slot) {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
        }
        let seals = range.map(|slot| seals.get(slot)).collect();
        Ok(Self { pages, slot, seals })
    }
}

impl Paging {
    /// Answers faults until the process ends, or until a page can't be read: the VM ends then, and the
    /// threads that wait for the page never go on.
    pub(super) fn serve_faults(&self) {
        let mut pages = PageBuffer::new(READ_CLUSTER_PAGES);
        loop {
            if let Err(detail) = self.serve_some_faults(pages.pages()) {
                self.fail(detail);
                return;
            }
        }
    }

    /// Waits for faults, and answers them: first those without I/O.
    fn serve_some_faults(&self, pages: &mut [[u8; PAGE_LEN]]) -> Result<(), String> {
        let host = |error: io::Error| format!("the VM's memory cannot be paged: {error}");
        let mut files = [PollFd::new(self.userfault.as_fd(), PollFlags::POLLIN)];
        match poll(&mut files, PollTimeout::NONE) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(host(error.into())),
        }
        let mut faults = [Fault::NONE; FAULTS_MAX];
        let count = self.userfault.read(&mut faults).map_err(host)?;
        if count == 0 {
            return Ok(());
        }
        self.wait_for_room();
        let mut reads = Vec::new();
        for fault in &faults[..count] {
            let page = self.memory.page_at(fault.address);
            // The kernel reports faults of the registered mappings only.
            let page = page.ok_or_else(|| host(io::ErrorKind::InvalidInput.into()))?;
            reads.extend(self.answer(page).map_err(host)?);
        }
        for read in reads {
            self.read_back(&read, pages)?;
        }
        if self.state().set.needs_eviction() {
            self.wanted.notify_one();
        }
        Ok(())
    }

    /// Waits while much more is in memory than may be, and the writer can change that.
    fn wait_for_room(&self) {
        let state = self.state();
        let counts = state.set.counts();
        if state.stalled.is_none() && counts.in_memory() > counts.limit.saturating_add(OVERDRAFT_PAGES) {
            self.wanted.notify_one();
            drop(self.evicted.wait_timeout(state, EVICTION_WAIT).ignore_poison());
        }
    }

    /// Answers a fault without I/O, or returns what has to be read.
    fn answer(&self, page: u32) -> io::Result<Option<Read>> {
        let at = self.memory.address(page).ok_or(io::ErrorKind::InvalidInput)?;
        let mut state = self.state();
        let State {
            set,
            slots,
            seals,
            counters,
            ..
        } = &mut *state;
        match set.touch(page) {
            Touch::MapZero => {
                counters.zero_faults += 1;
                match self.userfault.map_zeroes(at..at + PAGE_LEN) {
                    // A part of a huge page, which the host could not split, was zeroed in place.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.map_cached(at),
                    result => result,
                }?;
            }
            Touch::MapCached(cached) => {
                match cached {
                    Cached::SecondChance => counters.faults_without_io += 1,
                    Cached::ReadAhead => counters.faults_ahead += 1,
                    Cached::Resident => {}
                }
                release_former(set, slots, page);
                self.map_cached(at)?;
            }
            Touch::Read { slot } => {
                counters.faults_with_io += 1;
                let mut pages = Vec::with_capacity(READ_CLUSTER_PAGES as usize);
                pages.push(page);
                set.read_ahead(slot, &mut pages);
                return Read::new(pages, slot, slots, seals).map(Some);
            }
            Touch::Wait => {}
        }
        Ok(None)
    }

    /// Maps a page that the memory's file has, and wakes the threads that wait for it.
    fn map_cached(&self, at: usize) -> io::Result<()> {
        match self.userfault.map_cached(at..at + PAGE_LEN, true) {
            // It is mapped already: another thread's fault was answered before.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.userfault.wake(at),
            result => result,
        }
    }

    /// Reads pages that one request has moved from the paging disk to memory, as far as that pays before the
    /// guest touches them. `pages` is empty afterwards.
    ///
    /// # Errors
    /// If a page can't be read or mapped: the VM ends, as threads may wait for it.
    pub(super) fn read_moved(
        &self,
        pages: &mut Vec<u32>,
        buffer: &mut [[u8; PAGE_LEN]],
    ) -> Result<(), String> {
        if pages.is_empty() {
            return Ok(());
        }
        let reads = self.begin_moved(pages).map_err(|error| error.to_string());
        pages.clear();
        let read = reads.and_then(|reads| reads.iter().try_for_each(|read| self.read_back(read, buffer)));
        if self.state().set.needs_eviction() {
            self.wanted.notify_one();
        }
        read.inspect_err(|error| self.fail(error.clone()))
    }

    /// Begins the reads of those pages that are worth it.
    fn begin_moved(&self, pages: &mut Vec<u32>) -> io::Result<Vec<Read>> {
        let State {
            set,
            slots,
            seals,
            counters,
            ..
        } = &mut *self.state();
        let counts = set.counts();
        if counts.in_memory() > counts.limit.saturating_add(OVERDRAFT_PAGES) {
            return Ok(Vec::new());
        }
        set.read_moved(pages);
        counters.disk.read_at_once += pages.len() as u64;
        let successive = |page: &u32, next: &u32| set.slot(*page).map(|slot| slot + 1) == set.slot(*next);
        // A page that is being read has a slot.
        let runs = pages.chunk_by(successive);
        let runs = runs.filter_map(|run| Some((run.to_vec(), set.slot(run[0])?)));
        runs.map(|(pages, slot)| Read::new(pages, slot, slots, seals))
            .collect()
    }

    fn read_back(&self, read: &Read, buffer: &mut [[u8; PAGE_LEN]]) -> Result<(), String> {
        let buffer = &mut buffer[..read.seals.len()];
        let done = self.store.read(read.slot, &read.seals, buffer);
        done.map_err(|error| error.to_string())?;
        let mut state = self.state();
        let State {
            set, slots, counters, ..
        } = &mut *state;
        let counter = match slots.images().place(read.slot) {
            Some(_) => &mut counters.image_reads,
            None => &mut counters.read_pages,
        };
        for ((&page, slot), bytes) in read.pages.iter().zip(read.slot..).zip(&*buffer) {
            let at = self.memory.address(page).unwrap_or_default();
            let done = set.read_done(page, slot);
            *counter += u64::from(done != ReadDone::Drop);
            let mapped = match done {
                ReadDone::Map => {
                    release_former(set, slots, page);
                    self.userfault.map_copy(at, bytes, true)
                }
                // The state is that of a page without waiting threads, and changes under the lock only.
                ReadDone::Keep => self.memory.write(page, bytes),
                // It was released meanwhile: the threads that wait touch it again.
                ReadDone::Drop => self.userfault.wake(at),
            };
            slots.release(slot);
            mapped.map_err(|error| format!("a page that was read back cannot be mapped: {error}"))?;
        }
        let mut unused = Vec::new();
        set.take_unused(&mut unused);
        unused.sort_unstable();
        for_runs(&unused, |run| self.remove(run)).map_err(|error| error.to_string())
    }
}

/// Frees the former slot of a page that is about to be mapped, unless the page keeps it.
fn release_former(set: &mut ResidentSet, slots: &mut PagingSlots, page: u32) {
    if let Some(slot) = set.mapped(page) {
        slots.release(slot);
    }
}
