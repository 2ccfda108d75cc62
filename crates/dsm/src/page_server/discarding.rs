//! Discarding of pages: threads of this node pass blocks to a page server, which has each page's manager
//! discard them.
//!
//! ```text
//!  caller              page server                page server of the manager   all other page servers
//!  Block ────────────► Discard (if not here) ───► the engine, page by page
//!  resumes ◄────────── ◄────────────── Discarded ──────────────────────────► frees the memory
//! ```
//!
//! A page that this node owns alone is discarded at once, with its neighbours by one system call. Others wait
//! for messages. A page in use is tried again for a while, and then stays. Page servers alternate between
//! this and the threads that wait: a step is short, and the pause after it as long.
//!
//! `Discarded` comes only from the pages' manager, on the stream of its offers, so what it frees is none of a
//! page that was merged since. It is handled at once, even if an earlier message of its sender about merged
//! pages waits for a third node's diffs. An offered page is not discarded until all nodes have closed it, or
//! the offer was withdrawn; its bytes are then invalid on every node.

use std::collections::VecDeque;
use std::ops::Range;

use coherence::{DiscardOutcome, NodeId, Page, Right};

use super::PageServer;
use crate::clock::now_ns;
use crate::discards::{BLOCK_PAGES, Block};
use crate::frame::{DiscardFrame, DriverKind, Frame, driver_frame, page_of};
use crate::min_residency::BOUND_NS;
use crate::shutdown::End;

const REQUESTER_AT: usize = 5;
const MASK_AT: usize = 8;
/// Largest number of blocks that one node has in progress at a page server of another.
const BLOCKS_MAX: usize = 16;
/// Budget of a step, in pages discarded with their neighbours: 0.3 us each.
const STEP: u32 = 64;
/// Cost of a page discarded by itself or by messages, in the same unit.
const ALONE: u32 = 8;
/// Shortest pause after a step, nanoseconds.
const PAUSE_NS: u64 = 20_000;
/// Time for which a page in use is tried again, nanoseconds. No page is held longer without having been used.
const RETRY_NS: u64 = 2 * BOUND_NS;

/// Discards of a page server.
#[derive(Debug, Default)]
pub struct Discarding {
    requests: VecDeque<DiscardRequest>,
    /// Blocks that other nodes were requested to discard.
    asked: usize,
    /// End of the pause, nanoseconds.
    next_ns: u64,
}

/// A request to discard a block that this node manages.
#[derive(Clone, Copy, Debug)]
struct DiscardRequest {
    requester: u16,
    block: Block,
    /// Pages not begun.
    todo: u64,
    /// Pages that the engine has begun.
    waiting: u64,
    /// Pages that are zero.
    done: u64,
    until_ns: u64,
}

impl PageServer {
    /// Continues the discards. Returns the time after which to call again at the latest, nanoseconds.
    pub(super) fn discard(&mut self) -> Result<Option<u64>, End> {
        // This makes room for new blocks.
        self.finish()?;
        self.take_blocks()?;
        if self.discarding.requests.iter().all(|request| request.todo == 0) {
            return Ok(None);
        }
        let (now, next_ns) = (now_ns(), self.discarding.next_ns);
        if now < next_ns {
            return Ok(Some(next_ns - now));
        }
        let mut left = STEP;
        for index in 0..self.discarding.requests.len() {
            left = self.step(index, left, now)?;
        }
        self.finish()?;
        let pause_ns = now_ns().saturating_sub(now).max(PAUSE_NS);
        self.discarding.next_ns = now + 2 * pause_ns;
        Ok(Some(pause_ns))
    }

    /// Handles a frame about discards.
    pub(super) fn receive_discard(
        &mut self,
        node: usize,
        kind: DiscardFrame,
        frame: &Frame,
    ) -> Result<(), End> {
        let block = block_of(frame);
        let malformed = |server: &Self| {
            End::ProtocolError(format!(
                "{}: it wants pages forgotten that it can't",
                server.driver.peers.name(node)
            ))
        };
        let manager = match kind {
            DiscardFrame::Request => self.driver.me,
            DiscardFrame::Done => node as u16,
        };
        if !self.is_block(block, manager) {
            return Err(malformed(self));
        }
        match kind {
            DiscardFrame::Request => {
                let requests = self.discarding.requests.iter();
                if block.mask == 0
                    || requests
                        .filter(|request| usize::from(request.requester) == node)
                        .count()
                        >= BLOCKS_MAX
                {
                    return Err(malformed(self));
                }
                self.begin(block, node as u16);
                Ok(())
            }
            DiscardFrame::Done => {
                self.free_absent(block);
                if u16::from(frame[REQUESTER_AT]) == self.driver.me {
                    let Some(asked) = self.discarding.asked.checked_sub(1) else {
                        return Err(malformed(self));
                    };
                    self.discarding.asked = asked;
                    self.driver.mailbox.ended(block.mask.count_ones());
                }
                self.check()
            }
        }
    }

    /// Returns whether this is a block of this page server's pages that `manager` manages.
    fn is_block(&self, block: Block, manager: u16) -> bool {
        let region = &self.driver.region;
        if block.first >= region.pages() || region.stripe_of(block.first) != self.number {
            return false;
        }
        let room = region.block_of(block.first, BLOCK_PAGES);
        let is_its = |page| self.engine.manager(Page(region.striped(page))) == NodeId(manager);
        room.start == block.first && block.pages().all(|page| room.contains(&page) && is_its(page))
    }

    fn begin(&mut self, block: Block, requester: u16) {
        self.discarding.requests.push_back(DiscardRequest {
            requester,
            block,
            todo: block.mask,
            waiting: 0,
            done: 0,
            until_ns: now_ns() + RETRY_NS,
        });
    }

    /// Takes blocks of this node's threads, and requests other nodes to discard what they manage.
    fn take_blocks(&mut self) -> Result<(), End> {
        let me = self.driver.me;
        loop {
            let own = self
                .discarding
                .requests
                .iter()
                .filter(|request| request.requester == me)
                .count();
            if own + self.discarding.asked >= BLOCKS_MAX {
                return Ok(());
            }
            let Some(block) = self.driver.mailbox.take() else {
                return Ok(());
            };
            let manager = |page| self.engine.manager(Page(self.driver.region.striped(page))).0;
            let Some(first) = block.pages().next().map(manager) else {
                self.driver.mailbox.ended(0);
                continue;
            };
            let mut part = Block { mask: 0, ..block };
            for page in block.pages().filter(|page| manager(*page) == first) {
                part.mask |= block.bit(page);
            }
            if part != block {
                let mask = block.mask & !part.mask;
                self.driver.mailbox.put_back(Block { mask, ..block });
            }
            if first == me {
                self.begin(part, me);
                continue;
            }
            self.discarding.asked += 1;
            let frame = frame(DriverKind::Discard, part, me);
            self.driver.post(usize::from(first), &frame, None, false);
            self.check()?;
        }
    }

    /// Begins some pages of a request. Returns the rest of the step's budget.
    fn step(&mut self, index: usize, mut left: u32, now: u64) -> Result<u32, End> {
        let DiscardRequest { block, until_ns, .. } = self.discarding.requests[index];
        let mask = self.discarding.requests[index].todo;
        let todo = Block { mask, ..block };
        let mut begun = 0;
        for page in todo.pages() {
            if left == 0 {
                break;
            }
            if begun & todo.bit(page) != 0 {
                continue;
            }
            let run = self.alone_from(page, todo, left);
            if !run.is_empty() {
                left -= run.len() as u32;
                // One call for the run is cheaper than restricting each page.
                self.driver.free(run.clone());
                self.driver.freed = run.clone();
                for page in run {
                    begun |= todo.bit(page);
                    let striped = Page(self.driver.region.striped(page));
                    self.run_event(|engine, effects| engine.discard(striped, effects));
                }
                self.driver.freed = 0..0;
                continue;
            }
            left = left.saturating_sub(ALONE);
            if self.driver.is_taken(page) {
                begun |= todo.bit(page);
                continue;
            }
            if let Some(hold) = self.driver.want(page) {
                self.release_or_keep(hold, now);
            }
            let striped = Page(self.driver.region.striped(page));
            match self.run_event(|engine, effects| engine.discard(striped, effects)) {
                DiscardOutcome::Done => begun |= todo.bit(page),
                DiscardOutcome::Pending => {
                    begun |= todo.bit(page);
                    self.discarding.requests[index].waiting |= todo.bit(page);
                }
                DiscardOutcome::InUse if now < until_ns => {}
                DiscardOutcome::InUse => begun |= todo.bit(page),
            }
        }
        self.discarding.requests[index].todo &= !begun;
        self.check()?;
        Ok(left)
    }

    /// Returns the run of pages from this one on that can be discarded at once.
    fn alone_from(&self, page: u32, todo: Block, most: u32) -> Range<u32> {
        let goes = |page: &u32| {
            let striped = Page(self.driver.region.striped(*page));
            todo.mask & todo.bit(*page) != 0 && !self.driver.is_taken(*page) && self.engine.is_alone(striped)
        };
        let length = (page..page + most).take_while(goes).count();
        page..page + length as u32
    }

    /// Ends the requests that are complete, and reports them to all nodes.
    fn finish(&mut self) -> Result<(), End> {
        while let Some(page) = self.driver.forgotten.pop() {
            for request in &mut self.discarding.requests {
                let bit = request.block.bit(page) & request.block.mask;
                request.done |= bit;
                request.waiting &= !bit;
            }
        }
        let requests = &mut self.discarding.requests;
        let Some(index) = requests
            .iter()
            .position(|request| request.todo | request.waiting == 0)
        else {
            return Ok(());
        };
        let Some(request) = requests.remove(index) else {
            return Ok(());
        };
        let DiscardRequest { requester, block, .. } = request;
        let done = Block {
            mask: request.done,
            ..block
        };
        // The bytes of a page that is about to be merged are valid elsewhere.
        let mut gone = Block { mask: 0, ..block };
        for page in done.pages().filter(|page| !self.driver.is_taken(*page)) {
            gone.mask |= block.bit(page);
        }
        if requester == self.driver.me {
            self.driver.mailbox.ended(request.done.count_ones());
        }
        let frame = frame(DriverKind::Discarded, gone, requester);
        for node in 0..self.driver.peers.links.len() {
            let is_receiver = gone.mask != 0 || node == usize::from(requester);
            if node != usize::from(self.driver.me) && is_receiver {
                self.driver.post(node, &frame, None, false);
            }
        }
        self.check()?;
        self.finish()
    }

    /// Frees the memory of pages of which this node has no valid bytes.
    fn free_absent(&mut self, block: Block) {
        let region = self.driver.region.clone();
        let engine = &self.engine;
        let is_absent =
            |page| region.mapped(page) == Right::None && engine.is_absent(Page(region.striped(page)));
        for run in block.runs(is_absent) {
            self.driver.free(run);
        }
    }
}

/// Encodes a frame about a block.
pub(crate) fn frame(kind: DriverKind, block: Block, requester: u16) -> Frame {
    let mut frame = driver_frame(kind, block.first);
    frame[REQUESTER_AT] = requester as u8;
    frame[MASK_AT..].copy_from_slice(&block.mask.to_le_bytes());
    frame
}

/// Decodes the block of a frame.
pub(crate) fn block_of(frame: &Frame) -> Block {
    let mut mask = [0; 8];
    mask.copy_from_slice(&frame[MASK_AT..]);
    Block {
        first: page_of(frame),
        mask: u64::from_le_bytes(mask),
    }
}

#[cfg(test)]
mod tests;
