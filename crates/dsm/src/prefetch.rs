//! Which pages to ask for before anybody wants them, as plain decisions, by the faults that one lane sees.
//!
//! Who reads page after page will read the next ones. A page that is here gives no sign of its use, so the sign is the end of the
//! *window*, the pages that were asked for last: a fault in its second half, before they have come, or just beyond it says that the
//! stream goes on, and the next window is twice as long. A fault elsewhere begins a stream, of which nothing is asked for until its
//! second page is read; that is what reads at random cost. (With the third, runs of four pages were slower and cost more.) This is how
//! kernels read files ahead (Linux, `mm/readahead.c`).
//!
//! A window is cut to half for each of its pages that the other node declines, or takes away before the stream has passed it; at nothing the
//! stream rests for some faults, longer each time. Pages that others took a short while ago are left out: they would come and go.
//! There is no clock; what has been is counted in faults and takes.

mod write;

use std::ops::Range;

pub use write::WritePrefetcher;

/// The longest window, pages: 64 KiB, of which half at most came for nothing when a stream ends. Not chosen by a measurement.
pub const WINDOW_MAX: u32 = 16;
/// The first window, pages.
const WINDOW_FIRST: u32 = 2;
/// Streams that are followed at once; the one that went on longest ago makes room.
const STREAMS: usize = 8;
/// Pages in a row that may be here already without the stream's end.
const GAP: u32 = 8;
/// Faults of a stream for which it rests, at first and at most.
const REST: Range<u32> = 8..64;
/// Taken pages that are remembered, and for how many faults and takes.
const TAKEN: usize = 64;
const TAKEN_FOR: u32 = 32;

/// What a lane's faults have shown.
#[derive(Clone, Debug)]
pub struct ReadPrefetcher {
    streams: [Stream; STREAMS],
    /// The last page that was taken of those with this remainder, and when.
    taken: [(u32, u32); TAKEN],
    /// Faults and takes so far.
    now: u32,
}

/// Pages that are read one after the other.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The fault at which it went on last.
    start: u32,
    /// The first page that it has not asked for.
    next: u32,
    window: u32,
    /// Faults until it asks again.
    rests: u32,
    /// For how many it rests next time.
    rest: u32,
    seen: u32,
}

impl Stream {
    fn at(page: u32, seen: u32) -> Self {
        Self {
            start: page,
            next: page + 1,
            window: 0,
            rests: 0,
            rest: REST.start,
            seen,
        }
    }

    /// Whether a fault is within it, or just beyond.
    fn has(&self, page: u32, is_here: &impl Fn(u32) -> bool) -> bool {
        (self.start..self.next).contains(&page)
            || (self.next..=self.next.saturating_add(GAP)).contains(&page) && (self.next..page).all(is_here)
    }

    /// A page of the window was of no use.
    fn cut(&mut self, page: u32) {
        if page <= self.start || page >= self.next || self.window == 0 {
            return;
        }
        self.window /= 2;
        if self.window == 0 {
            self.rests = self.rest;
            self.rest = (2 * self.rest).min(REST.end);
        }
    }
}

impl Default for ReadPrefetcher {
    fn default() -> Self {
        Self {
            streams: [Stream::at(u32::MAX - 1, 0); STREAMS],
            taken: [(u32::MAX, 0); TAKEN],
            now: 0,
        }
    }
}

impl ReadPrefetcher {
    /// A thread waits to read a page that another node has: the pages to ask for beside it, [`WINDOW_MAX`] at most, all after it and before
    /// `end`. Those of which [`ReadPrefetcher::was_invalidated_lately`] says so are better left out. `is_here` is whether a page can be read here.
    pub fn on_read_fault(&mut self, page: u32, end: u32, is_here: impl Fn(u32) -> bool) -> Range<u32> {
        self.now = self.now.wrapping_add(1);
        let now = self.now;
        let Some(stream) = self.streams.iter_mut().find(|stream| stream.has(page, &is_here)) else {
            let oldest = self
                .streams
                .iter_mut()
                .max_by_key(|stream| now.wrapping_sub(stream.seen));
            if let Some(oldest) = oldest {
                *oldest = Stream::at(page, now);
            }
            return page..page;
        };
        stream.seen = now;
        let asked = stream.next - stream.start - 1;
        if page < stream.next - asked / 2 && page < stream.next {
            return page..page;
        }
        let first = stream.next.max(page + 1);
        (stream.start, stream.next) = (page, first);
        if stream.rests > 0 {
            stream.rests -= 1;
            return first..first;
        }
        if stream.window > WINDOW_FIRST {
            stream.rest = REST.start;
        }
        stream.window = (2 * stream.window).clamp(WINDOW_FIRST, WINDOW_MAX);
        let last = page.saturating_add(1 + stream.window).min(end);
        stream.next = last.max(first);
        first..stream.next
    }

    /// A page that was asked for does not come.
    pub fn on_nack(&mut self, page: u32) {
        self.streams.iter_mut().for_each(|stream| stream.cut(page));
    }

    /// Another node takes a page away, to write it.
    pub fn on_invalidation(&mut self, page: u32) {
        self.now = self.now.wrapping_add(1);
        self.taken[page as usize % TAKEN] = (page, self.now);
        self.on_nack(page);
    }

    /// Whether a page was taken a short while ago.
    pub fn was_invalidated_lately(&self, page: u32) -> bool {
        let (taken, when) = self.taken[page as usize % TAKEN];
        taken == page && self.now.wrapping_sub(when) < TAKEN_FOR
    }
}

#[cfg(test)]
mod tests;
