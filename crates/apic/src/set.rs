//! A set of the numbers 0 to 255: vectors, and vCPUs.

use serde::{Deserialize, Serialize};

/// 256 bits; bit n is set if n is in the set.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub(crate) struct Set([u64; 4]);

impl Set {
    pub fn insert(&mut self, number: u8) {
        self.0[usize::from(number >> 6)] |= 1 << (number & 63);
    }

    pub fn remove(&mut self, number: u8) {
        self.0[usize::from(number >> 6)] &= !(1 << (number & 63));
    }

    pub fn contains(&self, number: u8) -> bool {
        self.0[usize::from(number >> 6)] >> (number & 63) & 1 == 1
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub fn highest(&self) -> Option<u8> {
        let word = (0..4).rev().find(|&word| self.0[word] != 0)?;
        Some((word as u8) << 6 | self.0[word].ilog2() as u8)
    }

    /// The numbers from 32 × `place` on, as bits; `place` is taken modulo 8.
    pub fn bits_32(&self, place: u32) -> u32 {
        (self.0[place as usize / 2 % 4] >> (32 * (place % 2))) as u32
    }

    /// Iterates in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u8> + use<> {
        (0..).zip(self.0).flat_map(|(word, mut bits): (u8, u64)| {
            std::iter::from_fn(move || {
                let lowest = (bits != 0).then(|| word << 6 | bits.trailing_zeros() as u8);
                bits &= bits.wrapping_sub(1);
                lowest
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn set_matches_a_btree_set(changes in prop::collection::vec((any::<bool>(), any::<u8>()), 0..300)) {
            let (mut set, mut plain) = (Set::default(), BTreeSet::new());
            for (is_in, number) in changes {
                if is_in {
                    set.insert(number);
                    plain.insert(number);
                } else {
                    set.remove(number);
                    plain.remove(&number);
                }
                prop_assert_eq!(set.highest(), plain.last().copied());
                prop_assert_eq!(set.is_empty(), plain.is_empty());
            }
            prop_assert!(set.iter().eq(plain.iter().copied()));
            for number in 0..=u8::MAX {
                let word = set.bits_32(u32::from(number) / 32);
                prop_assert_eq!(word >> (number % 32) & 1 == 1, plain.contains(&number));
            }
        }
    }
}
