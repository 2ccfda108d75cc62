//! Prefetching of sequential reads, by the faults of one page server. Decisions only.
//!
//! A thread that reads page after page will read the next ones. A resident page shows no use. So the sign is
//! the end of the *window*, the pages requested last: a fault in its second half, before they have arrived,
//! or just beyond it. The stream then goes on, and the next window is twice as long. A fault elsewhere begins
//! a stream, for which nothing is requested until its second page is read; random reads would pay for that.
//! (With the third, runs of four pages were slower and cost more.) Kernels read files ahead in the same way
//! (Linux, `mm/readahead.c`).
//!
//! Each Nack for a page of the window, and each invalidation before the stream has passed it, halves the
//! window. At zero the stream pauses for some faults, longer each time. Pages that were invalidated lately
//! are left out: they would bounce. There is no clock; age is counted in faults and invalidations.

mod write;

use std::ops::Range;

pub use write::WritePrefetcher;

/// Largest window, pages: 64 KiB, of which half at most is wasted when a stream ends. Not chosen by a
/// measurement.
pub const WINDOW_MAX: u32 = 16;
/// First window, pages.
const WINDOW_FIRST: u32 = 2;
/// Number of streams. A new one replaces the one that continued longest ago.
const STREAMS: usize = 8;
/// Successive resident pages that a stream may skip.
const GAP: u32 = 8;
/// Number of a stream's faults for which it pauses, at first and at most.
const REST: Range<u32> = 8..64;
/// Number of invalidations remembered, and for how many faults and invalidations.
const TAKEN: usize = 64;
const TAKEN_FOR: u32 = 32;

/// State of the detection.
#[derive(Clone, Debug)]
pub struct ReadPrefetcher {
    streams: [Stream; STREAMS],
    /// For each remainder, the page invalidated last and the time.
    taken: [(u32, u32); TAKEN],
    /// Faults and invalidations so far.
    now: u32,
}

/// A stream of sequential reads.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// Page of the last fault that continued it.
    start: u32,
    /// First page that is not requested.
    next: u32,
    window: u32,
    /// Faults until it requests pages again.
    rests: u32,
    /// Length of the next pause, faults.
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

    /// Returns whether a fault at the page continues the stream.
    fn has(&self, page: u32, is_here: &impl Fn(u32) -> bool) -> bool {
        (self.start..self.next).contains(&page)
            || (self.next..=self.next.saturating_add(GAP)).contains(&page) && (self.next..page).all(is_here)
    }

    /// Halves the window for a page that was of no use.
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
    /// Records a read fault of a remote page. Returns the pages to prefetch, at most [`WINDOW_MAX`], after
    /// the page and before `end`. The caller leaves out those for which
    /// [`ReadPrefetcher::was_invalidated_lately`] returns true. `is_here` returns whether a page is readable
    /// here.
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

    /// Records a Nack for a prefetched page.
    pub fn on_nack(&mut self, page: u32) {
        self.streams.iter_mut().for_each(|stream| stream.cut(page));
    }

    /// Records an invalidation of a page by another node's write.
    pub fn on_invalidation(&mut self, page: u32) {
        self.now = self.now.wrapping_add(1);
        self.taken[page as usize % TAKEN] = (page, self.now);
        self.on_nack(page);
    }

    /// Returns whether a page was invalidated a short while ago.
    pub fn was_invalidated_lately(&self, page: u32) -> bool {
        let (taken, when) = self.taken[page as usize % TAKEN];
        taken == page && self.now.wrapping_sub(when) < TAKEN_FOR
    }
}

#[cfg(test)]
mod tests;
