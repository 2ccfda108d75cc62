//! Cells that lend each other CPUs: their balancers, the steps of each move, and processes and cells that die
//! between two steps.
//!
//! A move has the steps of `crates/cell/src/handle/borrowed_cpus.rs`. The record of a VM outlives the
//! processes of its cell; the next one restores the table and the thread from it.

use std::collections::BTreeMap;

use policy::cpu::cell_balancer::{CellBalancer, CellLoad, LentVcpu, OwnCell, OwnVcpu, PERIOD, Step};

use crate::chance::Chance;
use crate::{MILLISECOND, Time};

/// Number of a vCPU, over all cells. Each is a VM's only one.
pub type Vcpu = usize;

/// Steps of a move to another cell and of the way home, each before the effect that it names.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Move {
    /// The lender agrees.
    Agree,
    /// The record names the lender.
    Record,
    /// The table of all cells has the dependency.
    Announce,
    /// The thread runs there.
    Reach,
    /// The thread runs at home.
    Leave,
    /// The record names no lender.
    Forget,
    /// The table has no dependency.
    End,
}

/// Steps in their order, out and home.
pub const OUT: [Move; 4] = [Move::Agree, Move::Record, Move::Announce, Move::Reach];
pub const HOME: [Move; 3] = [Move::Leave, Move::Forget, Move::End];

/// Death before a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Death {
    /// The process of the VM's cell, or of the lender.
    Process { is_lender: bool },
    /// The lender fails, and does not start again.
    Lender,
}

/// A vCPU, and where it runs as each part of the cluster has it. None is its home.
#[derive(Clone, Debug)]
pub struct VcpuState {
    pub home: u16,
    pub is_busy: bool,
    /// Other cells on which it may run.
    pub allowed: Vec<u16>,
    pub record: Option<u16>,
    pub table: Option<u16>,
    pub thread: Option<u16>,
    /// Whether its VM ended with a failed cell.
    pub has_ended: bool,
    /// Times of its moves to other cells, and whether the last lender had recalled it.
    pub moves: Vec<(Time, u16)>,
    pub recalled: Vec<Time>,
}

#[derive(Debug)]
struct Operation {
    vcpu: Vcpu,
    lender: u16,
    steps: &'static [Move],
    next_at: Time,
}

#[derive(Debug, Default)]
pub struct Cell {
    pub cpus: u32,
    pub has_failed: bool,
    balancer: CellBalancer<Vcpu>,
    /// Load of the last evaluation, which it reports.
    reported: Option<CellLoad>,
    /// CPUs that it has lent since then.
    promised: u32,
    operation: Option<Operation>,
    next_at: Time,
    /// Time until which it has no process.
    dead_until: Time,
}

/// The cells of a host.
#[derive(Debug)]
pub struct World {
    pub now: Time,
    pub cells: Vec<Cell>,
    pub vcpus: Vec<VcpuState>,
    /// A death at the next such step.
    pub death: Option<(Move, Death)>,
    /// Number of moves to other cells, of refusals and of recalls.
    pub refused: u64,
    pub chance: Chance,
    /// Whether a move's steps take tens of milliseconds, at random.
    pub deaths_once_in: Option<u64>,
}

impl World {
    pub fn new(cpus: &[u32], seed: u64) -> Self {
        let cell = |(number, cpus): (usize, &u32)| Cell {
            cpus: *cpus,
            next_at: PERIOD / 4 * number as u64,
            ..Cell::default()
        };
        Self {
            now: 0,
            cells: cpus.iter().enumerate().map(cell).collect(),
            vcpus: Vec::new(),
            death: None,
            refused: 0,
            chance: Chance::new(seed),
            deaths_once_in: None,
        }
    }

    pub fn add(&mut self, home: u16, is_busy: bool, allowed: &[u16]) -> Vcpu {
        self.vcpus.push(VcpuState {
            home,
            is_busy,
            allowed: allowed.to_vec(),
            record: None,
            table: None,
            thread: None,
            has_ended: false,
            moves: Vec::new(),
            recalled: Vec::new(),
        });
        self.vcpus.len() - 1
    }

    /// Runs until a time, in steps of 10 ms.
    pub fn run(&mut self, until: Time) {
        while self.now < until {
            self.now += 10 * MILLISECOND;
            for cell in 0..self.cells.len() as u16 {
                self.step(cell);
            }
        }
    }

    /// Ends the process of a cell. The next one has the records.
    pub fn kill(&mut self, cell: u16) {
        let known = &mut self.cells[usize::from(cell)];
        known.balancer = CellBalancer::default();
        (known.reported, known.promised, known.operation) = (None, 0, None);
        known.dead_until = self.now + (1 + self.chance.below(300)) * 10 * MILLISECOND;
    }

    /// A cell fails and does not start again: VMs that depend on it end.
    pub fn fail(&mut self, cell: u16) {
        self.kill(cell);
        self.cells[usize::from(cell)].has_failed = true;
        for vcpu in &mut self.vcpus {
            let uses = [vcpu.record, vcpu.table, vcpu.thread].contains(&Some(cell));
            vcpu.has_ended |= uses || vcpu.home == cell;
        }
        for other in &mut self.cells {
            let ended = |one: &Operation| self.vcpus[one.vcpu].has_ended;
            if other.operation.as_ref().is_some_and(ended) {
                other.operation = None;
            }
        }
    }

    fn runs(&self, cell: u16) -> bool {
        let known = &self.cells[usize::from(cell)];
        !known.has_failed && self.now >= known.dead_until
    }

    /// The cell as its process measures it and the table shows it.
    pub fn own(&self, cell: u16) -> OwnCell<Vcpu> {
        let live = || self.vcpus.iter().enumerate().filter(|(_, vcpu)| !vcpu.has_ended);
        let own = live().filter(|(_, vcpu)| vcpu.home == cell);
        let lent = live().filter(|(_, vcpu)| vcpu.table == Some(cell));
        OwnCell {
            cpus: self.cells[usize::from(cell)].cpus,
            vcpus: own
                .map(|(number, vcpu)| OwnVcpu {
                    vcpu: number,
                    is_busy: vcpu.is_busy,
                    lender: vcpu.record,
                    is_movable: true,
                    cells: vcpu.allowed.iter().map(|cell| (*cell, false)).collect(),
                })
                .collect(),
            lent: lent
                .map(|(number, vcpu)| LentVcpu {
                    vcpu: number,
                    borrower: vcpu.home,
                    is_movable: true,
                })
                .collect(),
        }
    }

    fn step(&mut self, cell: u16) {
        if !self.runs(cell) {
            return;
        }
        let index = usize::from(cell);
        if self.cells[index].dead_until > 0 {
            self.cells[index].dead_until = 0;
            self.restore(cell);
        }
        if let Some(operation) = &self.cells[index].operation {
            if self.now >= operation.next_at {
                self.advance(cell);
            }
            return;
        }
        if self.now < self.cells[index].next_at {
            return;
        }
        self.cells[index].next_at = self.now + PERIOD;
        let own = self.own(cell);
        self.cells[index].reported = Some(own.load(cell));
        self.cells[index].promised = 0;
        match self.cells[index].balancer.evaluate(self.now, &own) {
            Step::Keep => {}
            Step::Return(vcpu) => self.begin(cell, vcpu, own_lender(&own, vcpu), &HOME),
            Step::Recall { vcpu, borrower } => {
                let is_idle = self.runs(borrower) && self.cells[usize::from(borrower)].operation.is_none();
                if is_idle && self.vcpus[vcpu].record == Some(cell) {
                    self.vcpus[vcpu].recalled.push(self.now);
                    let now = self.now;
                    self.cells[usize::from(borrower)].balancer.avoid(now, cell);
                    self.begin(borrower, vcpu, cell, &HOME);
                }
            }
            Step::Seek(cells) => {
                let loads: Vec<CellLoad> = cells
                    .into_iter()
                    .filter(|other| self.runs(*other))
                    .filter_map(|other| self.cells[usize::from(other)].reported)
                    .collect();
                if let Ok(chosen) = self.cells[index].balancer.choose(&own, &loads) {
                    self.begin(cell, chosen.vcpu, chosen.lender, &OUT);
                }
            }
        }
    }

    fn begin(&mut self, cell: u16, vcpu: Vcpu, lender: u16, steps: &'static [Move]) {
        let next_at = self.now + (1 + self.chance.below(5)) * 10 * MILLISECOND;
        self.cells[usize::from(cell)].operation = Some(Operation {
            vcpu,
            lender,
            steps,
            next_at,
        });
    }

    /// Takes the next step of a cell's move.
    fn advance(&mut self, cell: u16) {
        let Some(mut operation) = self.cells[usize::from(cell)].operation.take() else {
            return;
        };
        let Some((step, rest)) = operation.steps.split_first() else {
            return;
        };
        let (vcpu, lender) = (operation.vcpu, operation.lender);
        if self.dies(*step, cell, lender) {
            return;
        }
        match step {
            Move::Agree => {
                if !self.agrees(lender) {
                    self.refused += 1;
                    let now = self.now;
                    return self.cells[usize::from(cell)].balancer.avoid(now, lender);
                }
            }
            Move::Record => self.vcpus[vcpu].record = Some(lender),
            // The cell of the VM enters no lender that is dead, and goes back.
            Move::Announce if !self.runs(lender) => {
                self.vcpus[vcpu].record = None;
                return;
            }
            Move::Announce => self.vcpus[vcpu].table = Some(lender),
            Move::Reach => {
                self.vcpus[vcpu].thread = Some(lender);
                self.vcpus[vcpu].moves.push((self.now, lender));
                let now = self.now;
                self.cells[usize::from(cell)].balancer.moved(now, vcpu);
            }
            Move::Leave => self.vcpus[vcpu].thread = None,
            Move::Forget => self.vcpus[vcpu].record = None,
            Move::End => self.vcpus[vcpu].table = None,
        }
        if !rest.is_empty() {
            operation.steps = rest;
            operation.next_at = self.now + (1 + self.chance.below(5)) * 10 * MILLISECOND;
            self.cells[usize::from(cell)].operation = Some(operation);
        }
    }

    /// Whether something dies before a step of a cell's move, so that the step is not taken.
    fn dies(&mut self, step: Move, cell: u16, lender: u16) -> bool {
        let planned = self.death.filter(|(at, _)| *at == step).map(|(_, death)| death);
        let random = self
            .deaths_once_in
            .is_some_and(|times| self.chance.once_in(times));
        let death = planned.or_else(|| {
            let is_lender = random && self.chance.once_in(2);
            random.then_some(Death::Process { is_lender })
        });
        if planned.is_some() {
            self.death = None;
        }
        match death {
            None => false,
            Some(Death::Process { is_lender: true }) => {
                self.kill(lender);
                false
            }
            Some(Death::Process { is_lender: false }) => {
                self.kill(cell);
                true
            }
            Some(Death::Lender) => {
                self.fail(lender);
                self.cells[usize::from(cell)].operation.is_none() && step != Move::Agree
            }
        }
    }

    /// Whether a cell lends a CPU, by its last measure and what it has promised since.
    fn agrees(&mut self, lender: u16) -> bool {
        if !self.runs(lender) {
            return false;
        }
        let known = &mut self.cells[usize::from(lender)];
        let promised = known.promised;
        let load = known.reported.map(|load| CellLoad {
            lent: load.lent + promised,
            ..load
        });
        let agrees = load.is_some_and(|load| load.has_idle_cpu());
        known.promised += u32::from(agrees);
        agrees
    }

    /// Restores table and threads from the records, as the next process of a cell does.
    fn restore(&mut self, cell: u16) {
        for vcpu in self.vcpus.iter_mut().filter(|vcpu| vcpu.home == cell) {
            (vcpu.table, vcpu.thread) = (vcpu.record, vcpu.record);
        }
    }

    /// Busy vCPUs on the CPUs of each cell.
    pub fn busy(&self) -> BTreeMap<u16, u32> {
        let mut busy = BTreeMap::new();
        for vcpu in self.vcpus.iter().filter(|vcpu| vcpu.is_busy && !vcpu.has_ended) {
            *busy.entry(vcpu.thread.unwrap_or(vcpu.home)).or_default() += 1;
        }
        busy
    }
}

fn own_lender(own: &OwnCell<Vcpu>, vcpu: Vcpu) -> u16 {
    let known = own.vcpus.iter().find(|one| one.vcpu == vcpu);
    known.and_then(|one| one.lender).unwrap_or_default()
}
