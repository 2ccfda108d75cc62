//! INIT and start-up interrupts to one vCPU, in the order in which they were sent.
//!
//! They take different ways when the vCPU moves meanwhile, and a start-up that overtook its INIT would be ignored. So the home
//! numbers them, and here the numbers are put in order again. An INIT makes what came before it meaningless, so it waits for
//! nothing, and what is held is bounded whatever the guest sends.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The vCPU that sent an INIT, and waits until it is done.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Waiter {
    /// Which.
    pub vcpu: u8,
    /// The shard where it waits, and so doesn't leave.
    pub shard: u8,
}

/// One of them.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Startup {
    /// Reset, and wait.
    Init {
        /// Who is told when it is done.
        from: Option<Waiter>,
    },
    /// Start in real mode at this page.
    Start {
        /// The page's number.
        page: u8,
    },
}

/// How many are held that wait for earlier ones.
const HELD_MAX: usize = 64;

/// Those that came and were not taken.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Startups {
    /// Everything up to this number is done or meaningless. Numbers start at 1.
    done: u64,
    held: BTreeMap<u64, Startup>,
}

impl Startups {
    /// One has come.
    pub fn insert(&mut self, number: u64, startup: Startup) {
        if number <= self.done {
            return;
        }
        if matches!(startup, Startup::Init { .. }) {
            self.held.retain(|held, _| *held > number);
            self.done = number - 1;
        } else if self.held.len() >= HELD_MAX {
            // Only a guest that sends dozens at once to a CPU gets here. The next INIT mends it.
            return;
        }
        self.held.insert(number, startup);
    }

    /// Those that came elsewhere after these.
    pub fn join(&mut self, others: Self) {
        // What is done there need not be waited for here.
        if others.done > self.done {
            self.done = others.done;
            self.held.retain(|number, _| *number > others.done);
        }
        for (number, startup) in others.held {
            self.insert(number, startup);
        }
    }

    /// The next, if it is here.
    pub fn take(&mut self) -> Option<Startup> {
        let startup = self.held.remove(&(self.done + 1))?;
        self.done += 1;
        Some(startup)
    }

    /// All, to send on.
    pub fn drain(&mut self) -> impl Iterator<Item = (u64, Startup)> + use<> {
        std::mem::take(&mut self.held).into_iter()
    }

    /// Whether none is held.
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
        /// Whatever the order of arrival: what is taken is in the order of sending, from the last INIT on nothing is missing,
        /// and nothing comes twice.
        #[test]
        fn startups_are_taken_in_sending_order_from_the_last_init(sent in prop::collection::vec(startup(), 1..40), seed in any::<u64>()) {
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
