//! CPUs on which cells let vCPUs of other cells' VMs run.
//!
//! The lender agrees ([`CellRequest::LendCpu`]) and keeps no count: the entry of the VM in the table of all
//! cells says which CPUs the VM uses, and its only writer is the VM's cell. So no process of either cell can
//! die between two counts. The VM's record has the same, from which the cell's next process takes the entry.
//!
//! A VM depends on each lender from the entry on ([`CellRequest::BorrowCpus`]), which all cells have before
//! the vCPU runs there, until the entry changes after it has left. A lender that is dead or has failed is in
//! no new entry; one that fails later ends the VM.

use policy::memory::borrowing::allows;
use registry::cluster::interface::{BorrowedCpu, CellResponse, LentCpu};

use super::cpu_lending::AutomaticLoanError;
use super::view::KnownVm;
use super::{Action, Client, State, Value, cordons};

/// vCPUs of other cells' VMs on one CPU at most. Ours: so many as a queue of a driver has.
const LENT_MAX: usize = policy::cpu::word::LOAD_MAX as usize;

/// Reason against the use of a CPU by another cell, with the help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
enum CpuLoanError {
    #[error("cell {0} has not met the other cells yet; try again in a moment")]
    Starting(u16),
    #[error("cell {me} has no CPU {cpu}; it has {own}")]
    NoCpu { me: u16, cpu: usize, own: String },
    #[error("cell {0} is no other cell of this host")]
    NoCell(u16),
    #[error("{}", cordons::refusal(*cell, *by_command))]
    Cordoned { cell: u16, by_command: bool },
    #[error("CPU {cpu} has {LENT_MAX} vCPUs of other cells' VMs already; name another CPU")]
    Full { cpu: usize },
    #[error("VM {vm} has no place in cell {me}")]
    NoVm { vm: String, me: u16 },
    #[error("VM {vm} may depend on cells {allowed} only, by `cells` of its file; name a CPU of these")]
    NotAllowed { vm: String, allowed: String },
    #[error("cell {0} does not run")]
    NotMet(u16),
    #[error("{0}")]
    Automatic(AutomaticLoanError),
    #[error(
        "VM {0} reserves CPU time, which only its own cell gives; end that with `mirrorball update {0} \
         --cpu-reservation none` first"
    )]
    Reserved(String),
    #[error("a vCPU of VM {0} is named twice, or the VM has none of its number")]
    NoVcpu(String),
}

impl State {
    /// Replies to the cell that serves a VM whether a vCPU may run on a CPU of this one.
    pub(super) fn lend_cpu(
        &mut self,
        client: Client,
        cpu: usize,
        borrower: u16,
        is_automatic: bool,
    ) -> Action {
        let checked = self.check_cpu_loan(cpu, borrower);
        let promised = checked.and_then(|()| match is_automatic {
            true => self.promise_cpu().map_err(CpuLoanError::Automatic),
            false => Ok(()),
        });
        let answer = match promised {
            Ok(()) => CellResponse::Done,
            Err(error) => CellResponse::Refused {
                why: error.to_string(),
            },
        };
        Action::Answer(client, answer)
    }

    fn check_cpu_loan(&self, cpu: usize, borrower: u16) -> Result<(), CpuLoanError> {
        let me = self.me.number;
        if self.early.is_some() {
            return Err(CpuLoanError::Starting(me));
        }
        if !self.plan.cpus.contains(&cpu) {
            let own = config::cpulist::write(&self.plan.cpus);
            return Err(CpuLoanError::NoCpu { me, cpu, own });
        }
        if borrower == me || !self.is_of_this_host(borrower) {
            return Err(CpuLoanError::NoCell(borrower));
        }
        if self.takes_no_vm() {
            return Err(CpuLoanError::Cordoned {
                cell: me,
                by_command: self.is_cordoned,
            });
        }
        let users = self.lent_cpus(me);
        if users.iter().filter(|lent| lent.cpu == cpu).count() >= LENT_MAX {
            return Err(CpuLoanError::Full { cpu });
        }
        Ok(())
    }

    /// Records for a client which vCPUs of a VM of this cell run on CPUs of other cells. The answer is sent
    /// when all cells have the change.
    pub(super) fn borrow_cpus(&mut self, client: Client, vm: &str, cpus: Vec<BorrowedCpu>) -> Vec<Action> {
        let value = self.with_borrowed_cpus(vm, cpus);
        self.change_entry(client, vm, value)
    }

    /// The entry of a VM of this cell with these vCPUs on CPUs of other cells.
    fn with_borrowed_cpus(&self, name: &str, cpus: Vec<BorrowedCpu>) -> Result<Value, CpuLoanError> {
        let me = self.me.number;
        let vm = self.vms().find(|vm| vm.name == name && vm.cell == me);
        let vm = vm.ok_or_else(|| CpuLoanError::NoVm {
            vm: name.to_owned(),
            me,
        })?;
        let is_twice = |at: usize| cpus[..at].iter().any(|other| other.vcpu == cpus[at].vcpu);
        let is_wrong = |at: usize| u32::from(cpus[at].vcpu) >= vm.share.vcpus || is_twice(at);
        if (0..cpus.len()).any(is_wrong) {
            return Err(CpuLoanError::NoVcpu(name.to_owned()));
        }
        // A use that goes on may be of a cell that is dead just now.
        for new in cpus.iter().filter(|cpu| !vm.borrowed_cpus.contains(cpu)) {
            if new.cell == me || !self.is_of_this_host(new.cell) {
                return Err(CpuLoanError::NoCell(new.cell));
            }
            if vm.share.cpu_reservation_permille > 0 {
                return Err(CpuLoanError::Reserved(name.to_owned()));
            }
            if !allows(vm.cells, new.cell) {
                let allowed: Vec<String> = vm.cells.iter().map(u16::to_string).collect();
                return Err(CpuLoanError::NotAllowed {
                    vm: name.to_owned(),
                    allowed: allowed.join(", "),
                });
            }
            if self.has_failed(new.cell) || self.life(new.cell).is_none() {
                return Err(CpuLoanError::NotMet(new.cell));
            }
        }
        let borrowed_cpus = &cpus;
        Ok(KnownVm { borrowed_cpus, ..vm }.value())
    }

    fn is_of_this_host(&self, number: u16) -> bool {
        let mut cells = self.cells();
        cells.any(|cell| cell.number == number && cell.plan.host == self.plan.host)
    }

    /// The CPUs of a cell on which vCPUs of other cells' VMs run, as the table shows them.
    pub(super) fn lent_cpus(&self, lender: u16) -> Vec<LentCpu> {
        let of_vm = |vm: super::view::KnownVm<'_>| {
            let lent = vm.borrowed_cpus.iter().filter(|cpu| cpu.cell == lender);
            let lent = lent.map(|borrowed| LentCpu {
                cpu: borrowed.cpu,
                cell: vm.cell,
                vm: vm.name.to_owned(),
                vcpu: borrowed.vcpu,
                is_automatic: borrowed.is_automatic,
            });
            lent.collect::<Vec<_>>()
        };
        self.vms().flat_map(of_vm).collect()
    }
}
