//! Hierarchical bitmap of used slots. The first free slot from any place on is found in a few steps, however
//! many slots are used, and however they are spread.

const WORD_BITS: u32 = u64::BITS;

/// Bits of used slots. A word of a level has a bit for each of 64 words of the level below it, set while that
/// word has no clear bit.
#[derive(Debug)]
pub(super) struct SlotBitmap {
    /// The first level has a bit for each slot.
    levels: Vec<Vec<u64>>,
    capacity: u32,
}

impl SlotBitmap {
    /// Creates the bitmap of `capacity` free slots. Its memory is touched when slots are used.
    pub fn new(capacity: u32) -> Self {
        let mut levels = Vec::new();
        let mut bits = capacity;
        loop {
            let words = bits.div_ceil(WORD_BITS);
            levels.push(vec![0; words as usize]);
            if words <= 1 {
                return Self { levels, capacity };
            }
            bits = words;
        }
    }

    /// Records that a slot is used.
    pub fn set(&mut self, slot: u32) {
        let mut at = slot;
        for level in &mut self.levels {
            let word = &mut level[(at / WORD_BITS) as usize];
            *word |= 1 << (at % WORD_BITS);
            if *word != u64::MAX {
                return;
            }
            at /= WORD_BITS;
        }
    }

    /// Records that a slot is free.
    pub fn clear(&mut self, slot: u32) {
        let mut at = slot;
        for level in &mut self.levels {
            let word = &mut level[(at / WORD_BITS) as usize];
            let was_full = *word == u64::MAX;
            *word &= !(1 << (at % WORD_BITS));
            if !was_full {
                return;
            }
            at /= WORD_BITS;
        }
    }

    /// Returns the first free slot from `at` on.
    pub fn next_free(&self, mut at: u32) -> Option<u32> {
        let mut level = 0;
        loop {
            let word = self.levels.get(level)?.get((at / WORD_BITS) as usize)?;
            let free = !word & (u64::MAX << (at % WORD_BITS));
            if free != 0 {
                at = at / WORD_BITS * WORD_BITS + free.trailing_zeros();
                break;
            }
            at = at / WORD_BITS + 1;
            level += 1;
        }
        // Bits past the end of a level are clear: they lead to no word, or to no slot, and none follows them.
        for words in self.levels[..level].iter().rev() {
            let word = words.get(at as usize)?;
            at = at * WORD_BITS + (!word).trailing_zeros();
        }
        (at < self.capacity).then_some(at)
    }

    /// Returns the number of free slots side by side from `start` on, at most `most`.
    pub fn free_run(&self, start: u32, most: u32) -> u32 {
        let limit = start.saturating_add(most).min(self.capacity);
        let mut end = start;
        while end < limit {
            let word = self.levels[0][(end / WORD_BITS) as usize];
            let used = word & (u64::MAX << (end % WORD_BITS));
            if used != 0 {
                end = end / WORD_BITS * WORD_BITS + used.trailing_zeros();
                break;
            }
            end = (end / WORD_BITS * WORD_BITS).saturating_add(WORD_BITS);
        }
        end.min(limit).saturating_sub(start)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn free_slot_is_found_behind_many_full_words() {
        let capacity = 64 * 64 * 64 + 5;
        let mut bits = SlotBitmap::new(capacity);
        assert_eq!(bits.levels.len(), 4);
        (0..capacity).for_each(|slot| bits.set(slot));
        assert_eq!(bits.next_free(0), None);
        for slot in [capacity - 1, 64 * 64 * 63, 70] {
            bits.clear(slot);
            assert_eq!(bits.next_free(0), Some(slot));
        }
        assert_eq!(bits.next_free(71), Some(64 * 64 * 63));
        assert_eq!(bits.next_free(64 * 64 * 63 + 1), Some(capacity - 1));
        assert_eq!(bits.next_free(capacity), None);
        assert_eq!(bits.next_free(u32::MAX), None);
        assert_eq!(SlotBitmap::new(0).next_free(0), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn bitmap_agrees_with_a_set(
            capacity in 1_u32..9000,
            steps in prop::collection::vec((any::<bool>(), 0_u32..9000, 1_u32..6000), 1..60),
        ) {
            let mut bits = SlotBitmap::new(capacity);
            let mut used = BTreeSet::new();
            for (is_used, start, count) in steps {
                for slot in start..(start + count).min(capacity) {
                    match is_used {
                        true => { bits.set(slot); used.insert(slot); }
                        false => { bits.clear(slot); used.remove(&slot); }
                    }
                }
                for at in [0, start, count, capacity - 1] {
                    let free = (at..capacity).find(|slot| !used.contains(slot));
                    prop_assert_eq!(bits.next_free(at), free);
                    if let Some(free) = free {
                        let run = (free..capacity).take_while(|slot| !used.contains(slot)).count() as u32;
                        prop_assert_eq!(bits.free_run(free, count), run.min(count));
                        prop_assert_eq!(bits.free_run(free, u32::MAX), run);
                    }
                }
            }
        }
    }
}
