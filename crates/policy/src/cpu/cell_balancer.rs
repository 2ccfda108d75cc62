//! Cell balancer: when a cell borrows a CPU of another one, gives it back, or takes one of its own back.
//!
//! A vCPU on another cell's CPU makes its VM depend on that cell (Cellular Disco, section 2.3), so these
//! moves are slow and rare. A cell lends CPUs that are idle, and its own VMs go first:
//!
//! - A cell with more busy vCPUs than CPUs reads the loads of other cells. One that has an idle CPU, and more
//!   than one busy vCPU a CPU less, gets a vCPU.
//! - A lender with more busy and lent vCPUs than CPUs recalls one.
//! - A borrower with an idle CPU takes a vCPU home. So it does with a vCPU that has been idle for long.
//!
//! With constant loads nothing moves twice: a lender had a CPU for the vCPU, and its borrower has none. Loads
//! that change move a vCPU once in [`HOLD`] at most, unless its lender recalls it.

use std::collections::BTreeMap;

use super::{MILLISECOND, Nanos};

/// Time between two evaluations. Ours: a move between cells takes some tens of milliseconds and a dependency,
/// so its load has to last for longer than the 80 ms of the periodic balancer.
pub const PERIOD: Nanos = 1_000 * MILLISECOND;
/// Evaluations in a row with the same result before a step. Ours: the load of one period may be a burst.
pub const CONFIRMATIONS: u8 = 2;
/// Part of a period in which a busy vCPU runs or waits for a CPU, at least, thousandths. Ours: half.
pub const BUSY_PERMILLE: u32 = 500;
/// Time for which a moved vCPU stays, after which an idle one goes home, and for which a cell that has
/// refused or recalled is not asked again. Ours: ten periods, against moves back and forth.
pub const HOLD: Nanos = 10 * PERIOD;
/// Greatest difference of loads, in busy vCPUs a CPU, that is not balanced. Cellular Disco, section 4.2: one,
/// inside a cell.
pub const DISPARITY: u64 = super::tunables::DISPARITY as u64;

/// A vCPU of a VM of the cell.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct OwnVcpu<V> {
    /// Its name.
    pub vcpu: V,
    /// Whether it had work for half of the last period at least.
    pub is_busy: bool,
    /// Lender of the CPU on which it runs; none at home.
    pub lender: Option<u16>,
    /// Whether a cell balancer may move it: it is at home, or a balancer has moved it before.
    pub is_movable: bool,
    /// Other cells on which it may run, each with whether its VM depends on the cell without it.
    pub cells: Vec<(u16, bool)>,
}

/// A vCPU of another cell's VM on a CPU of this cell.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LentVcpu<V> {
    /// Its name.
    pub vcpu: V,
    /// The VM's cell.
    pub borrower: u16,
    /// Whether a cell balancer has moved it; a command's order stands.
    pub is_movable: bool,
}

/// The vCPUs of a cell's VMs and CPUs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct OwnCell<V> {
    /// Number of its CPUs.
    pub cpus: u32,
    /// vCPUs of its VMs.
    pub vcpus: Vec<OwnVcpu<V>>,
    /// vCPUs of other cells' VMs on its CPUs.
    pub lent: Vec<LentVcpu<V>>,
}

impl<V> OwnCell<V> {
    /// Number of busy vCPUs of its VMs on its CPUs.
    pub fn busy(&self) -> u32 {
        let busy = self
            .vcpus
            .iter()
            .filter(|one| one.is_busy && one.lender.is_none());
        u32::try_from(busy.count()).unwrap_or(u32::MAX)
    }

    /// Its load, as it reports it to others.
    pub fn load(&self, cell: u16) -> CellLoad {
        CellLoad {
            cell,
            cpus: self.cpus,
            busy: self.busy(),
            lent: u32::try_from(self.lent.len()).unwrap_or(u32::MAX),
        }
    }
}

/// Load of a cell's CPUs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CellLoad {
    /// The cell.
    pub cell: u16,
    /// Number of its CPUs.
    pub cpus: u32,
    /// Busy vCPUs of its VMs on its CPUs.
    pub busy: u32,
    /// vCPUs of other cells' VMs on its CPUs. Each counts as busy: its CPU is kept for it.
    pub lent: u32,
}

impl CellLoad {
    /// Busy vCPUs on its CPUs.
    fn total(&self) -> u64 {
        u64::from(self.busy) + u64::from(self.lent)
    }

    /// Whether it has an idle CPU to lend.
    pub fn has_idle_cpu(&self) -> bool {
        self.total() < u64::from(self.cpus)
    }

    /// Whether this cell has more than [`DISPARITY`] busy vCPUs a CPU beyond another one.
    fn exceeds(&self, other: &Self) -> bool {
        let (own, others) = (u64::from(self.cpus), u64::from(other.cpus));
        let beyond = other.total().saturating_add(DISPARITY.saturating_mul(others));
        self.total().saturating_mul(others) > beyond.saturating_mul(own)
    }

    /// Busy vCPUs on a thousand of its CPUs.
    fn per_cpu(&self) -> u64 {
        self.total().saturating_mul(1_000) / u64::from(self.cpus.max(1))
    }
}

/// Step of a cell after an evaluation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step<V> {
    /// Nothing.
    Keep,
    /// Asks a borrower to take a vCPU home.
    Recall {
        /// The vCPU.
        vcpu: V,
        /// The VM's cell.
        borrower: u16,
    },
    /// Takes a vCPU of its own home.
    Return(V),
    /// Reads the loads of these cells, for [`CellBalancer::choose`].
    Seek(Vec<u16>),
}

/// Move of a vCPU to another cell.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Move<V> {
    /// The vCPU.
    pub vcpu: V,
    /// The lender.
    pub lender: u16,
}

/// Reason why no vCPU moves to another cell.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum NoMove {
    /// No other cell has reported its load.
    NoLoad,
    /// No such cell has an idle CPU.
    NoIdleCpu,
    /// The loads differ by one busy vCPU a CPU at most.
    Balanced,
}

/// Decisions of one cell. They are of its process, and begin anew with the next one.
#[derive(Clone, Debug)]
pub struct CellBalancer<V> {
    /// Evaluations in a row in which it had more busy vCPUs than CPUs.
    overloaded: u8,
    /// Evaluations in a row in which its own and lent vCPUs had too few CPUs.
    pressed: u8,
    /// Evaluations in a row in which it had an idle CPU.
    light: u8,
    /// Times since which vCPUs are away.
    away: BTreeMap<V, Nanos>,
    /// Times since which vCPUs that are away are idle.
    idle: BTreeMap<V, Nanos>,
    /// Times until which cells are not asked.
    avoided: BTreeMap<u16, Nanos>,
}

impl<V> Default for CellBalancer<V> {
    fn default() -> Self {
        Self {
            overloaded: 0,
            pressed: 0,
            light: 0,
            away: BTreeMap::new(),
            idle: BTreeMap::new(),
            avoided: BTreeMap::new(),
        }
    }
}

impl<V: Clone + Ord> CellBalancer<V> {
    /// Evaluates the load of the cell, once in a [`PERIOD`].
    pub fn evaluate(&mut self, now: Nanos, own: &OwnCell<V>) -> Step<V> {
        self.note_away(now, own);
        self.avoided.retain(|_, until| now < *until);
        let load = own.load(0);
        let (busy, cpus) = (u64::from(load.busy), u64::from(load.cpus));
        let count = |count: u8, is_so: bool| if is_so { count.saturating_add(1) } else { 0 };
        self.overloaded = count(self.overloaded, busy > cpus);
        self.pressed = count(self.pressed, load.total() > cpus);
        self.light = count(self.light, load.has_idle_cpu());
        if self.pressed >= CONFIRMATIONS
            && let Some(lent) = own.lent.iter().rev().find(|lent| lent.is_movable)
        {
            return Step::Recall {
                vcpu: lent.vcpu.clone(),
                borrower: lent.borrower,
            };
        }
        if let Some(vcpu) = self.to_return(now, own) {
            return Step::Return(vcpu);
        }
        if self.overloaded >= CONFIRMATIONS {
            let mut cells: Vec<u16> = candidates(own)
                .flat_map(|one| &one.cells)
                .map(|(cell, _)| *cell)
                .collect();
            cells.sort_unstable();
            cells.dedup();
            cells.retain(|cell| !self.avoided.contains_key(cell));
            if !cells.is_empty() {
                return Step::Seek(cells);
            }
        }
        Step::Keep
    }

    /// Chooses a vCPU and its lender by the loads that cells report: a cell on which the VM depends already
    /// first, then the least loaded one.
    ///
    /// # Errors
    /// The reason why none moves.
    pub fn choose(&self, own: &OwnCell<V>, loads: &[CellLoad]) -> Result<Move<V>, NoMove> {
        let here = own.load(0);
        let mut reason = NoMove::NoLoad;
        // The least is the best: whether a dependency begins, load, cell, vCPU.
        let mut best: Option<(bool, u64, u16, V)> = None;
        for load in loads.iter().filter(|load| !self.avoided.contains_key(&load.cell)) {
            if !load.has_idle_cpu() {
                reason = reason.max(NoMove::NoIdleCpu);
                continue;
            }
            if !here.exceeds(load) {
                reason = reason.max(NoMove::Balanced);
                continue;
            }
            for one in candidates(own) {
                let Some((_, depends)) = one.cells.iter().find(|(cell, _)| *cell == load.cell) else {
                    continue;
                };
                let key = (!depends, load.per_cpu(), load.cell, one.vcpu.clone());
                if best.as_ref().is_none_or(|other| key < *other) {
                    best = Some(key);
                }
            }
        }
        let chosen = best.map(|(_, _, lender, vcpu)| Move { vcpu, lender });
        chosen.ok_or(reason)
    }

    /// Notes that a vCPU has moved to another cell. The next one needs as many evaluations again.
    pub fn moved(&mut self, now: Nanos, vcpu: V) {
        self.away.insert(vcpu, now);
        self.overloaded = 0;
    }

    /// Notes that a cell has refused a CPU or recalled one.
    pub fn avoid(&mut self, now: Nanos, cell: u16) {
        self.avoided.insert(cell, now.saturating_add(HOLD));
    }

    /// Notes which vCPUs are away, and which of them are idle. One that is away since before this process
    /// counts from now on.
    fn note_away(&mut self, now: Nanos, own: &OwnCell<V>) {
        let away = |one: &&OwnVcpu<V>| one.lender.is_some() && one.is_movable;
        let known: BTreeMap<&V, bool> = own
            .vcpus
            .iter()
            .filter(away)
            .map(|one| (&one.vcpu, one.is_busy))
            .collect();
        self.away.retain(|vcpu, _| known.contains_key(vcpu));
        self.idle.retain(|vcpu, _| known.get(vcpu) == Some(&false));
        for (vcpu, is_busy) in known {
            self.away.entry(vcpu.clone()).or_insert(now);
            if !is_busy {
                self.idle.entry(vcpu.clone()).or_insert(now);
            }
        }
    }

    /// The vCPU to take home: one that has been idle for long, or the one that has been away for longest if a
    /// CPU is idle.
    fn to_return(&self, now: Nanos, own: &OwnCell<V>) -> Option<V> {
        let is_over = |since: &Nanos| now.saturating_sub(*since) >= HOLD;
        let idle = self.idle.iter().find(|(_, since)| is_over(since));
        if let Some((vcpu, _)) = idle {
            return Some(vcpu.clone());
        }
        let is_busy = |vcpu: &V| own.vcpus.iter().any(|one| one.vcpu == *vcpu && one.is_busy);
        let held = self
            .away
            .iter()
            .filter(|(vcpu, since)| is_over(since) && is_busy(vcpu));
        let oldest = held.min_by_key(|(_, since)| **since)?;
        (self.light >= CONFIRMATIONS).then(|| oldest.0.clone())
    }
}

/// The vCPUs that may move to another cell.
fn candidates<V>(own: &OwnCell<V>) -> impl Iterator<Item = &OwnVcpu<V>> {
    own.vcpus
        .iter()
        .filter(|one| one.is_busy && one.is_movable && one.lender.is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vcpu(vcpu: u16, is_busy: bool, cells: &[(u16, bool)]) -> OwnVcpu<u16> {
        OwnVcpu {
            vcpu,
            is_busy,
            lender: None,
            is_movable: true,
            cells: cells.to_vec(),
        }
    }

    /// A cell of one CPU with vCPUs that may move to cells 1 and 2.
    fn cell(busy: u16) -> OwnCell<u16> {
        OwnCell {
            cpus: 1,
            vcpus: (0..busy)
                .map(|number| vcpu(number, true, &[(1, false), (2, false)]))
                .collect(),
            lent: Vec::new(),
        }
    }

    fn load(cell: u16, cpus: u32, busy: u32, lent: u32) -> CellLoad {
        CellLoad {
            cell,
            cpus,
            busy,
            lent,
        }
    }

    /// The step of the last of two evaluations.
    fn second(balancer: &mut CellBalancer<u16>, now: Nanos, own: &OwnCell<u16>) -> Step<u16> {
        balancer.evaluate(now, own);
        balancer.evaluate(now + PERIOD, own)
    }

    #[test]
    fn cell_with_more_busy_vcpus_than_cpus_asks_after_two_periods() {
        let mut balancer = CellBalancer::default();
        assert_eq!(balancer.evaluate(0, &cell(2)), Step::Keep, "a burst");
        assert_eq!(balancer.evaluate(PERIOD, &cell(2)), Step::Seek(vec![1, 2]));
        balancer.avoid(PERIOD, 1);
        assert_eq!(balancer.evaluate(2 * PERIOD, &cell(2)), Step::Seek(vec![2]));
        assert_eq!(balancer.evaluate(PERIOD + HOLD, &cell(2)), Step::Seek(vec![1, 2]));
        balancer.moved(PERIOD + HOLD, 0);
        assert_eq!(balancer.evaluate(2 * PERIOD + HOLD, &cell(2)), Step::Keep);
        assert_eq!(second(&mut CellBalancer::default(), 0, &cell(1)), Step::Keep);
        let mut pinned = cell(2);
        pinned.vcpus.iter_mut().for_each(|one| one.is_movable = false);
        assert_eq!(second(&mut CellBalancer::default(), 0, &pinned), Step::Keep);
    }

    #[test]
    fn lender_has_an_idle_cpu_and_more_than_one_busy_vcpu_a_cpu_less() {
        let balancer = CellBalancer::default();
        let choose = |busy, loads: &[CellLoad]| balancer.choose(&cell(busy), loads).map(|one| one.lender);
        assert_eq!(choose(2, &[load(1, 1, 0, 0)]), Ok(1));
        assert_eq!(choose(2, &[load(1, 1, 1, 0)]), Err(NoMove::NoIdleCpu));
        assert_eq!(choose(2, &[load(1, 1, 0, 1)]), Err(NoMove::NoIdleCpu));
        assert_eq!(choose(2, &[load(1, 2, 1, 1), load(2, 4, 3, 0)]), Ok(2));
        assert_eq!(choose(2, &[]), Err(NoMove::NoLoad));
        // Five on four CPUs, and one on two.
        let mut wide = cell(5);
        wide.cpus = 4;
        assert_eq!(balancer.choose(&wide, &[load(1, 2, 1, 0)]), Err(NoMove::Balanced));
        assert!(balancer.choose(&wide, &[load(1, 8, 1, 0)]).is_ok());
    }

    #[test]
    fn cell_on_which_the_vm_depends_is_preferred_then_the_least_loaded() {
        let balancer = CellBalancer::default();
        let mut own = cell(3);
        let loads = [load(1, 2, 1, 0), load(2, 2, 0, 0)];
        let chosen = |own: &OwnCell<u16>| balancer.choose(own, &loads).map(|one| (one.vcpu, one.lender));
        assert_eq!(chosen(&own), Ok((0, 2)));
        own.vcpus[2].cells[0].1 = true;
        assert_eq!(chosen(&own), Ok((2, 1)));
        own.vcpus[2].is_busy = false;
        assert_eq!(chosen(&own), Ok((0, 2)));
        own.vcpus[0].cells.pop();
        assert_eq!(chosen(&own), Ok((1, 2)), "its VM may not depend on cell 2");
    }

    #[test]
    fn lender_recalls_what_a_balancer_has_moved_when_its_own_vms_need_the_cpu() {
        let mut own = cell(1);
        let lent = |vcpu, is_movable| LentVcpu {
            vcpu,
            borrower: 3,
            is_movable,
        };
        own.lent = vec![lent(7, true)];
        let mut balancer = CellBalancer::default();
        assert_eq!(balancer.evaluate(0, &own), Step::Keep);
        let recall = Step::Recall { vcpu: 7, borrower: 3 };
        assert_eq!(balancer.evaluate(PERIOD, &own), recall);
        own.lent = vec![lent(7, false)];
        assert_eq!(balancer.evaluate(2 * PERIOD, &own), Step::Keep, "a command's");
        own = cell(0);
        own.lent = vec![lent(7, true)];
        assert_eq!(second(&mut CellBalancer::default(), 0, &own), Step::Keep);
    }

    #[test]
    fn borrower_takes_a_vcpu_home_after_the_hold_when_a_cpu_is_idle_or_the_vcpu_is() {
        let mut own = cell(1);
        own.vcpus.push(OwnVcpu {
            lender: Some(1),
            ..vcpu(9, true, &[])
        });
        let mut balancer = CellBalancer::default();
        assert_eq!(second(&mut balancer, 0, &own), Step::Keep);
        assert_eq!(
            second(&mut balancer, 2 * HOLD, &own),
            Step::Keep,
            "its CPU is busy"
        );
        own.vcpus[0].is_busy = false;
        assert_eq!(second(&mut balancer, 3 * HOLD, &own), Step::Return(9));
        let mut fresh = CellBalancer::default();
        assert_eq!(
            second(&mut fresh, 3 * HOLD, &own),
            Step::Keep,
            "it has just moved"
        );
        own.vcpus[0].is_busy = true;
        own.vcpus[1].is_busy = false;
        assert_eq!(balancer.evaluate(4 * HOLD, &own), Step::Keep);
        assert_eq!(balancer.evaluate(5 * HOLD, &own), Step::Return(9), "it is idle");
        own.vcpus[1].is_movable = false;
        assert_eq!(
            balancer.evaluate(6 * HOLD, &own),
            Step::Keep,
            "a command has moved it"
        );
    }

    proptest! {
        /// A move never makes the lender the more loaded one, or leaves it without a CPU for its own.
        #[test]
        fn move_makes_loads_more_even(
            cpus in 1..9_u32,
            busy in 0..40_u16,
            loads in proptest::collection::vec((1..9_u32, 0..20_u32, 0..9_u32), 0..5)
        ) {
            let mut own = cell(busy);
            own.cpus = cpus;
            for one in &mut own.vcpus {
                one.cells = (1..6).map(|cell| (cell, cell % 2 == 0)).collect();
            }
            let loads: Vec<CellLoad> = (1..)
                .zip(loads)
                .map(|(cell, (cpus, busy, lent))| load(cell, cpus, busy, lent))
                .collect();
            if let Ok(chosen) = CellBalancer::default().choose(&own, &loads) {
                let lender = loads.iter().find(|load| load.cell == chosen.lender).expect("asked");
                prop_assert!(lender.total() < u64::from(lender.cpus));
                let after = (lender.total() + 1) * u64::from(cpus);
                prop_assert!(after < u64::from(busy) * u64::from(lender.cpus));
                prop_assert!(u64::from(busy) > u64::from(cpus));
            }
        }
    }
}
