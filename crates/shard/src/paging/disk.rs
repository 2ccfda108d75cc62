//! The virtual paging disk: moves pages between the guest's memory and the disk.
//!
//! [`policy::memory::paging_disk`] decides. A whole page of the disk that is written from a whole page of the
//! guest, or read into one, moves by reference where a slot or zeroes stand for it. All other bytes take the
//! way through a buffer, which accesses the guest's memory as any device does: it may cause faults, and holds
//! no lock meanwhile.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use dsm::PAGE_LEN;
use policy::memory::paging_disk::{Fetch, PagingDisk, Put};
use policy::memory::resident_set::WRITE_CLUSTER_PAGES;
use serde_json::{Value, json};

use super::cursor::SegmentCursor;
use super::store::PageBuffer;
use super::{Paging, State};
use page::PAGE_BYTES;

/// Greatest number of pages that one call moves: 256 KiB. The writer waits for a gap between two calls.
const PART_PAGES: usize = WRITE_CLUSTER_PAGES as usize;
/// Greatest number of pages that one call clears.
const CLEAR_PAGES: u32 = 4096;

/// Pages that moved, since the pager started.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DiskCounters {
    puts: Moves,
    fetches: Moves,
    /// Pages that were read with the request that moved them by reference.
    pub(super) read_at_once: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Moves {
    /// By reference to a slot.
    without_io: u64,
    /// Pages of zeroes.
    zero: u64,
    /// By an access to the paging file.
    with_io: u64,
}

impl Moves {
    fn status(&self) -> Value {
        let Self {
            without_io,
            zero,
            with_io,
        } = self;
        json!({ "without_io": without_io, "zero": zero, "with_io": with_io })
    }
}

impl DiskCounters {
    /// Returns the counters of a disk; null for one without pages.
    pub fn status(&self, disk: &PagingDisk) -> Value {
        if disk.pages() == 0 {
            return Value::Null;
        }
        json!({
            "bytes": u64::from(disk.pages()) * PAGE_BYTES,
            "used_bytes": u64::from(disk.used()) * PAGE_BYTES,
            "writes": self.puts.status(),
            "reads": self.fetches.status(),
            "read_at_once_bytes": self.read_at_once * PAGE_BYTES,
        })
    }
}

/// Access to the virtual paging disk, of the disk's thread. No other code changes the disk's table.
pub struct PagingDiskIo {
    paging: Arc<Paging>,
    buffer: PageBuffer,
    /// A page that was compared.
    scratch: PageBuffer,
    /// Pages of the disk whose bytes are in the buffer, in order.
    copied: Vec<u32>,
    /// Pages of the guest that a request has moved by reference, in order.
    moved: Vec<u32>,
    bytes: u64,
}

impl PagingDiskIo {
    /// Returns the access to a VM's paging disk, if it has one.
    pub fn new(paging: &Arc<Paging>) -> Option<Self> {
        let pages = paging.state().disk.pages();
        (pages > 0).then(|| Self {
            paging: paging.clone(),
            buffer: PageBuffer::new(WRITE_CLUSTER_PAGES),
            scratch: PageBuffer::new(1),
            copied: Vec::with_capacity(PART_PAGES),
            moved: Vec::with_capacity(PART_PAGES),
            bytes: u64::from(pages) * PAGE_BYTES,
        })
    }

    /// Returns the size of the disk in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes to the disk from the front of the rest of `from`, up to 64 pages. The range from `offset` on is
    /// inside the disk. Returns the number of bytes.
    ///
    /// # Errors
    /// If the paging file takes no pages, or its bytes are needed and can't be read. The range has its former
    /// or its new content then, page by page.
    pub fn write(&mut self, offset: u64, from: &mut SegmentCursor<'_>) -> io::Result<u64> {
        self.copied.clear();
        let mut done = 0;
        for _ in 0..PART_PAGES {
            let Some(piece) = Piece::next(offset + done, from.left()) else {
                break;
            };
            let buffer = &mut self.buffer.pages()[self.copied.len()];
            let is_moved = match piece.whole_page(&self.paging, from) {
                Some(page) => self
                    .paging
                    .put(piece.at, page, buffer, &mut self.scratch.pages()[0])?,
                None => Move::Bytes,
            };
            match is_moved {
                Move::Done => from.skip(PAGE_LEN),
                Move::Copied => {
                    from.skip(PAGE_LEN);
                    self.copied.push(piece.at);
                }
                Move::Bytes => {
                    if !piece.is_whole() {
                        self.paging.load(piece.at, buffer)?;
                    }
                    from.read(&mut buffer[piece.bytes.clone()]);
                    if self.paging.is_new_content(piece.at, buffer) {
                        self.copied.push(piece.at);
                    }
                }
            }
            done += piece.bytes.len() as u64;
        }
        let pages = &mut self.buffer.pages()[..self.copied.len()];
        self.paging.store_pages(&self.copied, pages)?;
        Ok(done)
    }

    /// Reads from the disk into the front of the rest of `into`, up to 64 pages. The range from `offset` on
    /// is inside the disk. Returns the number of bytes. Some of the pages that move by reference are read,
    /// too: the guest is about to touch them, and a fault then takes two switches of threads more.
    ///
    /// # Errors
    /// If the paging file can't be read. A page that can't be removed from memory, or that moved and can't be
    /// read, ends the VM.
    pub fn read(&mut self, offset: u64, into: &mut SegmentCursor<'_>) -> io::Result<u64> {
        let mut done = 0;
        // The page of the guest that the request has moved just before.
        let mut before = None;
        self.moved.clear();
        for _ in 0..PART_PAGES {
            let Some(piece) = Piece::next(offset + done, into.left()) else {
                break;
            };
            let page = piece.whole_page(&self.paging, into);
            let is_moved = match page {
                Some(page) => self.paging.fetch(piece.at, page, before)?,
                None => false,
            };
            before = page;
            if is_moved {
                into.skip(PAGE_LEN);
                self.moved.extend(page);
            } else {
                let buffer = &mut self.buffer.pages()[0];
                self.paging.load(piece.at, buffer)?;
                into.write(&buffer[piece.bytes.clone()]);
            }
            done += piece.bytes.len() as u64;
        }
        let read = self.paging.read_moved(&mut self.moved, self.buffer.pages());
        read.map_err(io::Error::other)?;
        Ok(done)
    }

    /// Makes a front part of a range inside the disk zero: whole pages, up to 16 MiB, or a part of one page.
    /// Returns the number of bytes. Parts of pages stay as they are if `is_discard`.
    ///
    /// # Errors
    /// As [`PagingDiskIo::write`].
    pub fn clear(&mut self, range: Range<u64>, is_discard: bool) -> io::Result<u64> {
        let Some(piece) = Piece::next(range.start, range.end.saturating_sub(range.start)) else {
            return Ok(0);
        };
        if piece.is_whole() {
            // At least one, and the disk has fewer pages than a number has.
            let pages = ((range.end - range.start) / PAGE_BYTES).min(CLEAR_PAGES.into()) as u32;
            self.paging.clear(piece.at..piece.at + pages);
            return Ok(u64::from(pages) * PAGE_BYTES);
        }
        if !is_discard && self.paging.state().disk.slot(piece.at).is_some() {
            let buffer = &mut self.buffer.pages()[..1];
            self.paging.load(piece.at, &mut buffer[0])?;
            buffer[0][piece.bytes.clone()].fill(0);
            if self.paging.is_new_content(piece.at, &buffer[0]) {
                self.paging.store_pages(&[piece.at], buffer)?;
            }
        }
        Ok(piece.bytes.len() as u64)
    }
}

/// The part of a transfer in one page of the disk.
struct Piece {
    /// Page of the disk.
    at: u32,
    /// Bytes of the page.
    bytes: Range<usize>,
}

impl Piece {
    /// Returns the piece at `offset` of a transfer of which `left` bytes are left, if there are any.
    fn next(offset: u64, left: u64) -> Option<Self> {
        let start = offset % PAGE_BYTES;
        let end = start.saturating_add(left).min(PAGE_BYTES);
        (start < end).then_some(Self {
            // The disk has fewer pages than a number has, and the range is inside it.
            at: (offset / PAGE_BYTES) as u32,
            bytes: start as usize..end as usize,
        })
    }

    fn is_whole(&self) -> bool {
        self.bytes.len() == PAGE_LEN
    }

    /// Returns the guest's page that is the next memory of a transfer, if both pages are whole.
    fn whole_page(&self, paging: &Paging, memory: &SegmentCursor<'_>) -> Option<u32> {
        let address = self.is_whole().then(|| memory.whole_page())??;
        paging.memory.page_at(address)
    }
}

/// Outcome of a write of a page of the guest.
enum Move {
    /// The disk has it.
    Done,
    /// Its bytes are in the buffer.
    Copied,
    /// Its bytes have to be accessed.
    Bytes,
}

impl Paging {
    /// Writes a page of the guest to the disk: by reference, or by a copy of its bytes in `buffer`. The bytes
    /// of `scratch` are undefined afterwards.
    fn put(
        &self,
        at: u32,
        page: u32,
        buffer: &mut [u8; PAGE_LEN],
        scratch: &mut [u8; PAGE_LEN],
    ) -> io::Result<Move> {
        let mut state = self.state();
        let State {
            set,
            slots,
            seals,
            disk,
            counters,
            ..
        } = &mut *state;
        match disk.put(at, page, set, slots) {
            Put::Zero => counters.disk.puts.zero += 1,
            Put::Shared => counters.disk.puts.without_io += 1,
            Put::Copy => {
                // The memory's file has the page as long as the lock is held. No fault is caused, so a page
                // with a second chance keeps its place.
                self.memory.read(page, buffer)?;
                if is_zero(buffer) {
                    disk.set(at, None, slots);
                    counters.disk.puts.zero += 1;
                    return Ok(Move::Done);
                }
                // A page that was read back may have the content of its former slot still. One of an image
                // is not compared: that may take I/O, for which the lock is not held.
                let former = set
                    .slot(page)
                    .filter(|slot| slots.images().place(*slot).is_none());
                let former = match former {
                    Some(slot) if self.store.is_content(slot, &seals.get(slot), buffer, scratch)? => {
                        Some(slot)
                    }
                    _ => None,
                };
                if !former.is_some_and(|slot| disk.share(at, slot, slots)) {
                    return Ok(Move::Copied);
                }
                counters.disk.puts.without_io += 1;
            }
            Put::ReadAndCopy => return Ok(Move::Bytes),
        }
        Ok(Move::Done)
    }

    /// Reads a page of the disk into a page of the guest by reference. A read of page `before` may bring it
    /// too from then on. Returns false if its bytes have to be accessed.
    fn fetch(&self, at: u32, page: u32, before: Option<u32>) -> io::Result<bool> {
        let mut state = self.state();
        let State {
            set,
            slots,
            disk,
            counters,
            ..
        } = &mut *state;
        let remove = match disk.fetch(at, page, set, slots) {
            Fetch::Zero { remove } => {
                counters.disk.fetches.zero += 1;
                remove
            }
            Fetch::Shared { remove } => {
                counters.disk.fetches.without_io += 1;
                remove
            }
            Fetch::Copy => return Ok(false),
        };
        if let Some(before) = before {
            set.link(before, page);
        }
        if remove {
            // Under the same lock: a touch that comes now is answered after the removal.
            self.remove(page..page + 1)?;
        }
        Ok(true)
    }

    /// Reads the bytes of a page of the disk.
    fn load(&self, at: u32, buffer: &mut [u8; PAGE_LEN]) -> io::Result<()> {
        let state = self.state();
        let Some(slot) = state.disk.slot(at) else {
            drop(state);
            buffer.fill(0);
            return Ok(());
        };
        // The disk's reference keeps the slot: only this thread changes the disk's table.
        let seal = state.seals.get(slot);
        drop(state);
        let read = self.store.read(slot, &[seal], std::slice::from_mut(buffer));
        read.map_err(io::Error::other)?;
        let mut state = self.state();
        state.counters.read_pages += 1;
        state.counters.disk.fetches.with_io += 1;
        Ok(())
    }

    /// Returns whether bytes have to be written for a page of the disk; a page of zeroes becomes one at once.
    fn is_new_content(&self, at: u32, bytes: &[u8; PAGE_LEN]) -> bool {
        if !is_zero(bytes) {
            return true;
        }
        let mut state = self.state();
        let State {
            slots,
            disk,
            counters,
            ..
        } = &mut *state;
        disk.set(at, None, slots);
        counters.disk.puts.zero += 1;
        false
    }

    /// Writes the bytes of pages of the disk into new slots.
    fn store_pages(&self, at: &[u32], pages: &mut [[u8; PAGE_LEN]]) -> io::Result<()> {
        let mut done = 0;
        while done < at.len() {
            let written = self.write_slots(&mut pages[done..]);
            let mut state = self.state();
            let run = written.inspect_err(|_| {
                state.counters.refused += 1;
                // The next request may find room.
                state.stop_keeping_slots();
            })?;
            let State {
                slots,
                disk,
                counters,
                ..
            } = &mut *state;
            counters.disk.puts.with_io += run.len() as u64;
            for (at, slot) in at[done..].iter().zip(run.clone()) {
                disk.set(*at, Some(slot), slots);
            }
            done += run.len();
        }
        Ok(())
    }

    /// Makes pages of the disk zero.
    fn clear(&self, pages: Range<u32>) {
        let mut state = self.state();
        let State { slots, disk, .. } = &mut *state;
        for at in pages {
            disk.set(at, None, slots);
        }
    }
}

fn is_zero(bytes: &[u8; PAGE_LEN]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}
