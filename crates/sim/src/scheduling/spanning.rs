//! VMs that span cells: windows beside gangs of each cell alone, and beside a plain scheduler.
//!
//! Each VM has a vCPU on each CPU of the machine, and its program meets at barriers over all of them. Its
//! part in each cell is a VM of that cell's drivers, as in the product.

use std::collections::BTreeSet;

use policy::cpu::message::Event;
use policy::cpu::set::CpuSet;
use policy::cpu::topology::Topology;
use policy::cpu::tunables::Tunables;
use policy::cpu::view::Terms;
use policy::cpu::windows::{
    Arbiter, Follower, REPORT_INTERVAL, Report, SpanningVm, UNLIMITED, WindowState, limited_permille,
};
use policy::cpu::{CpuId, VmId};

use super::costs::Costs;
use super::experiment::WORK_NS;
use super::program::Program;
use super::world::World;
use crate::{MILLISECOND, SECOND, Time};

/// CPUs of the machine, which are divided among the cells.
pub const CPUS: u16 = 8;
/// Work of each vCPU: long beside the second and a half until VMs have windows.
pub const WORK_PER_VCPU_NS: Time = 6 * SECOND;
/// Time limit of a run, in multiples of the work.
pub const LIMIT: u64 = 12;

/// How CPUs choose what they run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scheduler {
    /// Drivers, and windows that all cells share.
    Windows,
    /// Drivers; the part of a VM in each cell is a gang.
    CellGangs,
    /// Each CPU alternates between its vCPUs and looks at no other CPU.
    RoundRobin,
}

/// Stop of a vCPU outside of its window, and the time after which it is renewed: those of
/// `cell::scheduler::gate`.
const STOP_LEASE: Time = 100 * MILLISECOND;
const STOP_RENEWAL: Time = 50 * MILLISECOND;

/// Cells, their CPUs and the times of the machine.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Number of cells.
    pub cells: u16,
    /// CPUs, which are divided among the cells.
    pub cpus: u16,
    /// Times.
    pub costs: Costs,
    /// Share of the orders to go on that are not sent, thousandths. The stop then ends with its lease.
    pub lost_permille: u64,
}

impl Machine {
    /// So many cells on [`CPUS`] CPUs, with the paper's times.
    pub fn of(cells: u16) -> Self {
        Self {
            cells,
            cpus: CPUS,
            costs: Costs::PAPER,
            lost_permille: 0,
        }
    }
}

/// Machine of cells with VMs that span all of them.
pub struct Cells {
    /// The machine.
    pub world: World,
    machine: Machine,
    arbiter: Arbiter<u16>,
    followers: Vec<Follower<u16>>,
    /// Busy weight for each CPU of VMs in one cell alone, by cell.
    local_weight: Vec<u32>,
    /// Parts of each VM, by cell.
    vms: Vec<Vec<VmId>>,
    /// Stops of each part: since when, and until when after its window has opened.
    stops: Vec<Vec<Stop>>,
    /// Part of the time for which each VM may run, thousandths.
    most_permille: Vec<u32>,
    report_at: Time,
}

/// Stop of the vCPUs of a part while its window is closed, and after that if the order to go on is lost.
#[derive(Clone, Copy, Debug, Default)]
struct Stop {
    since: Option<Time>,
    until: Time,
}

impl Cells {
    /// A machine without VMs.
    pub fn new(machine: Machine, scheduler: Scheduler, seed: u64) -> Self {
        let cells = machine.cells;
        let topology = Topology::regular(cells, 1, machine.cpus / cells);
        let mut world = World::new(topology, Tunables::default(), machine.costs, 0, seed);
        if scheduler == Scheduler::RoundRobin {
            world = world.with_round_robin();
        }
        Self {
            world,
            machine,
            arbiter: Arbiter::default(),
            followers: vec![Follower::default(); usize::from(cells)],
            local_weight: vec![0; usize::from(cells)],
            vms: Vec::new(),
            stops: Vec::new(),
            most_permille: Vec::new(),
            report_at: if scheduler == Scheduler::Windows {
                0
            } else {
                Time::MAX
            },
        }
    }

    fn cpus(&self, cell: u16) -> Vec<CpuId> {
        let width = self.machine.cpus / self.machine.cells;
        (cell * width..(cell + 1) * width).map(CpuId).collect()
    }

    /// Adds a VM with a vCPU on each CPU. Its vCPUs start at random times within a slice.
    pub fn add_spanning(&mut self, program: Program) {
        let is_windowed = self.report_at != Time::MAX;
        let terms = Terms {
            is_gang: !is_windowed,
            ..Terms::default()
        };
        let parts: Vec<VmId> = (0..self.machine.cells)
            .map(|cell| {
                let cpus = self.cpus(cell);
                let part = self.world.add(terms, program, &cpus, 30 * MILLISECOND);
                self.world.confine(part, cpus.into_iter().collect::<CpuSet>());
                part
            })
            .collect();
        for part in &parts {
            self.world.join(*part, parts[0]);
        }
        self.stops.push(vec![Stop::default(); parts.len()]);
        self.most_permille.push(UNLIMITED);
        self.vms.push(parts);
    }

    /// Limits a spanning VM whose vCPUs are all busy to so many CPUs, thousandths.
    pub fn limit(&mut self, vm: usize, limit_permille: u32) {
        let of_part = |part: &VmId| vec![1_000; self.world.vms[usize::from(part.0)].vcpus.len()];
        let parts: Vec<Vec<u32>> = self.vms[vm].iter().map(of_part).collect();
        self.most_permille[vm] = limited_permille(limit_permille, &parts);
    }

    /// Adds a busy VM with a vCPU on each CPU of a cell.
    pub fn add_local(&mut self, cell: u16) -> VmId {
        let cpus = self.cpus(cell);
        self.local_weight[usize::from(cell)] += Terms::default().weight;
        self.world.add(Terms::default(), Program::Busy, &cpus, 0)
    }

    /// Time of the vCPUs of a spanning VM on CPUs, by cell.
    pub fn ran_ns_of_parts(&self, vm: usize) -> Vec<Time> {
        self.vms[vm].iter().map(|part| self.world.ran_ns(*part)).collect()
    }

    /// Time of all vCPUs of a spanning VM on CPUs.
    pub fn ran_ns(&self, vm: usize) -> Time {
        self.vms[vm].iter().map(|part| self.world.ran_ns(*part)).sum()
    }

    /// Barriers that a spanning VM has passed.
    pub fn rounds(&self, vm: usize) -> u64 {
        self.world.rounds(self.vms[vm][0])
    }

    /// Number of vCPUs of a spanning VM that are on a CPU.
    pub fn running(&self, vm: usize) -> usize {
        let parts = self.vms[vm].iter();
        let vcpus = parts.flat_map(|part| &self.world.vms[usize::from(part.0)].vcpus);
        vcpus.filter(|vcpu| vcpu.on.is_some()).count()
    }

    /// Runs to a time, or until all programs that end have ended.
    pub fn run(&mut self, until: Time) {
        while self.world.now < until && self.world.violation.is_none() && !self.have_ended() {
            if self.world.now >= self.report_at {
                self.report_at = self.world.now + REPORT_INTERVAL;
                self.report();
            }
            self.apply();
            let now = self.world.now;
            let changes = (0..self.vms.len()).flat_map(|vm| {
                let of = |follower: &Follower<u16>| follower.windows_of(&(vm as u16)).next_change(now);
                self.followers.iter().filter_map(of).collect::<Vec<_>>()
            });
            let ends = self.stops.iter().flatten().map(|stop| stop.until);
            let next = changes
                .chain(ends.filter(|at| *at > now))
                .min()
                .unwrap_or(Time::MAX)
                .min(self.report_at)
                .min(until);
            self.world.run(next);
        }
    }

    fn have_ended(&self) -> bool {
        let has_ended = |parts: &Vec<VmId>| self.world.vms[usize::from(parts[0].0)].ended_at.is_some();
        !self.vms.is_empty() && self.vms.iter().all(has_ended)
    }

    /// All cells report to the arbiter. Each VM has its home in one of them.
    fn report(&mut self) {
        let now = self.world.now;
        let busy: BTreeSet<u16> = (0..)
            .zip(&self.vms)
            .filter(|(_, parts)| self.world.vms[usize::from(parts[0].0)].ended_at.is_none())
            .map(|(vm, _)| vm)
            .collect();
        for cell in 0..self.machine.cells {
            let homes = busy.iter().filter(|vm| *vm % self.machine.cells == cell);
            let spanning = |vm: &u16| SpanningVm {
                vm: *vm,
                weight: Terms::default().weight,
                cells: (0..self.machine.cells).collect(),
                most_permille: self.most_permille[usize::from(*vm)],
            };
            let report = Report {
                local_weight: self.local_weight[usize::from(cell)],
                vms: homes.map(spanning).collect(),
            };
            let schedule = self.arbiter.take(now, cell, report).clone();
            let taken = self.followers[usize::from(cell)].take(now, schedule);
            if let Err(error) = taken {
                self.world.violation = Some(format!("cell {cell} refuses the schedule: {error:?}"));
            }
        }
    }

    /// Opens and closes the windows of each cell, and has its drivers choose again.
    fn apply(&mut self) {
        if self.report_at == Time::MAX {
            return;
        }
        let now = self.world.now;
        for cell in 0..self.machine.cells {
            let follower = &self.followers[usize::from(cell)];
            let mut has_changed = false;
            for ((vm, parts), stops) in (0..).zip(&self.vms).zip(&mut self.stops) {
                // VMs without a window run on, as beside drivers that do not choose them.
                let state = follower.windows_of(&vm).state(now);
                let stop = &mut stops[usize::from(cell)];
                if state == WindowState::Closed {
                    stop.since.get_or_insert(now);
                } else if let Some(since) = stop.since.take()
                    && self.world.below(1_000) < self.machine.lost_permille
                {
                    let renewed = (now - since) / STOP_RENEWAL * STOP_RENEWAL;
                    stop.until = since + renewed + STOP_LEASE;
                }
                let state = match now < stop.until {
                    true => WindowState::Closed,
                    false => state,
                };
                let window = &mut self.world.terms_mut(parts[usize::from(cell)]).window;
                has_changed |= *window != state;
                *window = state;
            }
            if has_changed {
                for cpu in self.cpus(cell) {
                    self.world.send(now, cpu, Event::Timer);
                }
            }
        }
    }

    /// State of a VM's windows in each cell.
    pub fn states(&self, vm: u16) -> Vec<WindowState> {
        let of = |follower: &Follower<u16>| follower.windows_of(&vm).state(self.world.now);
        self.followers.iter().map(of).collect()
    }
}

/// Time until each of `vms` VMs over `cells` cells has done [`WORK_PER_VCPU_NS`] on each vCPU; `None` if they
/// have not within [`LIMIT`] times that, or a rule was broken. vCPUs spin at barriers: spanning VMs have no
/// paravirtual spin locks.
pub fn run(vms: u16, cells: u16, scheduler: Scheduler, seed: u64) -> Option<Time> {
    let mut machine = Cells::new(Machine::of(cells), scheduler, seed);
    let program = Program::Barrier {
        work_ns: WORK_NS,
        rounds: WORK_PER_VCPU_NS / WORK_NS,
        halt_after_ns: None,
    };
    for _ in 0..vms {
        machine.add_spanning(program);
    }
    machine.run(LIMIT * WORK_PER_VCPU_NS);
    if machine.world.violation.is_some() {
        return None;
    }
    let ends = machine
        .vms
        .iter()
        .map(|parts| machine.world.vms[usize::from(parts[0].0)].ended_at);
    ends.collect::<Option<Vec<Time>>>()?.into_iter().max()
}
