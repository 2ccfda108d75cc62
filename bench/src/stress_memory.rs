//! The program stressMem (Cellular Disco, SOSP '99, section 6): it writes a unique number on each page of a
//! large array, and loops again to check each. Here each loop has a pseudo-random order of its own, so that
//! no read-ahead guesses the next page.

use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4096;
/// Words of a page.
const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();

/// Pages of an array in a pseudo-random order, each once.
#[derive(Debug)]
struct PageOrder {
    pages: usize,
    /// Sequence of all numbers below a power of two; those that are no page are left out.
    mask: usize,
    state: usize,
    /// Numbers of the sequence that have not been visited.
    left: usize,
}

impl PageOrder {
    /// Order of the loop with this number.
    fn new(pages: usize, number: usize) -> Self {
        let numbers = pages.next_power_of_two();
        Self {
            pages,
            mask: numbers - 1,
            state: number.wrapping_mul(0x9e37_79b9) & (numbers - 1),
            left: numbers,
        }
    }
}

impl Iterator for PageOrder {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        while let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            // A congruential generator of full period (Hull and Dobell), then a mixture that can be undone.
            self.state = self.state.wrapping_mul(0x19_660d).wrapping_add(0x3c6e_f35f) & self.mask;
            let half = self.mask.count_ones().div_ceil(2);
            let mixed = (self.state ^ (self.state >> half)).wrapping_mul(0x2c1b_3c6d) & self.mask;
            let page = mixed ^ (mixed >> half);
            if page < self.pages {
                return Some(page);
            }
        }
        None
    }
}

/// An array whose pages are written and checked.
#[derive(Debug)]
pub struct StressMemory {
    words: Vec<u64>,
    loops: usize,
}

impl StressMemory {
    /// An array that no loop has touched. The first of `loops` writes, the last one checks, those between do
    /// both.
    pub fn new(bytes: usize, loops: usize) -> Self {
        Self {
            words: vec![0; bytes / PAGE_BYTES * PAGE_WORDS],
            loops,
        }
    }

    /// Runs all loops; returns the time of each.
    ///
    /// # Errors
    /// If a page does not have the number that was written there.
    pub fn run(&mut self) -> Result<Vec<Duration>, String> {
        (0..self.loops).map(|number| self.run_loop(number)).collect()
    }

    fn run_loop(&mut self, number: usize) -> Result<Duration, String> {
        let start = Instant::now();
        for page in PageOrder::new(self.words.len() / PAGE_WORDS, number) {
            let word = &mut self.words[page * PAGE_WORDS];
            let unique = |number: usize| ((number as u64) << 40) | page as u64;
            if number > 0 && *word != unique(number) {
                return Err(format!(
                    "page {page} has the number {word:#x} in loop {number}, not {:#x}",
                    unique(number)
                ));
            }
            if number + 1 < self.loops {
                *word = unique(number + 1);
            }
        }
        Ok(start.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_loop_visits_each_page_once_in_an_order_of_its_own() {
        for pages in [1, 2, 3, 64, 1000, 24_576] {
            let orders: Vec<Vec<usize>> = (0..3)
                .map(|number| PageOrder::new(pages, number).collect())
                .collect();
            for order in &orders {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert!(sorted.into_iter().eq(0..pages), "{pages} pages: {order:?}");
            }
            assert!(pages < 64 || (orders[0] != orders[1] && orders[1] != orders[2]));
        }
    }

    #[test]
    fn page_is_seldom_followed_by_its_neighbour() {
        let order: Vec<usize> = PageOrder::new(24_576, 1).collect();
        let near = order.windows(2).filter(|two| two[0].abs_diff(two[1]) <= 8);
        assert!(near.count() < 24_576 / 100);
    }

    #[test]
    fn last_loop_checks_the_numbers_of_the_loop_before() {
        let mut memory = StressMemory::new(100 * PAGE_BYTES, 3);
        assert_eq!(memory.run().unwrap().len(), 3);
        assert_eq!(memory.words[7 * PAGE_WORDS], (2 << 40) | 7);
        memory.words[7 * PAGE_WORDS] ^= 1;
        let error = memory.run_loop(2).unwrap_err();
        assert_eq!(
            error,
            "page 7 has the number 0x20000000006 in loop 2, not 0x20000000007"
        );
    }
}
