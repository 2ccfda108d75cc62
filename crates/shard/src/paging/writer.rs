//! Unmaps pages, writes them out, and removes them from memory.

use std::io;
use std::ops::Range;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use dsm::PAGE_LEN;
use locks::IgnorePoison;
use policy::memory::resident_set::WRITE_CLUSTER_PAGES;
use tracing::warn;

use super::guest_pages::for_runs;
use super::store::PageBuffer;
use super::{Paging, Stall, State};

/// Greatest number of pages that are unmapped under one hold of the lock: 1 MiB.
const TRIM_PAGES: u32 = 256;
/// Time limit for an instant without I/O into guest memory.
const IO_GAP_LIMIT: Duration = Duration::from_millis(20);
/// Time after which a cluster is tried again for which there was none.
const IO_GAP_INTERVAL: Duration = Duration::from_millis(10);
/// Time after which pages are tried again that the paging file did not take.
const STALL_INTERVAL: Duration = Duration::from_secs(1);

/// Pages of a cluster with content, in order, and their bytes.
struct Copies {
    pages: Vec<u32>,
    buffer: PageBuffer,
}

impl Paging {
    /// Keeps the number of pages in memory below the limit, until the process ends.
    pub(super) fn write_pages(&self) {
        let mut taken = Vec::with_capacity(WRITE_CLUSTER_PAGES as usize);
        let mut copies = Copies {
            pages: Vec::with_capacity(WRITE_CLUSTER_PAGES as usize),
            buffer: PageBuffer::new(WRITE_CLUSTER_PAGES),
        };
        loop {
            let result = self
                .next_cluster(&mut taken)
                .and_then(|()| self.write_cluster(&mut taken, &mut copies));
            if let Err(error) = result {
                self.fail(format!("the VM's memory cannot be paged: {error}"));
                return;
            }
        }
    }

    /// Waits until pages have to be written, and takes them. Unmaps pages meanwhile.
    fn next_cluster(&self, taken: &mut Vec<u32>) -> io::Result<()> {
        taken.clear();
        let mut state = self.state();
        loop {
            if let Some(Stall { since, .. }) = &state.stalled {
                // The file may have room again after a while, or the limit is changed.
                let left = STALL_INTERVAL.saturating_sub(since.elapsed());
                if !left.is_zero() {
                    state = self.wanted.wait_timeout(state, left).ignore_poison().0;
                    continue;
                }
                state.stalled = None;
            }
            while self.trim(&mut state)? {
                // Faults are answered between two parts.
                drop(state);
                state = self.state();
            }
            state.set.take_for_writing(WRITE_CLUSTER_PAGES, taken);
            if !taken.is_empty() {
                return Ok(());
            }
            state = self.wanted.wait(state).ignore_poison();
        }
    }

    /// Unmaps pages that leave the FIFO. Returns whether there may be more.
    fn trim(&self, state: &mut MutexGuard<'_, State>) -> io::Result<bool> {
        let mut pages = Vec::new();
        state.set.trim(TRIM_PAGES, &mut pages);
        pages.sort_unstable();
        for_runs(&pages, |run| self.memory.unmap(run))?;
        Ok(pages.len() as u32 == TRIM_PAGES)
    }

    /// Writes pages out, and removes from memory those that were not touched meanwhile.
    ///
    /// # Errors
    /// If the host refuses to read or remove pages of the memory's own file.
    fn write_cluster(&self, taken: &mut Vec<u32>, copies: &mut Copies) -> io::Result<()> {
        let gap = self
            .running
            .get()
            .is_none_or(|running| running.quiescer.io_gap(IO_GAP_LIMIT));
        if !gap {
            let mut state = self.state();
            state.set.not_written(taken);
            state.counters.deferred += 1;
            drop(state);
            std::thread::sleep(IO_GAP_INTERVAL);
            return Ok(());
        }
        // Neighbours lie side by side in the file, so that they can be read together.
        taken.sort_unstable();
        let mut zeroes = Vec::new();
        let Copies {
            pages: copied,
            buffer,
        } = copies;
        let buffer = buffer.pages();
        copied.clear();
        for &page in &*taken {
            let bytes = &mut buffer[copied.len()];
            self.memory.read(page, bytes)?;
            match bytes.iter().all(|byte| *byte == 0) {
                true => zeroes.push(page),
                false => copied.push(page),
            }
        }
        let mut state = self.state();
        let removed = self.commit(&mut state, zeroes.iter().map(|page| (*page, None)))?;
        state.counters.zero_pages += removed;
        drop(state);
        let mut done = 0;
        while let Some(pages) = copied.get(done..).filter(|pages| !pages.is_empty()) {
            match self.write_slots(&mut buffer[done..copied.len()]) {
                Ok(run) => {
                    let part = done..done + run.len();
                    let slots = run.map(Some);
                    let mut state = self.state();
                    self.commit(&mut state, copied[part.clone()].iter().copied().zip(slots))?;
                    done = part.end;
                }
                Err(error) => {
                    self.stall(pages, error.to_string());
                    break;
                }
            }
        }
        self.evicted.notify_all();
        Ok(())
    }

    /// Removes pages from memory whose content is in the slot beside them, or zero, if they were not touched
    /// since they were unmapped. Frees the slots of the others. Returns the number of removed pages.
    fn commit(
        &self,
        state: &mut MutexGuard<'_, State>,
        pages: impl Iterator<Item = (u32, Option<u32>)>,
    ) -> io::Result<u64> {
        let mut gone = Vec::with_capacity(WRITE_CLUSTER_PAGES as usize);
        for (page, slot) in pages {
            if state.set.written(page, slot) {
                gone.push(page);
            } else if let Some(slot) = slot {
                state.slots.release(slot);
            }
        }
        // Under the same lock: a touch that comes now is answered after the removal.
        for_runs(&gone, |run| self.memory.punch(run))?;
        Ok(gone.len() as u64)
    }

    /// Writes pages into new slots side by side, from the first page on, as many as the file has room for in
    /// one place. Returns their slots, each with one reference. The bytes of `pages` are undefined
    /// afterwards.
    ///
    /// # Errors
    /// If the file is full, or the host's error. No slot is allocated then.
    pub(super) fn write_slots(&self, pages: &mut [[u8; PAGE_LEN]]) -> io::Result<Range<u32>> {
        let run = self.state().slots.allocate(pages.len() as u32);
        let run = run.ok_or_else(|| io::Error::other("it is full"))?;
        let written = self.store.write(run.start, &mut pages[..run.len()]);
        let mut state = self.state();
        let State {
            slots,
            seals,
            counters,
            ..
        } = &mut *state;
        match written {
            Ok(written) => {
                for (slot, seal) in run.clone().zip(written) {
                    seals.set(slot, seal);
                }
                counters.written_pages += run.len() as u64;
                Ok(run)
            }
            Err(error) => {
                for slot in run {
                    slots.release(slot);
                }
                Err(error)
            }
        }
    }

    /// Keeps pages in memory that the paging file does not take.
    fn stall(&self, pages: &[u32], reason: String) {
        let mut state = self.state();
        state.set.not_written(pages);
        state.counters.refused += 1;
        if state.counters.refused == 1 {
            warn!("the paging file {} takes no pages: {reason}", self.store.name());
        }
        state.stalled = Some(Stall {
            reason,
            since: Instant::now(),
        });
    }
}
