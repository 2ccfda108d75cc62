//! The pages that have come and stay for a while ([`MinResidency`]), of one lane.

use crate::min_residency::MinResidency;

/// Pages that stay without the list having to grow.
const ROOM: usize = 256;

/// The list, in no order: a page that goes leaves its place to the last one.
#[derive(Debug)]
pub struct Residencies {
    list: Vec<MinResidency>,
    random: fastrand::Rng,
}

impl Default for Residencies {
    fn default() -> Self {
        Self {
            list: Vec::with_capacity(ROOM),
            random: fastrand::Rng::new(),
        }
    }
}

impl Residencies {
    /// How many pages stay.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The one at that place of the list.
    pub fn at(&self, index: usize) -> &MinResidency {
        &self.list[index]
    }

    /// Where a page is in the list.
    pub fn index_of(&self, page: u32) -> Option<usize> {
        self.list.iter().position(|one| one.page == page)
    }

    /// Notes that another node wants the page at that place.
    pub fn want(&mut self, index: usize) {
        self.list[index].wanted = true;
    }

    /// A page has come, for a thread that had run so long by then. Another node's wish for it stays.
    pub fn begin(&mut self, page: u32, thread: Option<libc::pid_t>, ran_ns: u64, now_ns: u64, wanted: bool) {
        let mut one = MinResidency::new(page, thread, ran_ns, now_ns, &mut self.random);
        one.wanted = wanted;
        match self.index_of(page) {
            Some(index) => {
                one.wanted |= self.list[index].wanted;
                self.list[index] = one;
            }
            None => self.list.push(one),
        }
    }

    /// Ends the one at that place, to which the last one moves.
    pub fn end(&mut self, index: usize) {
        self.list.swap_remove(index);
    }

    /// Ends a page's, if it has one.
    pub fn end_page(&mut self, page: u32) {
        self.list.retain(|one| one.page != page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_comes_again_stays_wanted_and_is_listed_once() {
        let mut residencies = Residencies::default();
        residencies.begin(3, Some(1), 10, 20, false);
        residencies.begin(4, None, 0, 20, false);
        let index = residencies.index_of(3).unwrap();
        residencies.want(index);
        residencies.begin(3, Some(2), 11, 30, false);
        assert_eq!(residencies.len(), 2);
        let one = residencies.at(residencies.index_of(3).unwrap());
        assert!(one.wanted && one.since_ns == 30 && one.thread == Some(2));
        residencies.end_page(3);
        assert_eq!(
            (residencies.index_of(3), residencies.index_of(4)),
            (None, Some(0))
        );
    }
}
