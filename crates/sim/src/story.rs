//! What befalls a cluster, by chance: VMs come and go, cells lend one another memory, die and hang.

use cell::cluster::interface::{Ask, Host, VmShare};

use crate::chance::Chance;
use crate::machine::Cells;
use crate::world::{Counts, World};
use crate::{MILLISECOND, SECOND, Time};

/// How much of what.
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    /// Things that happen.
    pub steps: u32,
    /// One in so many is a cell's death; none if 0.
    pub death_once_in: u64,
    /// One in so many is a cell's hanging for up to 5 s; none if 0.
    pub hang_once_in: u64,
    /// One in so many is a loan, or its return; none if 0.
    pub loan_once_in: u64,
    /// Names that VMs are given; few make many claims on one name.
    pub names: u64,
    /// Between two things, at most.
    pub pause_max: Time,
}

impl Plot {
    /// Much happens at once, and goes wrong.
    pub const ROUGH: Self = Self {
        steps: 300,
        death_once_in: 20,
        hang_once_in: 60,
        loan_once_in: 5,
        names: 40,
        pause_max: 20 * MILLISECOND,
    };
    /// Nothing goes wrong.
    pub const CALM: Self = Self {
        steps: 2000,
        death_once_in: 0,
        hang_once_in: 0,
        loan_once_in: 0,
        names: u64::MAX,
        pause_max: MILLISECOND,
    };
}

/// Tells one story.
///
/// # Errors
/// With what does not hold and how it came to that.
pub fn tell(cells: &Cells, plot: &Plot, seed: u64) -> Result<Counts, String> {
    play(World::new(cells.clone(), Chance::new(!seed)), plot, seed).or_else(|_| {
        // Once more, and remember.
        let mut world = World::new(cells.clone(), Chance::new(!seed));
        world.trace();
        play(world, plot, seed)
    })
}

fn play(mut world: World, plot: &Plot, seed: u64) -> Result<Counts, String> {
    let mut chance = Chance::new(seed);
    world.run(SECOND)?;
    let numbers: Vec<u16> = world.numbers().collect();
    for _ in 0..plot.steps {
        let Some(number) = chance.one_of(&numbers) else {
            break;
        };
        let befalls = |chance: &mut Chance, once_in| once_in > 0 && chance.once_in(once_in);
        if befalls(&mut chance, plot.death_once_in) {
            // Now and then it is gone for long.
            let pause = if chance.once_in(3) {
                8 * SECOND
            } else {
                20 * MILLISECOND
            };
            let pause = chance.below(pause);
            world.kill(number, pause);
        } else if befalls(&mut chance, plot.hang_once_in) {
            world.hang(number, chance.below(5 * SECOND));
        } else if befalls(&mut chance, plot.loan_once_in) {
            let other = chance.one_of(&numbers).unwrap_or(number);
            let bytes = (1 + chance.below(32)) << 31;
            let ask = if chance.once_in(2) {
                Ask::Lend { to: other, bytes }
            } else {
                Ask::Reclaim { from: other, bytes }
            };
            world.command(number, ask);
        } else if chance.once_in(3) {
            if let Some(client) = chance.one_of(&world.running()) {
                world.end(client);
            }
        } else {
            let host = Host {
                name: format!("vm{}", chance.below(plot.names)),
                share: VmShare {
                    vcpus: 1 + chance.below(4) as u32,
                    memory_bytes: (1 + chance.below(16)) << 28,
                },
                only: chance.once_in(4).then_some(number),
                sent: false,
                runs: false,
                borrowed: Vec::new(),
            };
            world.ask(number, host);
        }
        let pause = if chance.once_in(4) {
            0
        } else {
            chance.below(plot.pause_max)
        };
        world.run(world.now() + pause)?;
    }
    world.rest()?;
    Ok(world.counts)
}

#[cfg(test)]
mod tests {
    use knowledge::{Base, Machine, fact};

    use super::*;

    fn machine(facts: &str) -> Machine {
        let base: Base = fact::parse(facts).unwrap().into_iter().collect();
        Machine::of(&base)
    }

    const TWO: &str = include_str!("../../knowledge/machines/two-sockets.facts");
    const EIGHT: &str = include_str!("../../knowledge/machines/eight-nodes.facts");
    const SIXTY_FOUR: &str = include_str!("../../knowledge/machines/sixty-four-nodes.facts");

    #[track_caller]
    fn all_end_well(facts: &str, plot: &Plot, seeds: std::ops::Range<u64>) -> Counts {
        let cells = Cells::of(&machine(facts), None).unwrap();
        let mut all = Counts::default();
        for seed in seeds {
            match tell(&cells, plot, seed) {
                Ok(counts) => {
                    all.hosted += counts.hosted;
                    all.refused += counts.refused;
                    all.borrowing += counts.borrowing;
                    all.loans += counts.loans;
                    all.deaths += counts.deaths;
                }
                Err(trace) => panic!("{trace}\nseed {seed}"),
            }
        }
        all
    }

    #[test]
    fn rough_stories_end_well() {
        let counts = all_end_well(TWO, &Plot::ROUGH, 0..300);
        assert!(
            counts.hosted > 1000 && counts.refused > 1000 && counts.deaths > 1000,
            "{counts:?}"
        );
        assert!(counts.loans > 100 && counts.borrowing > 100, "{counts:?}");
        all_end_well(EIGHT, &Plot::ROUGH, 0..100);
        all_end_well(SIXTY_FOUR, &Plot::ROUGH, 0..3);
    }

    #[test]
    fn on_calm_days_every_vm_has_its_place() {
        let counts = all_end_well(SIXTY_FOUR, &Plot::CALM, 0..1);
        assert!(counts.hosted > 1000, "{counts:?}");
    }

    #[test]
    fn the_same_seed_tells_the_same_story() {
        let cells = Cells::of(&machine(EIGHT), None).unwrap();
        let [first, second] = [7, 7].map(|seed| tell(&cells, &Plot::ROUGH, seed).unwrap());
        assert_eq!(
            (first.messages, first.waits_ns),
            (second.messages, second.waits_ns)
        );
    }
}
