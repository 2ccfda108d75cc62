//! Pages whose contents are discarded, between the threads that give them back and the page servers.
//!
//! Pages travel in *blocks*: up to 64 pages of one stripe, a bit for each. A thread that gives pages back
//! blocks until the page servers have finished with them, and has [`AT_ONCE`] blocks there at most. So
//! nothing here grows, and no page is discarded after the call returns.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use locks::IgnorePoison;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::region::Region;

/// Largest number of pages of a block: the bits of its mask.
pub const BLOCK_PAGES: u32 = u64::BITS;
/// Blocks of one caller that the page servers have at once: 64 MiB.
const AT_ONCE: usize = 256;

/// A subset of up to 64 successive pages of one stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First page that the block could contain.
    pub first: u32,
    /// Bit `n` stands for page `first + n`.
    pub mask: u64,
}

impl Block {
    /// Iterates over the pages of the block.
    pub fn pages(self) -> impl Iterator<Item = u32> {
        (0..BLOCK_PAGES)
            .filter(move |bit| self.mask >> bit & 1 == 1)
            .map(move |bit| self.first + bit)
    }

    /// Returns the bit of a page; 0 if the block can't contain it.
    pub fn bit(self, page: u32) -> u64 {
        let bit = page
            .checked_sub(self.first)
            .and_then(|bit| 1_u64.checked_shl(bit));
        bit.unwrap_or(0)
    }

    /// Iterates over the runs of pages for which `which` returns true.
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

/// Queue of blocks to one page server.
#[derive(Debug)]
pub struct Mailbox {
    /// Wakes the page server.
    event: EventFd,
    /// Whether the queue may hold blocks.
    has_blocks: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    blocks: VecDeque<Block>,
    /// Blocks that the page server has not finished, those in `blocks` included.
    pending: usize,
    /// Pages that became zero in the finished blocks.
    freed: u64,
    is_over: bool,
}

impl Mailbox {
    /// Creates an empty queue.
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

    /// Returns the descriptor that wakes the page server.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Takes the next block.
    pub fn take(&self) -> Option<Block> {
        if !self.has_blocks.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.state();
        let block = state.blocks.pop_front();
        if block.is_none() {
            // The flag is set under the same lock.
            self.has_blocks.store(false, Ordering::Release);
        }
        block
    }

    /// Resets the descriptor. The page server takes blocks when it has room for more.
    pub fn clear_event(&self) {
        let _ = self.event.read();
    }

    /// Puts the rest of a block back, which counts as one block more.
    pub fn put_back(&self, block: Block) {
        let mut state = self.state();
        state.pending += 1;
        state.blocks.push_front(block);
    }

    /// Reports a finished block and how many of its pages are zero.
    pub fn ended(&self, freed: u32) {
        let mut state = self.state();
        state.pending = state.pending.saturating_sub(1);
        state.freed += u64::from(freed);
        if state.pending == 0 {
            self.changed.notify_all();
        }
    }

    /// Ends all waits.
    pub fn close(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }

    fn post(&self, block: Block) {
        let mut state = self.state();
        state.pending += 1;
        state.blocks.push_back(block);
        self.has_blocks.store(true, Ordering::Release);
        // The counter can't overflow.
        let _ = self.event.write(1);
    }

    /// Waits until the page server has finished all blocks. Returns how many pages became zero.
    fn wait(&self) -> u64 {
        let mut state = self.state();
        while state.pending > 0 && !state.is_over {
            state = self.changed.wait(state).ignore_poison();
        }
        std::mem::take(&mut state.freed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }
}

/// Gives pages of the memory back.
#[derive(Debug)]
pub struct Discards {
    region: Arc<Region>,
    mailboxes: Vec<Arc<Mailbox>>,
    /// Lock that serializes callers.
    exclusive: Mutex<()>,
}

impl Discards {
    pub(crate) fn new(region: Arc<Region>) -> Self {
        Self {
            region,
            mailboxes: Vec::new(),
            exclusive: Mutex::new(()),
        }
    }

    /// Adds the queue of the next page server.
    pub(crate) fn add_mailbox(&mut self, mailbox: Arc<Mailbox>) {
        self.mailboxes.push(mailbox);
    }

    /// Discards the contents of pages on all nodes: later accesses read zeroes, and the memory returns to the
    /// hosts, on other nodes shortly after this returns. Returns the number of pages discarded. A page that
    /// is in use at its manager, or is a merged page table, is not discarded. Returns early if the memory
    /// ends.
    ///
    /// A write during the call may be lost, and a read may return old contents or zeroes. A write after the
    /// call is kept. Pages past the region's end are ignored.
    pub fn give_back(&self, pages: impl IntoIterator<Item = Range<u32>>) -> u64 {
        let _exclusive = self.exclusive.lock().ignore_poison();
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
        self.mailboxes[usize::from(self.region.stripe_of(block.first))].post(block);
    }

    fn wait(&self) -> u64 {
        self.mailboxes.iter().map(|mailbox| mailbox.wait()).sum()
    }
}

/// Iterates over the blocks of a region that cover a range of pages.
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
    fn block_yields_its_pages_and_runs() {
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
    fn blocks_cover_exactly_the_range_and_one_stripe_each() {
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
