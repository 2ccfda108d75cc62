//! Pages of one page server within their minimum residency ([`MinResidency`]).

use crate::min_residency::MinResidency;

/// Initial capacity of the list.
const ROOM: usize = 256;

/// The list, in no order: the last entry replaces one that ends.
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
    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the residency at an index.
    pub fn at(&self, index: usize) -> &MinResidency {
        &self.list[index]
    }

    /// Returns the index of a page.
    pub fn index_of(&self, page: u32) -> Option<usize> {
        self.list.iter().position(|one| one.page == page)
    }

    /// Records that another node wants the page at an index.
    pub fn want(&mut self, index: usize) {
        self.list[index].wanted = true;
    }

    /// Begins the residency of a page for a thread with `ran_ns` of CPU time. A page that is wanted already
    /// stays wanted.
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

    /// Ends the residency at an index, to which the last one moves.
    pub fn end(&mut self, index: usize) {
        self.list.swap_remove(index);
    }

    /// Ends the residency of a page, if it has one.
    pub fn end_page(&mut self, page: u32) {
        self.list.retain(|one| one.page != page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_that_arrives_again_stays_wanted_and_is_listed_once() {
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
