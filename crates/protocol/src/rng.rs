//! Numbers by chance, from a seed, for stories.

/// Splitmix-seeded xorshift64*.
pub struct Rng(u64);

impl Rng {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// From 0 to `bound` - 1.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    /// One of these, if there are any.
    pub fn one_of<T: Copy>(&mut self, mut all: impl ExactSizeIterator<Item = T>) -> Option<T> {
        let count = all.len();
        (count > 0).then(|| all.nth(self.below(count)).expect("in bounds"))
    }
}
