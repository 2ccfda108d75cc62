//! Random numbers, from a seed.

/// Random numbers by Marsaglia's xorshift64*, the same for the same seed.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// A generator; the same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number from 0 to `bound` - 1; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % bound.max(1)
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// A random element of `all`.
    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> Option<T> {
        let index = usize::try_from(self.below(all.len() as u64)).ok()?;
        all.get(index).copied()
    }
}
