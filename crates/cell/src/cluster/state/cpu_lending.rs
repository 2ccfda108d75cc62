//! Load of the cell's CPUs, by which it lends one to a cell that decides on a move
//! ([`policy::cpu::cell_balancer`]).
//!
//! The process measures its vCPUs, and the table has those of other cells. A CPU that was promised since
//! the last measure counts as lent, as its borrower may not have recorded it yet.

use std::collections::BTreeMap;

use policy::cpu::cell_balancer::CellLoad;
use registry::cluster::interface::{CellResponse, CpuLoad, LentCpu};

use super::{Action, Client, State};

/// Busy vCPUs of the cell's VMs by the host's number of the CPU on which each ran last.
pub type BusyCpus = BTreeMap<usize, u32>;

/// Automatic loans of CPUs.
#[derive(Debug, Default)]
pub(super) struct CpuLoans {
    /// Whether cells lend CPUs by themselves.
    is_automatic: bool,
    /// None before the first measure.
    busy: Option<BusyCpus>,
    /// CPUs that were promised since the last measure.
    promised: u32,
}

/// Reason against an automatic loan.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum AutomaticLoanError {
    #[error("cell {0} lends no CPU by itself (`lend_cpus` in [scheduling] of the cluster file)")]
    Off(u16),
    #[error("cell {0} has not measured its load yet")]
    Unmeasured(u16),
    #[error("cell {0} has no idle CPU")]
    Loaded(u16),
}

impl State {
    /// The cell with or without automatic loans of CPUs.
    #[must_use]
    pub fn with_automatic_cpu_loans(mut self, is_automatic: bool) -> Self {
        self.cpu_loans.is_automatic = is_automatic;
        self
    }

    /// Takes the measure of the cell's busy vCPUs. Returns the vCPUs of other cells' VMs on its CPUs.
    pub fn set_busy_cpus(&mut self, busy: BusyCpus) -> Vec<LentCpu> {
        self.cpu_loans.busy = Some(busy);
        self.cpu_loans.promised = 0;
        self.lent_cpus(self.me.number)
    }

    /// Reports the load of the cell's CPUs to a client.
    pub(super) fn report_cpu_load(&self, client: Client) -> Action {
        let answer = match self.cpu_load() {
            Ok(load) => CellResponse::CpuLoad(load),
            Err(error) => CellResponse::Refused {
                why: error.to_string(),
            },
        };
        Action::Answer(client, answer)
    }

    /// Promises a CPU to a cell that has decided on a move.
    ///
    /// # Errors
    /// If the cell has none to lend.
    pub(super) fn promise_cpu(&mut self) -> Result<(), AutomaticLoanError> {
        let me = self.me.number;
        let CpuLoad { cpus, busy, lent, .. } = self.cpu_load()?;
        let load = CellLoad {
            cell: me,
            cpus,
            busy,
            lent,
        };
        if !load.has_idle_cpu() {
            return Err(AutomaticLoanError::Loaded(me));
        }
        self.cpu_loans.promised = self.cpu_loans.promised.saturating_add(1);
        Ok(())
    }

    fn cpu_load(&self) -> Result<CpuLoad, AutomaticLoanError> {
        let me = self.me.number;
        if !self.cpu_loans.is_automatic {
            return Err(AutomaticLoanError::Off(me));
        }
        let busy = self.cpu_loans.busy.as_ref();
        let busy = busy.ok_or(AutomaticLoanError::Unmeasured(me))?;
        let lent = self.lent_cpus(me);
        let on = |cpu: usize| {
            let lent = lent.iter().filter(|lent| lent.cpu == cpu).count();
            busy.get(&cpu).copied().unwrap_or(0) as usize + lent
        };
        let idlest = self.plan.cpus.iter().copied().min_by_key(|cpu| (on(*cpu), *cpu));
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Ok(CpuLoad {
            cpus: count(self.plan.cpus.len()),
            busy: busy.values().fold(0, |sum: u32, busy| sum.saturating_add(*busy)),
            lent: count(lent.len()).saturating_add(self.cpu_loans.promised),
            cpu: idlest.unwrap_or_default(),
        })
    }
}
