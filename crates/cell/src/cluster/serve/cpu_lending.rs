//! Moves of vCPUs between cells by decision of their cell, where the cluster file says `lend_cpus = true`.
//!
//! All decisions are [`policy::cpu::cell_balancer`]'s. A thread of the cell's process measures its vCPUs
//! once in a period, asks other cells for their loads while it has too few CPUs, and takes the step. Each
//! move has the steps of `handle::borrowed_cpus`, so that the death of either process loses nothing. The
//! decisions of a process are not recorded: the next one holds a moved vCPU anew.
//!
//! vCPUs that may move are those of VMs in one cell that their user has not pinned, to cells on which the
//! VM may depend (`cells` of its file).

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use locks::lock;
use policy::cpu::Nanos;
use policy::cpu::cell_balancer::{
    BUSY_PERMILLE, CellBalancer, CellLoad, LentVcpu, NoMove, OwnCell, OwnVcpu, PERIOD, Step,
};
use policy::memory::borrowing::allows;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse, CpuLending, CpuLoad, LentCpu};
use registry::vms::Record;
use tracing::{debug, info};

use super::adoptions::Adoptions;
use super::{Event, Events};
use crate::affinity::VcpuThread;
use crate::cluster::limits::ANSWER_TIMEOUT;
use crate::cluster::state::BusyCpus;
use crate::handle::VmHandle;
use crate::handle::cell_requests::{ask, exchange, other_answer};

/// Name of a vCPU: its VM's, and its number.
type VcpuName = (String, u8);

/// Counts of the balancer, and what other cells have asked of it.
#[derive(Debug, Default)]
pub(super) struct LendingReport {
    counts: Mutex<CpuLending>,
    /// Cells that have recalled a CPU since the last evaluation.
    recalled_by: Mutex<Vec<u16>>,
}

impl LendingReport {
    pub(super) fn counts(&self) -> CpuLending {
        *lock(&self.counts)
    }

    /// Notes that a lender has taken its CPU back.
    pub(super) fn note_recall(&self, lender: u16) {
        let mut recalled = lock(&self.recalled_by);
        // A client that repeats itself makes it no longer.
        if !recalled.contains(&lender) {
            recalled.push(lender);
        }
    }

    fn count(&self, of: impl FnOnce(&mut CpuLending) -> &mut u64) {
        let mut counts = lock(&self.counts);
        let count = of(&mut counts);
        *count = count.saturating_add(1);
    }
}

/// Starts the balancer of a cell.
///
/// # Errors
/// If the host has no threads left, or the cells can't be read.
pub(super) fn start(
    cell: u16,
    files: &Files,
    adoptions: &Adoptions,
    report: Arc<LendingReport>,
    events: &Events,
) -> io::Result<()> {
    let plan = files.plan()?;
    let cpus = plan
        .iter()
        .find(|known| known.number == cell)
        .map_or(0, |known| known.cpus.len());
    let balancer = Balancer {
        cell,
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        others: plan
            .iter()
            .map(|known| known.number)
            .filter(|number| *number != cell)
            .collect(),
        adoptions: adoptions.clone(),
        report,
        events: events.clone(),
        decisions: CellBalancer::default(),
        times: Times::default(),
        begun: Instant::now(),
    };
    std::thread::Builder::new()
        .name("cells-balancer".into())
        .spawn(move || balancer.run())?;
    info!("vCPUs move to idle CPUs of other cells by decision");
    Ok(())
}

struct Balancer {
    cell: u16,
    cpus: u32,
    /// The other cells of the host.
    others: Vec<u16>,
    adoptions: Adoptions,
    report: Arc<LendingReport>,
    events: Events,
    decisions: CellBalancer<VcpuName>,
    times: Times,
    begun: Instant,
}

impl Balancer {
    fn run(mut self) {
        loop {
            std::thread::sleep(Duration::from_nanos(PERIOD));
            if self.evaluate().is_none() {
                // The main thread has ended.
                return;
            }
        }
    }

    fn now(&self) -> Nanos {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(Nanos::MAX)
    }

    /// Measures the cell's vCPUs and takes one step. None if the cell's main thread does not answer any more.
    fn evaluate(&mut self) -> Option<()> {
        let (vcpus, busy) = self.measure();
        let (tell, told) = mpsc::channel();
        self.events.post(Event::CpusMeasured(busy, tell));
        let Ok(lent) = told.recv_timeout(ANSWER_TIMEOUT) else {
            return Some(());
        };
        let own = OwnCell {
            cpus: self.cpus,
            vcpus,
            lent: lent.into_iter().map(lent_vcpu).collect(),
        };
        let now = self.now();
        let recalled = std::mem::take(&mut *lock(&self.report.recalled_by));
        for lender in recalled {
            self.decisions.avoid(now, lender);
        }
        match self.decisions.evaluate(now, &own) {
            Step::Keep => {}
            Step::Recall {
                vcpu: (vm, vcpu),
                borrower,
            } => self.recall(vm, vcpu, borrower),
            Step::Return(vcpu) => self.take_home(&vcpu),
            Step::Seek(cells) => self.seek(now, &own, &cells),
        }
        Some(())
    }

    fn recall(&self, vm: String, vcpu: u8, borrower: u16) {
        debug!(vm, vcpu, borrower, "this cell needs the CPU that it has lent");
        let request = CellRequest::ReturnCpu {
            vm,
            vcpu,
            lender: self.cell,
        };
        self.note(ask(borrower, &request), |counts| &mut counts.recalled);
    }

    fn take_home(&self, (vm, vcpu): &VcpuName) {
        let Some(handle) = self.handle(vm) else { return };
        let returned = handle.return_by_decision(*vcpu, None);
        self.note(returned, |counts| &mut counts.returned);
    }

    /// Moves a vCPU to one of these cells, if their loads are far enough below this one's.
    fn seek(&mut self, now: Nanos, own: &OwnCell<VcpuName>, cells: &[u16]) {
        self.report.count(|counts| &mut counts.sought);
        let loads: BTreeMap<u16, CpuLoad> = cells
            .iter()
            .filter_map(|cell| Some((*cell, load_of(*cell)?)))
            .collect();
        let known: Vec<CellLoad> = loads.iter().map(|(cell, load)| cell_load(*cell, load)).collect();
        let chosen = match self.decisions.choose(own, &known) {
            Ok(chosen) => chosen,
            Err(why) => {
                return self.report.count(|counts| match why {
                    NoMove::NoLoad => &mut counts.no_load,
                    NoMove::NoIdleCpu => &mut counts.no_idle_cpu,
                    NoMove::Balanced => &mut counts.balanced,
                });
            }
        };
        let (vm, vcpu) = &chosen.vcpu;
        let (Some(handle), Some(load)) = (self.handle(vm), loads.get(&chosen.lender)) else {
            return;
        };
        let moved = handle.move_by_decision(*vcpu, chosen.lender, load.cpu);
        match &moved {
            Ok(()) => self.decisions.moved(now, chosen.vcpu.clone()),
            Err(_) => self.decisions.avoid(now, chosen.lender),
        }
        self.note(moved, |counts| &mut counts.moved);
    }

    fn note(&self, done: io::Result<()>, of: impl FnOnce(&mut CpuLending) -> &mut u64) {
        match done {
            Ok(()) => self.report.count(of),
            Err(error) => {
                debug!(%error, "a vCPU does not move between cells");
                self.report.count(|counts| &mut counts.refused);
            }
        }
    }

    fn handle(&self, vm: &str) -> Option<VmHandle> {
        let named = |handle: &VmHandle| handle.recorder().read(|record| record.name == vm) == Some(true);
        self.adoptions.served().into_iter().find(named)
    }

    /// The vCPUs of the cell's VMs, and the busy ones at home by the CPU on which they ran.
    fn measure(&mut self) -> (Vec<OwnVcpu<VcpuName>>, BusyCpus) {
        let (mut vcpus, mut busy) = (Vec::new(), BusyCpus::new());
        let mut times = Times {
            at_ms: u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX),
            of_threads: BTreeMap::new(),
        };
        for handle in self.adoptions.served() {
            // A VM that spans cells moves its vCPUs between its shards.
            let Some(Some(record)) = handle
                .recorder()
                .read(|record| record.span.is_empty().then(|| record.clone()))
            else {
                continue;
            };
            for thread in handle.vcpu_threads().unwrap_or_default() {
                let is_busy = times.is_busy(&self.times, &thread);
                let vcpu = own_vcpu(&record, thread.vcpu, is_busy, &self.others);
                if is_busy && vcpu.lender.is_none() {
                    *busy.entry(thread.last_cpu).or_default() += 1;
                }
                vcpus.push(vcpu);
            }
        }
        self.times = times;
        (vcpus, busy)
    }
}

/// A vCPU of a VM, as the VM's record places it. `others` are the other cells of the host.
fn own_vcpu(record: &Record, vcpu: u8, is_busy: bool, others: &[u16]) -> OwnVcpu<VcpuName> {
    let borrowed = record.borrowed_cpus.iter().find(|borrowed| borrowed.vcpu == vcpu);
    let may = others.iter().filter(|cell| allows(&record.spec.cells, **cell));
    OwnVcpu {
        vcpu: (record.name.clone(), vcpu),
        is_busy,
        lender: borrowed.map(|borrowed| borrowed.cell),
        is_movable: match borrowed {
            Some(borrowed) => borrowed.is_automatic,
            None => !record.pins.contains_key(&vcpu),
        },
        cells: may.map(|cell| (*cell, record.depends_on(*cell))).collect(),
    }
}

fn lent_vcpu(lent: LentCpu) -> LentVcpu<VcpuName> {
    LentVcpu {
        vcpu: (lent.vm, lent.vcpu),
        borrower: lent.cell,
        is_movable: lent.is_automatic,
    }
}

/// The load of another cell; none if it lends no CPU by itself, or does not answer.
fn load_of(cell: u16) -> Option<CpuLoad> {
    match exchange(cell, &CellRequest::CpuLoad) {
        Ok(CellResponse::CpuLoad(load)) => Some(load),
        Ok(other) => {
            debug!(error = %other_answer(&other), cell, "no load");
            None
        }
        Err(error) => {
            debug!(%error, cell, "no load");
            None
        }
    }
}

fn cell_load(cell: u16, load: &CpuLoad) -> CellLoad {
    CellLoad {
        cell,
        cpus: load.cpus,
        busy: load.busy,
        lent: load.lent,
    }
}

/// Times of threads of vCPUs at an evaluation.
#[derive(Debug, Default)]
struct Times {
    at_ms: u64,
    /// Time that each thread, by its id, has run or waited for a CPU, milliseconds.
    of_threads: BTreeMap<i32, u64>,
}

impl Times {
    /// Notes the time of a thread. Returns whether it had work for half of the time since the times before,
    /// at least.
    fn is_busy(&mut self, before: &Self, thread: &VcpuThread) -> bool {
        let wanted_ms = thread.ran_ms.saturating_add(thread.waited_ms);
        self.of_threads.insert(thread.id, wanted_ms);
        let Some(known_ms) = before.of_threads.get(&thread.id) else {
            return false;
        };
        let (wanted, passed) = (
            wanted_ms.saturating_sub(*known_ms),
            self.at_ms.saturating_sub(before.at_ms),
        );
        passed > 0 && wanted.saturating_mul(1_000) >= passed.saturating_mul(BUSY_PERMILLE.into())
    }
}

#[cfg(test)]
mod tests {
    use registry::cluster::interface::BorrowedCpu;

    use super::*;

    #[test]
    fn vcpu_is_busy_if_it_ran_or_waited_for_half_of_the_time() {
        let thread = |id, ran_ms, waited_ms| VcpuThread {
            vcpu: 0,
            id,
            cpus: Vec::new(),
            last_cpu: 0,
            ran_ms,
            waited_ms,
        };
        let mut first = Times::default();
        assert!(
            !first.is_busy(&Times::default(), &thread(1, 900, 0)),
            "not known before"
        );
        let mut second = Times {
            at_ms: 1_000,
            ..Times::default()
        };
        assert!(second.is_busy(&first, &thread(1, 1_150, 250)));
        assert!(!second.is_busy(&first, &thread(1, 1_150, 249)));
        assert!(
            !second.is_busy(&first, &thread(2, 1_150, 250)),
            "a thread of another boot"
        );
        let mut third = Times {
            at_ms: 1_000,
            ..Times::default()
        };
        assert!(
            !third.is_busy(&second, &thread(1, 5_000, 0)),
            "no time has passed"
        );
    }

    #[test]
    fn vcpus_that_no_command_has_placed_may_move_to_cells_of_their_vms() {
        let spec = config::parse("vm.toml", "image = \"x\"\ncpus = 3\ncells = [0, 2]\n").unwrap();
        let mut record = Record::new("web".to_owned(), spec, 3);
        record.cell = Some(0);
        record.pins.insert(1, vec![5]);
        let one = |record: &Record, vcpu| own_vcpu(record, vcpu, true, &[1, 2]);
        let known = one(&record, 0);
        assert_eq!(
            (known.vcpu, known.lender, known.is_movable, known.cells),
            (("web".to_owned(), 0), None, true, vec![(2, false)])
        );
        assert!(!one(&record, 1).is_movable, "it is pinned");
        let mut borrowed = BorrowedCpu {
            vcpu: 2,
            cell: 2,
            cpu: 9,
            is_automatic: true,
        };
        record.borrowed_cpus = vec![borrowed];
        let known = one(&record, 2);
        assert_eq!((known.lender, known.is_movable), (Some(2), true));
        assert_eq!(one(&record, 0).cells, [(2, true)], "it depends on cell 2 by now");
        borrowed.is_automatic = false;
        record.borrowed_cpus = vec![borrowed];
        assert!(!one(&record, 2).is_movable, "a command has moved it");
    }
}
