//! Random events of a cluster: VMs come and go; cells lend one another memory, die, hang and are slow; hosts
//! die or are cut off, from each other or from etcd.

use registry::cluster::interface::{AdmitVm, CellRequest, VmShare};

use crate::chance::Chance;
use crate::machine::Cells;
use crate::trace::Violation;
use crate::world::{Counts, Fault, World};
use crate::{MILLISECOND, SECOND, Time};

/// Frequencies of the events of a story.
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    /// Number of events.
    pub steps: u32,
    /// One event in this number is a cell's death; none if 0. The following fields are alike.
    pub death_once_in: u64,
    /// A cell hangs for up to 5 s.
    pub hang_once_in: u64,
    /// A fault of hosts, the network or a cell's speed.
    pub fault_once_in: u64,
    /// A loan, or its return.
    pub loan_once_in: u64,
    /// A cordon, or the end of one.
    pub cordon_once_in: u64,
    /// A VM lists the cells that it may depend on: the one that it is requested in and another.
    pub list_once_in: u64,
    /// Number of names of VMs; few names make many claims on one.
    pub names: u64,
    /// Longest time between two events.
    pub pause_max: Time,
    /// Longest duration of a fault.
    pub fault_max: Time,
}

impl Plot {
    /// Many events at once, with faults.
    pub const ROUGH: Self = Self {
        steps: 300,
        death_once_in: 20,
        hang_once_in: 60,
        fault_once_in: 30,
        loan_once_in: 5,
        cordon_once_in: 0,
        list_once_in: 0,
        names: 40,
        pause_max: 20 * MILLISECOND,
        fault_max: 10 * SECOND,
    };
    /// Faults last longer than a lease, so that names of lost hosts are given again.
    pub const LONG: Self = Self {
        steps: 150,
        pause_max: 400 * MILLISECOND,
        fault_max: 18 * SECOND,
        fault_once_in: 12,
        names: 12,
        ..Self::ROUGH
    };
    /// As [`Self::ROUGH`], with cordons.
    pub const CORDONS: Self = Self {
        cordon_once_in: 10,
        ..Self::ROUGH
    };
    /// As [`Self::ROUGH`], without loans by command, and with VMs that depend on few cells.
    pub const LISTS: Self = Self {
        loan_once_in: 0,
        list_once_in: 3,
        ..Self::ROUGH
    };
    /// Story without faults of cells, hosts or the network.
    pub const CALM: Self = Self {
        steps: 2000,
        death_once_in: 0,
        hang_once_in: 0,
        fault_once_in: 0,
        loan_once_in: 0,
        cordon_once_in: 0,
        list_once_in: 0,
        names: u64::MAX,
        pause_max: MILLISECOND,
        fault_max: 0,
    };
}

/// Runs one story.
///
/// # Errors
/// The rule that does not hold and the steps before it.
pub fn run_story(cells: &Cells, plot: &Plot, seed: u64) -> Result<Counts, Violation> {
    play(World::new(cells.clone(), Chance::new(!seed)), plot, seed).or_else(|_| {
        // Again, with a record of the steps.
        let mut world = World::new(cells.clone(), Chance::new(!seed));
        world.trace();
        play(world, plot, seed)
    })
}

fn play(mut world: World, plot: &Plot, seed: u64) -> Result<Counts, Violation> {
    let mut chance = Chance::new(seed);
    world.run(SECOND)?;
    let numbers: Vec<u16> = world.numbers().collect();
    for _ in 0..plot.steps {
        let Some(number) = chance.one_of(&numbers) else {
            break;
        };
        let befalls = |chance: &mut Chance, once_in| once_in > 0 && chance.once_in(once_in);
        if befalls(&mut chance, plot.death_once_in) {
            // Occasionally it is gone for a long time.
            let pause = if chance.once_in(3) {
                8 * SECOND
            } else {
                20 * MILLISECOND
            };
            let pause = chance.below(pause);
            world.kill(number, pause);
        } else if befalls(&mut chance, plot.hang_once_in) {
            world.hang(number, chance.below(5 * SECOND));
        } else if befalls(&mut chance, plot.fault_once_in) {
            let (fault, time) = fault(&world, &mut chance, number, plot.fault_max);
            // A cut is often one in both directions.
            if let Fault::Cut(from, to) = fault
                && !chance.once_in(3)
            {
                world.inject(Fault::Cut(to, from), time);
            }
            world.inject(fault, time);
        } else if befalls(&mut chance, plot.loan_once_in) {
            let other = chance.one_of(&numbers).unwrap_or(number);
            let bytes = (1 + chance.below(32)) << 31;
            let ask = if chance.once_in(2) {
                CellRequest::Lend { to: other, bytes }
            } else {
                CellRequest::Reclaim { from: other, bytes }
            };
            world.command(number, ask);
        } else if befalls(&mut chance, plot.cordon_once_in) {
            let cordoned = chance.once_in(2);
            world.command(number, CellRequest::Cordon { cordoned });
        } else if chance.once_in(3) {
            if let Some(client) = chance.one_of(&world.running()) {
                world.end(client);
            }
        } else {
            let mut cells = Vec::new();
            if befalls(&mut chance, plot.list_once_in) {
                cells.push(number);
                cells.extend(chance.one_of(&numbers).filter(|other| *other != number));
            }
            let name = format!("vm{}", chance.below(plot.names));
            let share = VmShare {
                vcpus: 1 + chance.below(4) as u32,
                memory_bytes: (1 + chance.below(16)) << 28,
                ..VmShare::default()
            };
            let host = AdmitVm {
                only: chance.once_in(4).then_some(number),
                cells,
                ..AdmitVm::new(name, share)
            };
            world.ask_for_place(number, host);
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

/// A random fault, and its duration.
fn fault(world: &World, chance: &mut Chance, number: u16, longest: Time) -> (Fault, Time) {
    let hosts: Vec<u16> = world.hosts().collect();
    let host = chance.one_of(&hosts).unwrap_or(0);
    let others: Vec<u16> = world.hosts().filter(|other| *other != host).collect();
    let other = chance.one_of(&others).unwrap_or(host);
    let long = chance.once_in(2);
    let time = 10 * MILLISECOND + chance.below(if long { longest } else { 400 * MILLISECOND });
    let kind = if others.is_empty() { 5 } else { chance.below(8) };
    let fault = match kind {
        0..3 => Fault::Cut(host, other),
        3 => Fault::CutOff(host),
        4 => Fault::NoEtcd,
        5 => Fault::Slow(number, 10 + chance.below(990)),
        6 => Fault::Delay(host, other, chance.below(150 * MILLISECOND)),
        _ => Fault::Down(host),
    };
    (fault, time)
}

#[cfg(test)]
mod tests {
    use knowledge::{Base, fact};

    use super::*;

    fn machine(facts: &str) -> Base {
        fact::parse(facts).unwrap().into_iter().collect()
    }

    const TWO: &str = include_str!("../../knowledge/machines/two-sockets.facts");
    const EIGHT: &str = include_str!("../../knowledge/machines/eight-nodes.facts");
    const SIXTY_FOUR: &str = include_str!("../../knowledge/machines/sixty-four-nodes.facts");

    #[track_caller]
    fn all_end_well(facts: &str, plot: &Plot, seeds: std::ops::Range<u64>) -> Counts {
        all(&Cells::of(&machine(facts), None).unwrap(), plot, seeds)
    }

    #[track_caller]
    fn all(cells: &Cells, plot: &Plot, seeds: std::ops::Range<u64>) -> Counts {
        let mut all = Counts::default();
        for seed in seeds {
            match run_story(cells, plot, seed) {
                Ok(counts) => {
                    all.hosted += counts.hosted;
                    all.refused += counts.refused;
                    all.borrowing += counts.borrowing;
                    all.requested += counts.requested;
                    all.passes += counts.passes;
                    all.loans += counts.loans;
                    all.deaths += counts.deaths;
                    all.cordons += counts.cordons;
                    all.stopped += counts.stopped;
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

    /// No byte is promised twice, whichever cell dies, hangs or is cut off while it borrows, lends or
    /// recalls, and at rest all passes have ended.
    #[test]
    fn cells_that_borrow_by_themselves_end_well() {
        let mut all_counts = Counts::default();
        for (facts, hosts, seeds) in [(TWO, 1, 100), (TWO, 2, 25), (EIGHT, 1, 30), (EIGHT, 3, 20)] {
            let cells = Cells::of(&machine(facts), None).unwrap().on_hosts(hosts);
            for plot in [&Plot::ROUGH, &Plot::LISTS] {
                let counts = all(&cells.clone().that_borrow(), plot, 0..seeds);
                all_counts.requested += counts.requested;
                all_counts.passes += counts.passes;
                all_counts.borrowing += counts.borrowing;
            }
        }
        assert!(
            all_counts.requested > 500 && all_counts.passes > 500 && all_counts.borrowing > 500,
            "{all_counts:?}"
        );
    }

    /// [`World`] checks the rule at each step: a cordoned cell gets no VM that was requested after the
    /// cordon.
    #[test]
    fn cordoned_cells_take_no_vm_whatever_dies_or_is_cut_off() {
        let counts = all_end_well(TWO, &Plot::CORDONS, 0..100);
        assert!(counts.hosted > 500 && counts.cordons > 500, "{counts:?}");
        for (facts, hosts, seeds) in [(TWO, 2, 100), (EIGHT, 1, 20), (EIGHT, 3, 20)] {
            let cells = Cells::of(&machine(facts), None).unwrap().on_hosts(hosts);
            all(&cells, &Plot::CORDONS, 0..seeds);
        }
    }

    /// A cell that starts reports a VM that has ended, while its name is claimed anew.
    #[test]
    fn a_name_that_was_won_is_not_given_up_with_the_last_vm_of_that_name() {
        all_end_well(TWO, &Plot::ROUGH, 779..780);
    }

    #[test]
    fn rough_stories_of_hosts_end_well() {
        for (facts, hosts, seeds) in [
            (TWO, 2, 300),
            (EIGHT, 3, 100),
            (EIGHT, 8, 100),
            (SIXTY_FOUR, 8, 1),
        ] {
            let cells = Cells::of(&machine(facts), None).unwrap().on_hosts(hosts);
            all(&cells, &Plot::ROUGH, 0..seeds);
        }
    }

    /// No name is given while a VM of that name runs anywhere, which [`World`] holds at each step.
    #[test]
    fn no_name_runs_twice_where_vms_of_lost_hosts_stop() {
        let mut counts = Counts::default();
        for (facts, hosts, seeds) in [(TWO, 2, 150), (EIGHT, 3, 50), (EIGHT, 8, 25)] {
            let cells = Cells::of(&machine(facts), None).unwrap().on_hosts(hosts);
            let all = all(&cells.that_stop(), &Plot::LONG, 0..seeds);
            counts.hosted += all.hosted;
            counts.stopped += all.stopped;
        }
        assert!(counts.hosted > 1000 && counts.stopped > 30, "{counts:?}");
    }

    /// `docs/guide/clusters.md` describes the faults that these seeds once found.
    #[test]
    fn stories_that_ended_badly_once_end_well() {
        for (facts, hosts, seed) in [
            (TWO, 1, 290),
            (TWO, 2, 275),
            (TWO, 2, 597),
            (TWO, 2, 5332),
            (EIGHT, 4, 155),
            (EIGHT, 4, 259),
            (EIGHT, 4, 1332),
        ] {
            let cells = Cells::of(&machine(facts), None).unwrap().on_hosts(hosts);
            all(&cells, &Plot::ROUGH, seed..seed + 1);
        }
    }

    #[test]
    fn on_calm_days_every_vm_has_its_place() {
        let counts = all_end_well(SIXTY_FOUR, &Plot::CALM, 0..1);
        assert!(counts.hosted > 1000, "{counts:?}");
    }

    #[test]
    fn the_same_seed_tells_the_same_story() {
        let cells = Cells::of(&machine(EIGHT), None).unwrap();
        let [first, second] = [7, 7].map(|seed| run_story(&cells, &Plot::ROUGH, seed).unwrap());
        assert_eq!(
            (first.messages, first.waits_ns),
            (second.messages, second.waits_ns)
        );
    }
}
