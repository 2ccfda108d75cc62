//! Pages whose contents nobody needs any more, between who gives them back and the lanes.
//!
//! They go in *blocks*: up to 64 pages of one lane, a bit for each. Who gives pages back waits until the lanes are done with them,
//! and has [`AT_ONCE`] blocks there at most; so nothing here grows, and a page is never forgotten after that.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::region::Region;

/// Pages of a block, at most: bits of its mask.
pub const BLOCK_PAGES: u32 = u64::BITS;
/// Blocks that the lanes have at once from one who gives pages back: 64 MiB.
const AT_ONCE: usize = 256;

/// Some of up to 64 pages in a row of one lane's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The first page that could be in it.
    pub first: u32,
    /// Bit `n`: page `first + n` is.
    pub mask: u64,
}

impl Block {
    /// Its pages.
    pub fn pages(self) -> impl Iterator<Item = u32> {
        (0..BLOCK_PAGES)
            .filter(move |bit| self.mask >> bit & 1 == 1)
            .map(move |bit| self.first + bit)
    }

    /// The bit of a page; none if it can't be in it.
    pub fn bit(self, page: u32) -> u64 {
        let bit = page
            .checked_sub(self.first)
            .and_then(|bit| 1_u64.checked_shl(bit));
        bit.unwrap_or(0)
    }

    /// Its pages that `which` takes, in runs.
    pub fn runs(self, which: impl Fn(u32) -> bool) -> impl Iterator<Item = Range<u32>> {
        let mut pages = self.pages().filter(move |page| which(*page)).peekable();
        std::iter::from_fn(move || {
            let start = pages.next()?;
            let mut end = start + 1;
            while pages.next_if_eq(&end).is_some() {
                end += 1;
            }
            Some(start..end)
        })
    }
}

/// The part of one lane.
#[derive(Debug)]
pub struct Mailbox {
    /// Wakes the lane.
    event: EventFd,
    /// There may be blocks that the lane has not taken.
    has_blocks: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    blocks: VecDeque<Block>,
    /// Blocks that the lane is not done with, those in `blocks` too.
    pending: usize,
    /// Pages of those that it is done with that are fresh now.
    freed: u64,
    is_over: bool,
}

impl Mailbox {
    /// An empty one.
    ///
    /// # Errors
    /// If the kernel has no descriptor left.
    pub fn new() -> nix::Result<Self> {
        Ok(Self {
            event: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            has_blocks: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// What the lane waits on.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The next block, for the lane.
    pub fn take(&self) -> Option<Block> {
        if !self.has_blocks.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.state();
        let block = state.blocks.pop_front();
        if block.is_none() {
            // Set again under the same lock.
            self.has_blocks.store(false, Ordering::Release);
        }
        block
    }

    /// The lane was woken: it looks for itself, if it has room for more.
    pub fn clear_event(&self) {
        let _ = self.event.read();
    }

    /// The rest of a block that was taken, which is one more by this.
    pub fn put_back(&self, block: Block) {
        let mut state = self.state();
        state.pending += 1;
        state.blocks.push_front(block);
    }

    /// The lane is done with a block, and so many of its pages are fresh.
    pub fn ended(&self, freed: u32) {
        let mut state = self.state();
        state.pending = state.pending.saturating_sub(1);
        state.freed += u64::from(freed);
        if state.pending == 0 {
            self.changed.notify_all();
        }
    }

    /// Nobody is to wait any more.
    pub fn close(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }

    fn post(&self, block: Block) {
        let mut state = self.state();
        state.pending += 1;
        state.blocks.push_back(block);
        self.has_blocks.store(true, Ordering::Release);
        // It can't be full.
        let _ = self.event.write(1);
    }

    /// Waits until the lane is done with all; how many pages are fresh.
    fn wait(&self) -> u64 {
        let mut state = self.state();
        while state.pending > 0 && !state.is_over {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::take(&mut state.freed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives pages back.
#[derive(Debug)]
pub struct Discards {
    region: Arc<Region>,
    lanes: Vec<Arc<Mailbox>>,
    /// One at a time.
    exclusive: Mutex<()>,
}

impl Discards {
    pub(crate) fn new(region: Arc<Region>) -> Self {
        Self {
            region,
            lanes: Vec::new(),
            exclusive: Mutex::new(()),
        }
    }

    /// The lanes in their order.
    pub(crate) fn add_mailbox(&mut self, lane: Arc<Mailbox>) {
        self.lanes.push(lane);
    }

    /// Forgets what is in these pages, on all nodes: who uses them later finds zeroes, and their memory goes back to the hosts, on other
    /// nodes shortly after this returns. How many pages that is: one that somebody just uses where it is managed, or that is a merged
    /// page table, stays as it is. If the memory ends, this returns too.
    ///
    /// What is written to them meanwhile may be lost, and what is read may be old or zero; what is written after it returned is as
    /// safe as anything. Pages past the region's end are left out.
    pub fn give_back(&self, pages: impl IntoIterator<Item = Range<u32>>) -> u64 {
        let _exclusive = self.exclusive.lock().unwrap_or_else(PoisonError::into_inner);
        let mut freed = 0;
        let mut posted = 0;
        let mut last: Option<Block> = None;
        for range in pages {
            for block in blocks(&self.region, range) {
                match &mut last {
                    Some(last) if last.first == block.first => last.mask |= block.mask,
                    _ => {
                        if let Some(whole) = last.replace(block) {
                            self.post(whole);
                            posted += 1;
                        }
                    }
                }
                if posted == AT_ONCE {
                    freed += self.wait();
                    posted = 0;
                }
            }
        }
        if let Some(whole) = last {
            self.post(whole);
        }
        freed + self.wait()
    }

    fn post(&self, block: Block) {
        self.lanes[usize::from(self.region.stripe_of(block.first))].post(block);
    }

    fn wait(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.wait()).sum()
    }
}

/// The blocks of a region that pages are in.
fn blocks(region: &Region, pages: Range<u32>) -> impl Iterator<Item = Block> {
    let mut next = pages.start;
    let end = pages.end.min(region.pages());
    std::iter::from_fn(move || {
        if next >= end {
            return None;
        }
        let room = region.block_of(next, BLOCK_PAGES);
        let stop = room.end.min(end);
        let bits = u64::MAX >> (BLOCK_PAGES - (stop - next));
        let mask = bits << (next - room.start);
        next = stop;
        Some(Block {
            first: room.start,
            mask,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::RegionOptions;

    #[test]
    fn a_block_tells_its_pages_and_runs() {
        let block = Block {
            first: 100,
            mask: 0b1011_0111 | 1 << 63,
        };
        let runs = |which: fn(u32) -> bool| block.runs(which).collect::<Vec<_>>();
        assert_eq!(runs(|_| true), [100..103, 104..106, 107..108, 163..164]);
        assert_eq!(
            runs(|page| page != 101),
            [100..101, 102..103, 104..106, 107..108, 163..164]
        );
        assert_eq!(runs(|_| false), []);
        for (page, bit) in [(99, 0), (100, 1), (163, 1 << 63), (164, 0), (u32::MAX, 0)] {
            assert_eq!(block.bit(page), bit, "page {page}");
        }
    }

    #[test]
    fn all_pages_and_no_others_are_in_blocks_of_one_lane_each() {
        for (pages, lanes) in [(4096, 1), (4096, 3), (100, 1), (8, 2), (1, 1)] {
            let region = Region::with(pages, lanes, None, RegionOptions::default()).unwrap();
            for range in [0..pages, 1..pages, 5..6, 63..65, 64..pages / 2, 7..7, 0..u32::MAX] {
                let mut found = Vec::new();
                for block in blocks(&region, range.clone()) {
                    assert_eq!(region.block_of(block.first, BLOCK_PAGES).start, block.first);
                    let lane = region.stripe_of(block.first);
                    assert!(block.pages().all(|page| region.stripe_of(page) == lane));
                    found.extend(block.pages());
                }
                let wanted: Vec<u32> = (range.start..range.end.min(region.pages())).collect();
                assert_eq!(found, wanted, "{range:?} of {pages} by {lanes} lanes");
            }
        }
    }
}
