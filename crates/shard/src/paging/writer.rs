//! Unmaps pages, writes them out, and removes them from memory.

use std::io;
use std::ops::Range;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use dsm::PAGE_LEN;
use locks::IgnorePoison;
use policy::memory::resident_set::{Content, WRITE_CLUSTER_PAGES};
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

/// Pages of a cluster, by their content.
struct Copies {
    /// Those that have to be written, in order, and their bytes.
    pages: Vec<u32>,
    buffer: PageBuffer,
    /// Those of zeroes, and those with the content of their former slot.
    others: Vec<(u32, Content)>,
    /// A page that was compared.
    scratch: PageBuffer,
}

impl Paging {
    /// Keeps the number of pages in memory below the limit, until the process ends.
    pub(super) fn write_pages(&self) {
        let mut taken = Vec::with_capacity(WRITE_CLUSTER_PAGES as usize);
        let mut copies = Copies {
            pages: Vec::with_capacity(WRITE_CLUSTER_PAGES as usize),
            buffer: PageBuffer::new(WRITE_CLUSTER_PAGES),
            others: Vec::with_capacity(WRITE_CLUSTER_PAGES as usize),
            scratch: PageBuffer::new(1),
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
    fn write_cluster(&self, taken: &mut [u32], copies: &mut Copies) -> io::Result<()> {
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
        self.copy(taken, copies)?;
        let Copies {
            pages: copied,
            buffer,
            others,
            ..
        } = copies;
        self.commit(others.iter().copied())?;
        let buffer = buffer.pages();
        let mut done = 0;
        while let Some(pages) = copied.get(done..).filter(|pages| !pages.is_empty()) {
            match self.write_slots(&mut buffer[done..copied.len()]) {
                Ok(run) => {
                    let part = done..done + run.len();
                    let slots = run.map(Content::Slot);
                    self.commit(copied[part.clone()].iter().copied().zip(slots))?;
                    done = part.end;
                }
                Err(error) => {
                    self.refuse(pages, error.to_string());
                    break;
                }
            }
        }
        self.evicted.notify_all();
        Ok(())
    }

    /// Copies pages that have to be written, and frees the former slots of all that differ from them: the
    /// file may need the room.
    fn copy(&self, taken: &[u32], copies: &mut Copies) -> io::Result<()> {
        let formers: Vec<_> = {
            let State { set, seals, .. } = &*self.state();
            let former = |page: &u32| set.slot(*page).map(|slot| (slot, seals.get(slot)));
            taken.iter().map(former).collect()
        };
        copies.pages.clear();
        copies.others.clear();
        let (buffer, scratch) = (copies.buffer.pages(), copies.scratch.pages());
        for (&page, former) in taken.iter().zip(formers) {
            let bytes = &mut buffer[copies.pages.len()];
            self.memory.read(page, bytes)?;
            if bytes.iter().all(|byte| *byte == 0) {
                copies.others.push((page, Content::Zero));
                continue;
            }
            match former {
                Some((slot, seal)) if self.store.is_content(slot, &seal, bytes, &mut scratch[0])? => {
                    copies.others.push((page, Content::Unchanged(slot)));
                }
                _ => copies.pages.push(page),
            }
        }
        let mut state = self.state();
        let State { set, slots, .. } = &mut *state;
        let zeroes = copies
            .others
            .iter()
            .filter(|(_, content)| *content == Content::Zero);
        for page in copies.pages.iter().chain(zeroes.map(|(page, _)| page)) {
            if let Some(slot) = set.release_former(*page) {
                slots.release(slot);
            }
        }
        Ok(())
    }

    /// Removes pages from memory that were not touched since they were unmapped. Frees the new slots of the
    /// others.
    fn commit(&self, pages: impl Iterator<Item = (u32, Content)>) -> io::Result<()> {
        let mut state = self.state();
        let State {
            set, slots, counters, ..
        } = &mut *state;
        let mut gone = Vec::with_capacity(WRITE_CLUSTER_PAGES as usize);
        for (page, content) in pages {
            let is_gone = set.written(page, content);
            match content {
                Content::Zero => counters.zero_pages += u64::from(is_gone),
                Content::Unchanged(slot) if slots.images().place(slot).is_some() => {
                    counters.image_pages += u64::from(is_gone);
                }
                Content::Unchanged(_) => counters.unchanged_pages += u64::from(is_gone),
                Content::Slot(slot) if !is_gone => drop(slots.release(slot)),
                Content::Slot(_) => {}
            }
            if is_gone {
                gone.push(page);
            }
        }
        gone.sort_unstable();
        // Under the same lock: a touch that comes now is answered after the removal.
        for_runs(&gone, |run| self.memory.punch(run))
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

    /// Keeps pages in memory that the paging file does not take. If pages in memory have kept slots, these
    /// make room, once; otherwise the writer pauses.
    fn refuse(&self, pages: &[u32], reason: String) {
        let mut state = self.state();
        state.set.not_written(pages);
        if state.stop_keeping_slots() {
            return;
        }
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
