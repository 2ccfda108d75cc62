//! A table in memory, as a database's buffer pool: random pages are read, and some are updated.

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;
/// Words of a page: its number, the number of its updates, and data.
const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();
const NUMBER: usize = 0;
const UPDATES: usize = 1;
const DATA: usize = 2;
/// One of so many operations updates its page.
const UPDATE_INTERVAL: u64 = 4;

/// Which pages are used, and what for.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Percentage of the operations on the first half of the table; 50 is uniform.
    pub hot_percent: usize,
    /// Number of times that an operation reads its page.
    pub passes: usize,
}

/// Pages with their numbers.
#[derive(Debug)]
pub struct Table {
    words: Vec<u64>,
    random: u64,
    /// Number of updates so far.
    updates: u64,
    /// Combination of all that was read, so that it is read.
    read: u64,
}

impl Table {
    /// A table of so many bytes, all of them written.
    pub fn new(bytes: usize) -> Self {
        let pages = (bytes / PAGE_BYTES).max(2);
        let mut words = vec![0; pages * PAGE_WORDS];
        for (number, page) in words.chunks_exact_mut(PAGE_WORDS).enumerate() {
            page.fill(number as u64);
            page[UPDATES] = 0;
        }
        Self {
            words,
            random: 0x9e37_79b9_7f4a_7c15,
            updates: 0,
            read: 0,
        }
    }

    /// Runs operations.
    ///
    /// # Errors
    /// If a page is not the one that was stored there.
    pub fn work(&mut self, operations: usize, access: Access) -> Result<(), String> {
        for _ in 0..operations {
            let number = self.choose(access);
            let updates = (self.random >> 32).is_multiple_of(UPDATE_INTERVAL);
            let page = &mut self.words[number * PAGE_WORDS..][..PAGE_WORDS];
            if page[NUMBER] != number as u64 {
                return Err(format!("page {number} has the number {}", page[NUMBER]));
            }
            for _ in 0..access.passes {
                for word in &page[DATA..] {
                    self.read = (self.read ^ word).wrapping_mul(0x100_0000_01b3);
                }
            }
            if updates {
                page[UPDATES] += 1;
                self.updates += 1;
            }
        }
        std::hint::black_box(self.read);
        Ok(())
    }

    /// Checks that each update is in the table.
    ///
    /// # Errors
    /// If one is missing.
    pub fn check(&self) -> Result<(), String> {
        let pages = self.words.chunks_exact(PAGE_WORDS);
        let found: u64 = pages.map(|page| page[UPDATES]).sum();
        match found == self.updates {
            true => Ok(()),
            false => Err(format!("{found} updates are in the table, of {}", self.updates)),
        }
    }

    /// The next page.
    fn choose(&mut self, access: Access) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let pages = self.words.len() / PAGE_WORDS;
        let half = pages / 2;
        let is_hot = (self.random % 100) < access.hot_percent as u64;
        // Other bits than those of the percentage.
        let within = (self.random >> 7) as usize;
        match is_hot {
            true => within % half,
            false => half + within % (pages - half),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFORM: Access = Access {
        hot_percent: 50,
        passes: 1,
    };

    fn used(table: &Table) -> Vec<usize> {
        let pages = table.words.chunks_exact(PAGE_WORDS);
        let used = pages.enumerate().filter(|(_, page)| page[UPDATES] > 0);
        used.map(|(number, _)| number).collect()
    }

    #[test]
    fn uniform_accesses_update_all_pages() {
        let mut table = Table::new(64 * PAGE_BYTES);
        table.work(10_000, UNIFORM).unwrap();
        assert_eq!(used(&table).len(), 64);
        assert!((2000..3000).contains(&table.updates), "{}", table.updates);
        table.check().unwrap();
    }

    #[test]
    fn hot_accesses_use_the_first_half() {
        let mut table = Table::new(64 * PAGE_BYTES);
        let hot = Access {
            hot_percent: 100,
            passes: 1,
        };
        table.work(10_000, hot).unwrap();
        assert_eq!(used(&table), (0..32).collect::<Vec<_>>());
    }

    #[test]
    fn lost_update_and_foreign_page_are_noticed() {
        let mut table = Table::new(8 * PAGE_BYTES);
        table.work(1000, UNIFORM).unwrap();
        table.words[3 * PAGE_WORDS + UPDATES] -= 1;
        assert!(table.check().unwrap_err().contains("updates are in the table"));
        table.words[3 * PAGE_WORDS + NUMBER] = 4;
        assert_eq!(table.work(1000, UNIFORM).unwrap_err(), "page 3 has the number 4");
    }
}
