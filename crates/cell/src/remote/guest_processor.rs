//! The processor that a guest over several hosts finds: the features that all hosts have (CPUID), and the
//! frequency of the home's time-stamp counter. Pure.

use shard_api::cpuid::{Unlike, common};
use shard_api::launch::Leaf;
use shard_api::platform::HostProcessor;
use shard_api::relation::{Apart, Ratio};

/// The guest's processor, and its relation to each host's.
#[derive(Debug)]
pub struct GuestProcessor {
    /// The CPUID leaves of the guest.
    pub leaves: Vec<Leaf>,
    /// Ticks of its counter in a millisecond.
    pub khz: u32,
    /// Whether the kernels of all hosts but the home's take their time from their counters.
    pub is_relied_on: bool,
    /// The factor of each shard's host for its own counter.
    pub ratios: Vec<Ratio>,
}

/// A host whose processor the guest can't use beside the home's.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ProcessorError {
    /// Another frequency of the counter.
    #[error("{place}: {error}; {ALIKE_HELP}")]
    Counter {
        /// Name of the shard.
        place: String,
        /// How the counters differ.
        error: Apart,
    },
    /// A processor without the features that the guest has seen.
    #[error("{place} and the home's host: {error}; {ALIKE_HELP}")]
    Features {
        /// Name of the shard.
        place: String,
        /// How the processors differ.
        error: Unlike,
    },
}

const ALIKE_HELP: &str = "name cells of hosts with processors alike";

impl GuestProcessor {
    /// The guest's processor on the home's host and those of all shards, in their order: the place of each,
    /// and its processor. None stands for the home's.
    ///
    /// # Errors
    /// One line, if the guest would find differences between the hosts.
    pub fn of<'a>(
        home: &HostProcessor,
        shards: impl IntoIterator<Item = Option<(String, &'a HostProcessor)>>,
    ) -> Result<Self, ProcessorError> {
        let mut all = Self {
            leaves: home.leaves.clone(),
            khz: home.counter.khz,
            is_relied_on: true,
            ratios: Vec::new(),
        };
        for shard in shards {
            let Some((place, host)) = shard else {
                all.ratios.push(Ratio::ONE);
                continue;
            };
            all.is_relied_on &= host.relies_on_counter;
            match Ratio::of(host.counter, all.khz) {
                Ok(ratio) => all.ratios.push(ratio),
                Err(error) => return Err(ProcessorError::Counter { place, error }),
            }
            match common(&all.leaves, &host.leaves) {
                Ok(leaves) => all.leaves = leaves,
                Err(error) => return Err(ProcessorError::Features { place, error }),
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use shard_api::relation::Counter;

    use super::*;

    fn host(khz: u32, digits: Option<u32>, features: u32) -> HostProcessor {
        let leaf = |function, registers| Leaf {
            function,
            registers,
            ..Leaf::default()
        };
        HostProcessor {
            leaves: vec![leaf(0, [1, 2, 3, 4]), leaf(1, [5, 6, features, features])],
            counter: Counter { khz, digits },
            relies_on_counter: digits.is_none(),
        }
    }

    #[test]
    fn the_guest_finds_what_all_have_at_the_homes_frequency() {
        let (home, slow, poor) = (
            host(3_000_000, None, 0b111),
            host(1_500_000, Some(32), 0b110),
            host(3_000_000, None, 0b011),
        );
        let shards = [
            None,
            Some(("cell 1 on host b".to_owned(), &slow)),
            Some(("cell 2 on host c".to_owned(), &poor)),
        ];
        let guest = GuestProcessor::of(&home, shards).unwrap();
        assert_eq!(guest.leaves[1].registers, [5, 6, 0b010, 0b010]);
        assert_eq!(guest.khz, 3_000_000);
        assert!(!guest.is_relied_on, "the slow one does not");
        let both_do = GuestProcessor::of(&home, [None, Some((String::new(), &poor))]).unwrap();
        assert!(both_do.is_relied_on);
        let scaled: Vec<u64> = guest.ratios.iter().map(|ratio| ratio.scaled(10)).collect();
        assert_eq!(scaled, [10, 20, 10]);
    }

    #[test]
    fn the_host_that_does_not_fit_is_named() {
        let home = host(3_000_000, None, 1);
        let refused = |other: HostProcessor| {
            let place = "cell 1 on host b".to_owned();
            GuestProcessor::of(&home, [None, Some((place, &other))])
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            refused(host(2_000_000, None, 1)),
            "cell 1 on host b: its time-stamp counter runs at 2000000 kHz, the home's at 3000000 kHz, and \
             its processor cannot scale it; name cells of hosts with processors alike"
        );
        let mut foreign = host(3_000_000, None, 1);
        foreign.leaves[0].registers[1] = u32::from_le_bytes(*b"Genu");
        let why = refused(foreign);
        assert!(
            why.starts_with("cell 1 on host b and the home's host: their processors differ in their maker"),
            "{why}"
        );
    }
}
