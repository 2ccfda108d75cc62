//! One run: all programs, under all ways of scheduling.

use std::fs;
use std::path::PathBuf;

use bench::Outcome;
use bench::mirrorball::{Cluster, Mirrorball};
use bench::tiny_vm::{Working, copy_program};

use crate::kinds::{Guest, Program, Scheduling};
use crate::vm::{Vm, round_us};

/// The names of the VMs.
const VMS: [&str; 2] = ["one", "two"];
/// Number of timed rounds, of 100 us each for a VM alone on a quiet machine.
pub const ROUNDS: u64 = 10_000;
/// Time of rounds before them, in which both VMs have begun, and the time after which fewer rounds count.
const WARM_UP_MS: u64 = 1000;
pub const LIMIT_MS: u64 = 5000;
/// Memory of a cell, for both VMs.
const CELL_MEMORY: &str = "512M";

/// Work of 100 us in a guest that has the CPUs for itself.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Iterations of the computation.
    pub iterations: u64,
    /// System calls that take the kernel's lock.
    pub calls: u64,
}

impl Work {
    /// The work of a round.
    fn of(self, program: Program) -> u64 {
        match program {
            Program::Spin | Program::Sleep => self.iterations,
            Program::Lock => self.calls,
        }
    }
}

/// Cells that have the two CPUs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Cells {
    /// One with both.
    One,
    /// One for each.
    Two,
}

impl Cells {
    /// The cells of a guest's VM.
    fn of(guest: Guest) -> Self {
        match guest {
            Guest::Paravirtual | Guest::Native => Self::One,
            Guest::Spanning => Self::Two,
        }
    }
}

/// The time of a round of each VM in one measurement.
#[derive(Clone, Debug)]
pub struct Sample {
    pub program: Program,
    pub guest: Guest,
    pub scheduling: Scheduling,
    /// Of each VM, microseconds.
    pub round_us: Vec<f64>,
}

/// Programs and CPUs of all runs.
pub struct Bench {
    mirrorball: Mirrorball,
    /// The program to copy into guests.
    guest: PathBuf,
    /// The two CPUs of the cell.
    cpus: (usize, usize),
}

impl Bench {
    /// Keeps a copy of the guest's program, which is beside this one, with those of Mirrorball.
    pub fn new(mirrorball: Mirrorball) -> Outcome<Self> {
        let guest = copy_program(&mirrorball, "bench-gangs-guest")?;
        let cpus = bench::cpu::two()?;
        Ok(Self {
            mirrorball,
            guest,
            cpus,
        })
    }

    /// Finds out how much work takes 100 us in a guest that runs alone.
    pub fn calibrate(&self) -> Outcome<Work> {
        let _cluster = self.cluster(Scheduling::Alone, Cells::One)?;
        let vm = self.vm(VMS[0], Guest::Paravirtual)?;
        let known = vm.call(&["--program", "calibrate"])?;
        let number = |name: &str| known[name].as_u64().ok_or_else(|| format!("no {name}: {known}"));
        Ok(Work {
            iterations: number("iterations")?,
            calls: number("calls")?,
        })
    }

    /// Takes a sample of each kind. Odd runs begin with gangs and even ones with Linux, so that a host that
    /// gets busier favours neither.
    pub fn take(&self, run: usize, work: Work) -> Outcome<Vec<Sample>> {
        let mut samples = Vec::new();
        let mut order = [Scheduling::Linux, Scheduling::Gangs];
        if run % 2 == 1 {
            order.reverse();
        }
        for scheduling in order {
            for cells in [Cells::One, Cells::Two] {
                let _cluster = self.cluster(scheduling, cells)?;
                for guest in Guest::ALL.into_iter().filter(|guest| Cells::of(*guest) == cells) {
                    self.take_pair(scheduling, guest, work, &mut samples)?;
                }
            }
        }
        Ok(samples)
    }

    /// Takes the samples of two VMs: under Linux also those of the first one alone and of balance scheduling.
    fn take_pair(
        &self,
        scheduling: Scheduling,
        guest: Guest,
        work: Work,
        samples: &mut Vec<Sample>,
    ) -> Outcome<()> {
        let mut measure = |scheduling: Scheduling, vms: &[&Vm<'_>]| -> Outcome<()> {
            for program in Program::ALL {
                let round_us = measure(program, work.of(program), vms)?;
                let (kind, name) = (scheduling.name(), program.name());
                eprintln!("bench-gangs: {kind}, {}, {name}: {round_us:.0?} us", guest.name());
                samples.push(Sample {
                    program,
                    guest,
                    scheduling,
                    round_us,
                });
            }
            Ok(())
        };
        let one = self.vm(VMS[0], guest)?;
        if scheduling == Scheduling::Linux {
            measure(Scheduling::Alone, &[&one])?;
        }
        let two = self.vm(VMS[1], guest)?;
        let both = [&one, &two];
        measure(scheduling, &both)?;
        if scheduling == Scheduling::Linux {
            both.iter().try_for_each(|vm| vm.pin(self.cpus))?;
            measure(Scheduling::Balance, &both)?;
        }
        Ok(())
    }

    fn vm(&self, name: &'static str, guest: Guest) -> Outcome<Vm<'_>> {
        Vm::start(&self.mirrorball, name, guest, &self.guest)
    }

    /// Cells of the two CPUs.
    fn cluster(&self, scheduling: Scheduling, cells: Cells) -> Outcome<Cluster<'_>> {
        let (first, second) = self.cpus;
        let cell = |cpus: String| format!("[[cells]]\ncpus = \"{cpus}\"\nmemory = \"{CELL_MEMORY}\"\n");
        let mut text = match cells {
            Cells::One => cell(format!("{first},{second}")),
            Cells::Two => cell(first.to_string()) + &cell(second.to_string()),
        };
        if scheduling == Scheduling::Gangs {
            text += "[scheduling]\ncpus = \"gangs\"\n";
        }
        let file = self.mirrorball.folder().join("cluster.toml");
        fs::write(&file, text)?;
        Cluster::up(
            &self.mirrorball,
            &[file.to_str().ok_or("a folder whose name is no text")?],
        )
    }
}

/// Runs a program in all VMs at once; returns the time of a round of each, microseconds.
fn measure(program: Program, work: u64, vms: &[&Vm<'_>]) -> Outcome<Vec<f64>> {
    let numbers = [work, ROUNDS, WARM_UP_MS, LIMIT_MS].map(|number| number.to_string());
    let mut words = vec!["--program", program.word()];
    for (name, number) in ["--work", "--rounds", "--warm-ms", "--limit-ms"]
        .into_iter()
        .zip(&numbers)
    {
        words.extend([name, number]);
    }
    let working: Outcome<Vec<Working>> = vms.iter().map(|vm| vm.work(&words)).collect();
    let mut working = working?;
    working.iter_mut().try_for_each(Working::ready)?;
    working.iter_mut().try_for_each(Working::go)?;
    // All go on until the last one has its figure.
    working
        .iter_mut()
        .map(|working| round_us(&working.result()?))
        .collect()
}
