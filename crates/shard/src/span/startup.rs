//! INIT and start-up interrupts to one vCPU, in the order in which they were sent.
//!
//! They take different routes when the vCPU migrates meanwhile, and a start-up interrupt that overtook its
//! INIT would be ignored. So the home numbers them, and the receiver restores the order. An INIT makes
//! earlier ones meaningless, so it waits for none. So the number that is held is bounded whatever the guest
//! sends.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The vCPU that sent an INIT and blocks until its target has reset.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Waiter {
    /// Number of the vCPU.
    pub vcpu: u8,
    /// Shard where it blocks; the vCPU does not leave that shard meanwhile.
    pub shard: u8,
}

/// An INIT or start-up interrupt.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Startup {
    /// Reset, then wait for a start-up interrupt.
    Init {
        /// The vCPU that blocks until the reset, if any.
        from: Option<Waiter>,
    },
    /// Start in real mode at a page.
    Start {
        /// Number of the 4-KiB page.
        page: u8,
    },
}

/// Largest number of start-up interrupts that wait for earlier ones.
const HELD_MAX: usize = 64;

/// INIT and start-up interrupts that have arrived and were not taken.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Startups {
    /// All up to this number were taken or are meaningless. Numbers start at 1.
    done: u64,
    held: BTreeMap<u64, Startup>,
}

impl Startups {
    /// Inserts an interrupt by its number.
    pub fn insert(&mut self, number: u64, startup: Startup) {
        if number <= self.done {
            return;
        }
        if matches!(startup, Startup::Init { .. }) {
            self.held.retain(|held, _| *held > number);
            self.done = number - 1;
        } else if self.held.len() >= HELD_MAX {
            // Only a guest that sends dozens at once to a CPU gets here. The next INIT recovers.
            return;
        }
        self.held.insert(number, startup);
    }

    /// Adds interrupts that arrived in another shard.
    pub fn join(&mut self, others: Self) {
        // Interrupts taken in the other shard are not waited for here.
        if others.done > self.done {
            self.done = others.done;
            self.held.retain(|number, _| *number > others.done);
        }
        for (number, startup) in others.held {
            self.insert(number, startup);
        }
    }

    /// Takes the next interrupt in order, if it has arrived.
    pub fn take(&mut self) -> Option<Startup> {
        let startup = self.held.remove(&(self.done + 1))?;
        self.done += 1;
        Some(startup)
    }

    /// Takes all held interrupts with their numbers, to forward them.
    pub fn drain(&mut self) -> impl Iterator<Item = (u64, Startup)> + use<> {
        std::mem::take(&mut self.held).into_iter()
    }

    /// Returns whether none is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INIT: Startup = Startup::Init { from: None };

    fn startup() -> impl Strategy<Value = Startup> {
        prop_oneof![Just(INIT), (0..4_u8).prop_map(|page| Startup::Start { page }),]
    }

    proptest! {
        /// For every order of arrival, interrupts are taken in the order of sending. From the last INIT on
        /// none is missing, and none is taken twice.
        #[test]
        fn startups_are_taken_in_sending_order_from_the_last_init(
            sent in prop::collection::vec(startup(), 1..40),
            seed in any::<u64>(),
        ) {
            let mut arrivals: Vec<_> = (1_u64..).zip(sent.iter().copied()).collect();
            let mut state = seed;
            for last in (1..arrivals.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                arrivals.swap(last, (state >> 33) as usize % (last + 1));
            }
            let (mut startups, mut taken) = (Startups::default(), Vec::new());
            for (number, startup) in arrivals {
                startups.insert(number, startup);
                while let Some(startup) = startups.take() {
                    taken.push(startup);
                }
            }
            prop_assert!(startups.is_empty());
            let from = sent.iter().rposition(|startup| *startup == INIT).unwrap_or(0);
            prop_assert!(taken.ends_with(&sent[from..]));
            prop_assert!(taken.len() <= sent.len());
        }
    }

    #[test]
    fn startup_flood_is_bounded_and_the_next_init_recovers() {
        let mut startups = Startups::default();
        for number in 2..1000 {
            startups.insert(number, Startup::Start { page: 1 });
        }
        assert!(startups.held.len() <= HELD_MAX);
        assert_eq!(startups.take(), None);
        startups.insert(1000, INIT);
        startups.insert(1001, Startup::Start { page: 7 });
        assert_eq!(startups.take(), Some(INIT));
        assert_eq!(startups.take(), Some(Startup::Start { page: 7 }));
        assert_eq!(startups.take(), None);
    }
}
