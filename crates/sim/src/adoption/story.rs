//! Random faults of the VMs of a cell, and the rules that hold at the end.

use cell::cluster::adoption_table::Failures;

use super::adopter::REBOOT;
use super::cells::Program;
use super::{Counts, Flaw, Kind, World};
use crate::chance::Chance;
use crate::trace::Violation;
use crate::{MILLISECOND, SECOND, Time};

/// Most VMs of a story.
const VMS_MAX: u64 = 5;
/// Time after which all faults are over: a stopped process is killed, and a trial ends.
const QUIET: Time = 90 * SECOND;

/// Frequencies of the events of a story.
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    /// Number of events.
    pub steps: u32,
    /// Longest time between two of them, ns.
    pub pause_max: Time,
    /// One event in this number is the death of the cell's process; none if 0. The following fields are
    /// alike.
    pub death_once_in: u64,
    /// A process of the cell is stopped, for up to 15 s.
    pub stop_once_in: u64,
    /// The death of a monitor.
    pub monitor_once_in: u64,
    /// An upgrade: of the same version, the next, or the one after that; some crash and some hang.
    pub upgrade_once_in: u64,
    /// A VM whose adoption ends each process of the cell.
    pub poison_once_in: u64,
}

impl Plot {
    /// All kinds of events.
    pub const ROUGH: Self = Self {
        steps: 60,
        pause_max: 2 * SECOND,
        death_once_in: 4,
        stop_once_in: 15,
        monitor_once_in: 10,
        upgrade_once_in: 8,
        poison_once_in: 20,
    };
    /// Processes die while they adopt.
    pub const QUICK: Self = Self {
        steps: 80,
        pause_max: 60 * MILLISECOND,
        stop_once_in: 0,
        monitor_once_in: 20,
        ..Self::ROUGH
    };
    /// The VMs alone end processes.
    pub const POISON: Self = Self {
        steps: 30,
        death_once_in: 0,
        stop_once_in: 0,
        monitor_once_in: 0,
        upgrade_once_in: 0,
        poison_once_in: 4,
        ..Self::ROUGH
    };
}

/// Runs one story.
///
/// # Errors
/// With the rule that does not hold, and the steps that led to it.
pub fn run_story(plot: &Plot, seed: u64, flaw: Option<Flaw>) -> Result<Counts, Violation> {
    play(plot, seed, flaw, false).or_else(|first| match play(plot, seed, flaw, true) {
        Ok(_) => Err(Violation {
            rule: format!(
                "{}; the second time it held, so the story depends on more than its seed",
                first.rule
            ),
            ..first
        }),
        failed => failed,
    })
}

fn play(plot: &Plot, seed: u64, flaw: Option<Flaw>, is_traced: bool) -> Result<Counts, Violation> {
    let mut chance = Chance::new(seed);
    let vms = 1 + chance.below(VMS_MAX) as usize;
    let mut world = World::new(vms, Chance::new(!seed), flaw);
    if is_traced {
        world.trace();
    }
    world.run(chance.below(3 * SECOND))?;
    for _ in 0..plot.steps {
        inject(&mut world, plot, &mut chance, vms);
        world.run(world.now() + chance.below(plot.pause_max))?;
    }
    // The cell dies again, and meets all VMs that end it. Five such VMs can have it given up again.
    for _ in 0..2 {
        world.run(world.now() + QUIET)?;
        world.up_again();
        world.run(world.now() + QUIET)?;
        world.kill_cell();
    }
    world.run(world.now() + QUIET)?;
    world.up_again();
    world.run(world.now() + QUIET)?;
    world.check_poisoned(plot.death_once_in == 0)?;
    (0..vms).for_each(|vm| world.vms[vm].is_poison = false);
    world.up_again();
    world.run(world.now() + QUIET)?;
    // A program that took over no VM on its trial may be one that crashes.
    let whole = Program {
        crashes: false,
        ..world.guard.proven
    };
    world.upgrade(whole);
    world.run(world.now() + QUIET)?;
    (0..vms).for_each(|vm| world.adopt_again(vm));
    world.run(world.now() + QUIET)?;
    world.check_end()?;
    Ok(world.counts)
}

fn inject(world: &mut World, plot: &Plot, chance: &mut Chance, vms: usize) {
    let vm = chance.below(vms as u64) as usize;
    let befalls = |chance: &mut Chance, once_in| once_in > 0 && chance.once_in(once_in);
    if befalls(chance, plot.death_once_in) {
        world.kill_cell();
    } else if befalls(chance, plot.stop_once_in) {
        world.stop_cell(chance.below(15 * SECOND));
    } else if befalls(chance, plot.monitor_once_in) {
        world.kill_monitor(vm);
    } else if befalls(chance, plot.upgrade_once_in) {
        let proven = world.guard.proven;
        world.upgrade(Program {
            version: proven.version + chance.below(3) as u16,
            crashes: chance.once_in(4),
            hangs: chance.once_in(6),
        });
    } else if befalls(chance, plot.poison_once_in) {
        world.vms[vm].is_poison = true;
        // It takes effect at the next adoption. A death in the midst of an adoption would count for another
        // VM.
        if !world.is_adopting() {
            world.kill_cell();
        }
    } else {
        let status = match chance.below(20) {
            0 => 0,
            1..5 => 9,
            _ => REBOOT,
        };
        world.end_shard(vm, status);
    }
}

impl World {
    /// Whether an adoption is in progress that counts as failed if the cell's process ends.
    fn is_adopting(&self) -> bool {
        let adopters = self
            .processes
            .values()
            .flat_map(|process| process.adopters.values());
        adopters.into_iter().any(|adopter| adopter.is_counted)
    }

    /// Checks the rules after a long time without other faults: VMs that end each process of the cell are set
    /// aside and served. If nothing else ended a process, no other VM is set aside.
    fn check_poisoned(&mut self, is_nothing_else: bool) -> Result<(), Violation> {
        for index in 0..self.vms.len() {
            let vm = &self.vms[index];
            let is_set_aside = vm.failures.is_some_and(Failures::is_set_aside);
            if is_nothing_else && is_set_aside && !vm.is_poison {
                return Err(self
                    .trace
                    .before(format!("VM {index} is set aside for another's fault")));
            }
            if vm.is_poison && !vm.has_ended {
                if !is_set_aside {
                    return Err(self.trace.before(format!("VM {index} is not set aside")));
                }
                self.check_served(index, false)?;
            }
        }
        Ok(())
    }

    /// Checks the rules after a long time without faults.
    fn check_end(&mut self) -> Result<(), Violation> {
        if self.guard.cell.is_none() || self.guard.trial.is_some() {
            return Err(self.trace.before("the cell has no process"));
        }
        for index in 0..self.vms.len() {
            if self.vms[index].has_ended {
                self.counts.ended += 1;
                if !self.vms[index].keeper.is_over {
                    return Err(self
                        .trace
                        .before(format!("the keeper of VM {index} does not end")));
                }
                continue;
            }
            self.check_served(index, true)?;
        }
        Ok(())
    }

    /// Checks that a VM runs, and is served by the cell or, if its record is of another version, by a
    /// monitor.
    fn check_served(&self, vm: usize, is_by_cell: bool) -> Result<(), Violation> {
        let served = self
            .processes
            .values()
            .find(|process| process.adopters.get(&vm).is_some_and(|adopter| adopter.is_served));
        let record = self.vms[vm].keeper.slot;
        let is_readable = record.is_some_and(|record| {
            let ours = self.guard.proven.versions();
            ours.agree(record.versions, "the record", "the former program")
                .is_ok()
        });
        let what = match served {
            None => format!("nothing serves VM {vm}"),
            Some(process) if is_by_cell && is_readable && matches!(process.kind, Kind::Monitor) => {
                format!("VM {vm} is not adopted by its cell")
            }
            Some(_) => match self.shards.values().find(|shard| shard.vm == vm && shard.runs) {
                None => format!("VM {vm} does not run: an exit was not dealt with"),
                Some(shard) if !shard.was_left => format!("VM {vm} ends with its adopter"),
                Some(_) => return Ok(()),
            },
        };
        Err(self.trace.before(what))
    }
}
