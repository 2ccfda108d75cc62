//! Owner of each vCPU, the shard that runs it, by the records of one shard.
//!
//! Each move of a vCPU gives it a version higher by one, which its new owner reports to all other shards. A
//! shard without that report sends to the previous owner, which forwards. So no message is lost, however
//! stale a table is.

use std::sync::atomic::{AtomicU64, Ordering};

/// The shard that owns a vCPU, and the number of its moves.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Owner {
    /// Index of the shard.
    pub shard: u8,
    /// Moves so far.
    pub version: u64,
}

const SHARD_BITS: u32 = 8;

impl Owner {
    fn word(self) -> u64 {
        self.version << SHARD_BITS | u64::from(self.shard)
    }

    fn of(word: u64) -> Self {
        Self {
            shard: word as u8,
            version: word >> SHARD_BITS,
        }
    }
}

/// Table of the owners of all vCPUs. Readers take no lock.
#[derive(Debug)]
pub struct OwnerTable(Vec<AtomicU64>);

impl OwnerTable {
    /// Returns the table at the start of the VM, from the shard of each vCPU.
    pub fn new(shards: &[u8]) -> Self {
        let word = |shard: &u8| {
            AtomicU64::new(
                Owner {
                    shard: *shard,
                    version: 0,
                }
                .word(),
            )
        };
        Self(shards.iter().map(word).collect())
    }

    /// Returns the number of vCPUs.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the owner of a vCPU by the records of this shard.
    pub fn of(&self, vcpu: u8) -> Option<Owner> {
        let word = self.0.get(usize::from(vcpu))?;
        Some(Owner::of(word.load(Ordering::Acquire)))
    }

    /// Updates the owner of a vCPU, unless the table has a later version.
    pub fn update(&self, vcpu: u8, owner: Owner) {
        if let Some(word) = self.0.get(usize::from(vcpu)) {
            // The version is in the upper bits, so the later of two is the larger.
            word.fetch_max(owner.word(), Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_owner_update_is_ignored() {
        let owners = OwnerTable::new(&[0, 1]);
        let at = |shard, version| Owner { shard, version };
        owners.update(1, at(0, 2));
        owners.update(1, at(3, 1));
        owners.update(9, at(3, 1));
        assert_eq!(owners.of(1), Some(at(0, 2)));
        assert_eq!(owners.of(0), Some(at(0, 0)));
        assert_eq!(owners.of(2), None);
    }
}
