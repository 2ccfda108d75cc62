//! Sets of CPUs.

use super::CpuId;

/// Greatest number of CPUs of a machine.
pub const CPUS_MAX: usize = 1024;

/// Set of CPUs, one bit each.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CpuSet([u64; CPUS_MAX / 64]);

impl Default for CpuSet {
    fn default() -> Self {
        Self([0; CPUS_MAX / 64])
    }
}

impl CpuSet {
    /// All CPUs that a machine may have.
    pub const ALL: Self = Self([u64::MAX; CPUS_MAX / 64]);

    /// Adds a CPU. Returns whether it was absent; a number of [`CPUS_MAX`] or more is not added.
    pub fn insert(&mut self, cpu: CpuId) -> bool {
        let Some(word) = self.0.get_mut(cpu.index() / 64) else {
            return false;
        };
        let bit = 1 << (cpu.0 % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Whether the set has the CPU.
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.0
            .get(cpu.index() / 64)
            .is_some_and(|word| word >> (cpu.0 % 64) & 1 == 1)
    }

    /// CPUs of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let mut both = *self;
        for (word, other) in both.0.iter_mut().zip(other.0) {
            *word &= other;
        }
        both
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set has no CPU.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = CpuId> + '_ {
        (0..CPUS_MAX as u16).map(CpuId).filter(|cpu| self.contains(*cpu))
    }
}

impl FromIterator<CpuId> for CpuSet {
    fn from_iter<I: IntoIterator<Item = CpuId>>(cpus: I) -> Self {
        let mut set = Self::default();
        for cpu in cpus {
            set.insert(cpu);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_has_the_inserted_cpus_and_no_others() {
        let cpus = [0, 63, 64, 1023].map(CpuId);
        let mut set: CpuSet = cpus.into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), cpus);
        assert!(!set.insert(CpuId(63)) && set.insert(CpuId(62)) && !set.insert(CpuId(1024)));
        assert_eq!(
            (set.len(), set.contains(CpuId(1024)), set.is_empty()),
            (5, false, false)
        );
        let other: CpuSet = [1, 62].map(CpuId).into_iter().collect();
        assert_eq!(set.intersection(&other).iter().collect::<Vec<_>>(), [CpuId(62)]);
        assert_eq!(CpuSet::ALL.len(), CPUS_MAX);
    }
}
