//! Seeded random numbers for randomized tests.

/// Splitmix-seeded xorshift64*.
pub struct Rng(u64);

impl Rng {
    /// Creates a generator. Equal seeds give equal sequences.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a number from 0 to `bound` - 1.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    /// Returns a random element; `None` if there is none.
    pub fn one_of<T: Copy>(&mut self, mut all: impl ExactSizeIterator<Item = T>) -> Option<T> {
        let count = all.len();
        (count > 0).then(|| all.nth(self.below(count)).expect("in bounds"))
    }
}
