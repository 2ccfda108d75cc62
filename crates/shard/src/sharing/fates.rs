//! Outcome of the last read of each guest page that can't be shared, for `mem --explain`.
//!
//! A byte for each page, in memory that the host gives only where a byte is set.

use std::ops::Range;

/// Reason why a page that a read of an image filled is no copy that can be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Fate {
    /// The page was found changed.
    Overwritten = 1,
    /// The image's page was no longer in the page cache.
    Cold = 2,
    /// The bytes are not a whole page of the image in a whole page of the guest.
    Unaligned = 3,
}

/// The fates of a VM's pages, by page number.
#[derive(Debug, Default)]
pub(super) struct Fates(Vec<u8>);

impl Fates {
    /// Creates the record of the pages below `end`, without any.
    pub fn up_to(end: u64) -> Self {
        // A zeroed allocation of this length is a mapping, which takes memory where it is written.
        Self(vec![0; usize::try_from(end).unwrap_or(0)])
    }

    /// Records the fate of a page.
    pub fn set(&mut self, page: u64, fate: Fate) {
        if let Some(entry) = usize::try_from(page).ok().and_then(|page| self.0.get_mut(page)) {
            *entry = fate as u8;
        }
    }

    /// Removes the records of some pages, without a write where there are none.
    pub fn clear(&mut self, range: Range<u64>) {
        let end = usize::try_from(range.end).unwrap_or(usize::MAX).min(self.0.len());
        let start = usize::try_from(range.start).unwrap_or(usize::MAX).min(end);
        for entry in self.0[start..end].iter_mut().filter(|entry| **entry != 0) {
            *entry = 0;
        }
    }

    /// Returns the fate of a page, if one is recorded.
    pub fn get(&self, page: u64) -> Option<Fate> {
        let entry = self.0.get(usize::try_from(page).ok()?)?;
        [Fate::Overwritten, Fate::Cold, Fate::Unaligned]
            .into_iter()
            .find(|fate| *fate as u8 == *entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fate_stays_until_its_page_is_cleared_and_pages_beyond_the_end_have_none() {
        let mut fates = Fates::up_to(10);
        for (page, fate) in [
            (0, Fate::Cold),
            (9, Fate::Unaligned),
            (10, Fate::Cold),
            (u64::MAX, Fate::Cold),
        ] {
            fates.set(page, fate);
        }
        fates.set(5, Fate::Unaligned);
        fates.set(5, Fate::Overwritten);
        let found = |fates: &Fates| -> Vec<_> {
            (0..12)
                .filter_map(|page| Some((page, fates.get(page)?)))
                .collect()
        };
        assert_eq!(
            found(&fates),
            [(0, Fate::Cold), (5, Fate::Overwritten), (9, Fate::Unaligned)]
        );
        fates.clear(1..9);
        assert_eq!(found(&fates), [(0, Fate::Cold), (9, Fate::Unaligned)]);
        fates.clear(9..u64::MAX);
        fates.clear(20..30);
        assert_eq!(found(&fates), [(0, Fate::Cold)]);
    }
}
