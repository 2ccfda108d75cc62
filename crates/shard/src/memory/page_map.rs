//! Which page of a region without holes is where in guest-physical memory, which has some.

use std::ops::Range;

use crate::arch::x86_64::layout::Layout;

const PAGE_BYTES: u64 = 4096;

/// The pages of RAM, counted in the order of their addresses.
#[derive(Clone, Debug)]
pub struct PageMap(Vec<Range<u64>>);

impl PageMap {
    /// Of that memory.
    pub fn new(layout: &Layout) -> Self {
        Self(layout.ram.clone())
    }

    /// How many there are.
    pub fn pages(&self) -> u64 {
        self.0.iter().map(|ram| (ram.end - ram.start) / PAGE_BYTES).sum()
    }

    /// The page of an address; none in a hole.
    pub fn page_of(&self, address: u64) -> Option<u64> {
        let mut before = 0;
        for ram in &self.0 {
            if ram.contains(&address) {
                return Some(before + (address - ram.start) / PAGE_BYTES);
            }
            before += (ram.end - ram.start) / PAGE_BYTES;
        }
        None
    }

    /// The address of a page; none past the last one.
    pub fn address_of(&self, page: u64) -> Option<u64> {
        let mut left = page;
        for ram in &self.0 {
            let pages = (ram.end - ram.start) / PAGE_BYTES;
            if left < pages {
                return Some(ram.start + left * PAGE_BYTES);
            }
            left -= pages;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_over_the_hole_and_found_again() {
        let bytes = (3 << 30) + (64 << 20);
        let layout = Layout::new(bytes, &[]).unwrap();
        let map = PageMap::new(&layout);
        assert_eq!(map.pages(), bytes / PAGE_BYTES);
        let hole = layout.ram[0].end..layout.ram[1].start;
        let below = map.page_of(hole.start - 1).unwrap();
        assert_eq!(map.page_of(hole.end), Some(below + 1));
        assert_eq!([map.page_of(hole.start), map.page_of(hole.end - 1)], [None; 2]);
        assert_eq!(map.page_of(layout.ram[1].end), None);
        for page in [0, 1, below, below + 1, map.pages() - 1] {
            let address = map.address_of(page).unwrap();
            assert_eq!(map.page_of(address + PAGE_BYTES - 1), Some(page));
        }
        assert_eq!(map.address_of(map.pages()), None);
    }
}
