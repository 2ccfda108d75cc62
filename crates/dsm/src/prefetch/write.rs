//! Prefetching of zero pages for a thread that fills pages which another node manages and no node has
//! written.
//!
//! Only the manager knows whether the next page is zero. So the sign is the previous page: it arrived as a
//! zero page. Two such pages in a row begin a stream, as in [`ReadPrefetcher`]. A page that arrives with
//! bytes was another node's, and halves the window.

use std::ops::Range;

use super::{ReadPrefetcher, STREAMS, WINDOW_MAX};

/// Number of zero pages remembered, more than two windows.
const FRESH: usize = 4 * WINDOW_MAX as usize;
/// Largest number of pending requests: a window of each stream.
const ASKED: usize = STREAMS * WINDOW_MAX as usize;

/// State of the detection.
#[derive(Clone, Debug)]
pub struct WritePrefetcher {
    streams: ReadPrefetcher,
    /// For each remainder, the page that arrived last as a zero page.
    fresh: [u32; FRESH],
    /// Prefetched pages that have not arrived.
    asked: Vec<u32>,
}

impl Default for WritePrefetcher {
    fn default() -> Self {
        Self {
            streams: ReadPrefetcher::default(),
            fresh: [u32::MAX; FRESH],
            asked: Vec::with_capacity(ASKED),
        }
    }
}

impl WritePrefetcher {
    /// Records a write fault of a page that is not here. Returns the pages to prefetch, as
    /// [`ReadPrefetcher::on_read_fault`].
    pub fn on_write_fault(&mut self, page: u32, end: u32, is_here: impl Fn(u32) -> bool) -> Range<u32> {
        let previous_arrived_zero = page
            .checked_sub(1)
            .is_some_and(|before| self.arrived_zero(before));
        if previous_arrived_zero {
            self.streams.on_read_fault(page, end, is_here)
        } else {
            page..page
        }
    }

    /// Records a prefetch request.
    pub fn on_request(&mut self, page: u32) {
        self.asked.push(page);
    }

    /// Records a page that arrived for writing. Returns whether it was prefetched.
    pub fn on_arrival(&mut self, page: u32, is_fresh: bool) -> bool {
        if is_fresh {
            self.fresh[page as usize % FRESH] = page;
        } else {
            self.streams.on_nack(page);
        }
        let asked = self.asked.iter().position(|asked| *asked == page);
        asked.map(|at| self.asked.swap_remove(at)).is_some()
    }

    /// Records an invalidation of a page by another node.
    pub fn on_invalidation(&mut self, page: u32) {
        self.streams.on_nack(page);
    }

    fn arrived_zero(&self, page: u32) -> bool {
        self.fresh[page as usize % FRESH] == page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 1 << 20;

    /// Writes pages in order, of which those in `fresh` are zero. Returns the number of stalls, and the
    /// prefetched pages that were not zero.
    fn fill(pages: Range<u32>, fresh: &Range<u32>) -> (usize, Vec<u32>) {
        let (mut fills, mut here, mut waited, mut stolen) =
            (WritePrefetcher::default(), Vec::new(), 0, Vec::new());
        for page in pages {
            if here.contains(&page) {
                continue;
            }
            waited += 1;
            let more = fills.on_write_fault(page, END, |page| here.contains(&page));
            for page in more.clone() {
                fills.on_request(page);
            }
            assert!(
                !fills.on_arrival(page, fresh.contains(&page)),
                "a thread wanted it"
            );
            here.push(page);
            for page in more {
                assert!(fills.on_arrival(page, fresh.contains(&page)));
                if !fresh.contains(&page) {
                    stolen.push(page);
                }
                here.push(page);
            }
        }
        assert!(fills.asked.is_empty());
        (waited, stolen)
    }

    #[test]
    fn writer_of_zero_pages_stalls_once_for_each_window() {
        let (waited, stolen) = fill(100..100 + 512, &(0..END));
        assert!(waited <= 3 + 4 + 512 / WINDOW_MAX as usize, "{waited}");
        assert!(stolen.is_empty());
    }

    #[test]
    fn pages_with_contents_are_not_prefetched_for_writing() {
        assert_eq!(fill(100..300, &(0..0)), (200, vec![]));
    }

    #[test]
    fn at_most_one_window_is_prefetched_past_zero_pages() {
        let (_, stolen) = fill(100..400, &(100..228));
        assert!(stolen.len() <= WINDOW_MAX as usize, "{stolen:?}");
        assert!(stolen.iter().all(|page| *page < 228 + WINDOW_MAX), "{stolen:?}");
    }

    #[test]
    fn zero_page_starts_a_stream_only_at_its_successor() {
        let mut fills = WritePrefetcher::default();
        fills.on_arrival(7, true);
        assert_eq!(fills.on_write_fault(9, END, |_| false), 9..9);
        assert_eq!(
            fills.on_write_fault(8 + FRESH as u32, END, |_| false).len(),
            0,
            "the same remainder"
        );
        assert_eq!(fills.on_write_fault(0, END, |_| false), 0..0);
    }

    #[test]
    fn write_prefetch_is_bounded_by_the_window_and_the_end() {
        const LAST: u32 = 50;
        for seed in 0..200 {
            let (mut fills, mut random) = (WritePrefetcher::default(), fastrand::Rng::with_seed(seed));
            for _ in 0..200 {
                let page = random.u32(0..64);
                let more = fills.on_write_fault(page, LAST, |_| false);
                assert!(more.len() <= WINDOW_MAX as usize, "seed {seed}: {more:?}");
                assert!(
                    more.is_empty() || more.start > page && more.end <= LAST,
                    "seed {seed}: {more:?}"
                );
                fills.on_arrival(page, random.bool());
            }
        }
    }
}
