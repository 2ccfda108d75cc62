//! Pages that move most often.

use std::sync::atomic::{AtomicU32, Ordering};

/// Number of times that each page, or the right to write it, came to this node.
#[derive(Debug)]
pub struct Heat(Vec<AtomicU32>);

impl Heat {
    /// Creates the counters of `pages` pages.
    pub fn new(pages: u32) -> Self {
        Self((0..pages).map(|_| AtomicU32::new(0)).collect())
    }

    /// Counts an arrival of a page. Returns its count.
    pub fn record(&self, page: u32) -> u32 {
        self.0[page as usize]
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_add(1)
    }

    /// Returns at most `count` pages and their counts, the highest count first.
    pub fn hottest(&self, count: usize) -> Vec<(u32, u32)> {
        let times = |(page, times): (u32, &AtomicU32)| (page, times.load(Ordering::Relaxed));
        let mut pages: Vec<_> = (0..)
            .zip(&self.0)
            .map(times)
            .filter(|(_, times)| *times > 0)
            .collect();
        pages.sort_unstable_by_key(|&(page, times)| (std::cmp::Reverse(times), page));
        pages.truncate(count);
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hottest_pages_are_sorted_by_count_without_cold_ones() {
        let heat = Heat::new(8);
        for page in [5, 2, 5, 7, 5, 7, 0] {
            heat.record(page);
        }
        assert_eq!(heat.hottest(3), [(5, 3), (7, 2), (0, 1)]);
        assert_eq!(heat.hottest(9).len(), 4);
    }
}
