//! A bounded set of pages with a byte for each, which allocates nothing once it is made.

use crate::Page;

/// Open addressing with linear steps; at most half full.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct PageSet {
    places: Vec<Option<(Page, u8)>>,
    pages: Vec<Page>,
    limit: usize,
}

impl PageSet {
    /// For so many pages at most.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            places: vec![None; (limit.max(1) * 2).next_power_of_two()],
            pages: Vec::with_capacity(limit),
            limit,
        }
    }

    fn place(&self, page: Page) -> usize {
        let mask = self.places.len() - 1;
        let spread = u64::from(page.0).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let mut place = usize::try_from(spread).expect("32 bits fit") & mask;
        while self.places[place].is_some_and(|(other, _)| other != page) {
            place = (place + 1) & mask;
        }
        place
    }

    /// The byte of a page; 0 if it is not in the set.
    pub(super) fn get(&self, page: Page) -> u8 {
        self.places[self.place(page)].map_or(0, |(_, bits)| bits)
    }

    /// Adds bits to a page's byte. False if there is no room for one more page.
    pub(super) fn add(&mut self, page: Page, bits: u8) -> bool {
        let place = self.place(page);
        match &mut self.places[place] {
            Some((_, had)) => *had |= bits,
            empty => {
                if self.pages.len() == self.limit {
                    return false;
                }
                *empty = Some((page, bits));
                self.pages.push(page);
            }
        }
        true
    }

    /// In the order in which they were added.
    pub(super) fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// Empties it, at the price of what is in it.
    pub(super) fn clear(&mut self) {
        while let Some(page) = self.pages.pop() {
            // Emptied from the last one added: the steps to a page lead over earlier ones only.
            let place = self.place(page);
            self.places[place] = None;
        }
    }
}
