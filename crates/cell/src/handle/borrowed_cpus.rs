//! vCPUs that run on CPUs of other cells of the host.
//!
//! A cell lends a CPU's time by its reply to [`CellRequest::LendCpu`]. The VM depends on that cell from then
//! on. Each step leaves a state that the next process of either cell can go on from:
//!
//! 1. The lender agrees. Nothing has changed yet.
//! 2. The VM's record names the CPU. The next process of the VM's cell completes the move.
//! 3. All cells have the VM's dependency in their tables.
//! 4. The vCPU's thread runs on the CPU.
//!
//! The way back has the opposite order: the thread leaves, then the record, then the tables. The drivers of
//! the VM's cell leave such a VM to Linux: they see no CPU of another cell, and so can't run a gang on it.

use std::io;
use std::time::Duration;

use config::cpulist;
use fault_point::fault_point;
use registry::cluster::interface::{BorrowedCpu, CellRequest};
use registry::control::{PlacedBy, Placement};
use registry::update::Pin;
use registry::vms::Record;

use super::cell_requests::{ask, own_cell};
use super::pins::{drop_pin, retry};
use super::{VmChange, VmHandle};
use crate::affinity;

/// Time limit for another change of the VM to end before a vCPU returns: less than a cell's reply may take.
const RETURN_LIMIT: Duration = Duration::from_secs(1);

impl VmHandle {
    /// Has a vCPU run on a CPU of another cell. Needs [`VmHandle::begin_update`].
    ///
    /// # Errors
    /// If the other cell refuses or does not answer, or the VM's own cell does not record it. The vCPU is in
    /// its VM's cell then, or where it was.
    pub(super) fn borrow_cpu(&self, record: &Record, borrowed: BorrowedCpu) -> io::Result<Placement> {
        let own = own_cell(record)?;
        let BorrowedCpu {
            vcpu,
            cell,
            cpu,
            is_automatic,
        } = borrowed;
        let request = CellRequest::LendCpu {
            cpu,
            borrower: own,
            is_automatic,
        };
        ask(cell, &request)?;
        fault_point!(cpu_agreed);
        let is_elsewhere = |other: &BorrowedCpu| other.vcpu == vcpu && other.cell != cell;
        let ended = match record.borrowed_cpus.iter().any(is_elsewhere) {
            true => self.return_cpu(record, vcpu)?,
            false => None,
        };
        let before = self.record()?;
        let cpus = with(&before.borrowed_cpus, borrowed);
        let (began, _) = before.dependencies().move_vcpu(own, cell);
        let dropped_pin = self.record_loan(&cpus, borrowed)?;
        fault_point!(cpu_recorded);
        let moved = self.announce(&before.name, own, &cpus).and_then(|()| {
            fault_point!(cpu_announced);
            self.release_drivers()?;
            self.restrict_to(borrowed)
        });
        if let Err(error) = moved {
            self.undo(&before, own, vcpu);
            return Err(error);
        }
        fault_point!(cpu_reached);
        Ok(Placement {
            by: PlacedBy::Loan,
            cell: Some(cell),
            began: began.then_some(cell),
            ended,
            dropped_pin,
        })
    }

    /// Has a vCPU run on CPUs of its VM's cell again, if it runs on another cell's. Needs
    /// [`VmHandle::begin_update`]. Returns the cell on which the VM depends no longer, if any.
    ///
    /// # Errors
    /// If the VM does not run, or its cell does not record it.
    pub(super) fn return_cpu(&self, record: &Record, vcpu: u8) -> io::Result<Option<u16>> {
        let known = record.borrowed_cpus.iter().find(|cpu| cpu.vcpu == vcpu);
        let Some(lender) = known.map(|cpu| cpu.cell) else {
            return Ok(None);
        };
        let own = own_cell(record)?;
        self.pin_in_one_cell(&Pin {
            vcpu,
            cpus: Vec::new(),
        })?;
        fault_point!(cpu_left);
        let cpus: Vec<_> = record
            .borrowed_cpus
            .iter()
            .copied()
            .filter(|cpu| cpu.vcpu != vcpu)
            .collect();
        self.recorder()
            .try_change(|record| record.borrowed_cpus = cpus.clone())?;
        fault_point!(cpu_returned);
        self.announce(&record.name, own, &cpus)?;
        self.report_change(VmChange::Updated);
        let (_, ended) = record.dependencies().move_vcpu(lender, own);
        Ok(ended.then_some(lender))
    }

    /// Has a vCPU at home run on a CPU of another cell, by decision of its own cell.
    ///
    /// # Errors
    /// If it is pinned, away, or being moved by now, or as [`VmHandle::borrow_cpu`].
    pub(crate) fn move_by_decision(&self, vcpu: u8, cell: u16, cpu: usize) -> io::Result<()> {
        let _updating = self.try_begin_update().ok_or_else(is_being_changed)?;
        let record = self.record()?;
        let is_away = record.borrowed_cpus.iter().any(|borrowed| borrowed.vcpu == vcpu);
        if is_away || record.pins.contains_key(&vcpu) {
            return Err(io::Error::other("a command has placed the vCPU"));
        }
        let borrowed = BorrowedCpu {
            vcpu,
            cell,
            cpu,
            is_automatic: true,
        };
        self.borrow_cpu(&record, borrowed).map(drop)
    }

    /// Has a vCPU that its cell has moved to another one run at home again; if `lender` is given, only from
    /// there.
    ///
    /// # Errors
    /// If a command has placed it, it is being moved, or as [`VmHandle::return_cpu`].
    pub(crate) fn return_by_decision(&self, vcpu: u8, lender: Option<u16>) -> io::Result<()> {
        let _updating = self
            .begin_update_within(RETURN_LIMIT)
            .ok_or_else(is_being_changed)?;
        let record = self.record()?;
        let known = record.borrowed_cpus.iter().find(|borrowed| borrowed.vcpu == vcpu);
        match known {
            // It has left the lender by itself.
            None => Ok(()),
            Some(known) if lender.is_some_and(|lender| known.cell != lender) => Ok(()),
            Some(known) if !known.is_automatic => Err(io::Error::other("a command has moved the vCPU there")),
            Some(_) => self.return_cpu(&record, vcpu).map(drop),
        }
    }

    /// Restricts the threads of vCPUs to the CPUs of other cells that the record names: after a boot, whose
    /// threads are new, and after the death of a process in the midst of a move.
    pub(crate) fn restrict_to_borrowed_cpus(&self) {
        let runs = !self.state().shards().is_empty();
        let borrowed = self.recorder().read(|record| record.borrowed_cpus.clone());
        let borrowed = borrowed.filter(|_| runs);
        for borrowed in borrowed.unwrap_or_default() {
            retry(|| self.restrict_to(borrowed));
        }
    }

    /// Checks that a vCPU runs in its VM's cell, whose CPUs a pin may name.
    ///
    /// # Errors
    /// If it runs on a CPU of another cell.
    pub(super) fn check_is_home(&self, vcpu: u8) -> io::Result<()> {
        let borrowed = self.recorder().read(|record| {
            let known = record.borrowed_cpus.iter().find(|cpu| cpu.vcpu == vcpu);
            known.copied()
        });
        match borrowed.flatten() {
            None => Ok(()),
            Some(BorrowedCpu { cell, cpu, .. }) => Err(io::Error::other(format!(
                "vCPU {vcpu} runs on CPU {cpu} of cell {cell}; help: `mirrorball move` it to a CPU of the \
                 VM's own cell first"
            ))),
        }
    }

    fn restrict_to(&self, borrowed: BorrowedCpu) -> io::Result<()> {
        let shards = self.state().shards();
        if shards.is_empty() {
            return Err(io::Error::other("the VM is not running just now"));
        }
        let BorrowedCpu { vcpu, cpu, .. } = borrowed;
        shards
            .into_iter()
            .try_for_each(|shard| affinity::restrict(shard, vcpu, cpu))
    }

    /// Takes the VM from the drivers of its cell, if these have it.
    fn release_drivers(&self) -> io::Result<()> {
        let Some(drivers) = self.0.observer.get() else {
            return Ok(());
        };
        if !drivers.release() {
            return Err(io::Error::other(
                "the drivers of the VM's cell do not answer; help: try again",
            ));
        }
        self.restore_affinity_of_all();
        Ok(())
    }

    /// Goes back to the state before a move that failed.
    fn undo(&self, before: &Record, own: u16, vcpu: u8) {
        let _ = match before.borrowed_cpus.iter().find(|cpu| cpu.vcpu == vcpu) {
            Some(former) => self.restrict_to(*former),
            None => self.pin_in_one_cell(&Pin {
                vcpu,
                cpus: before.pins.get(&vcpu).cloned().unwrap_or_default(),
            }),
        };
        // The error of the move is of more use than one of these. The record counts: the next process of the
        // cell has the entry from there.
        let _ = self.recorder().try_change(|record| {
            record.borrowed_cpus = before.borrowed_cpus.clone();
            record.pins = before.pins.clone();
            record.dropped_pins = before.dropped_pins.clone();
        });
        let _ = self.announce(&before.name, own, &before.borrowed_cpus);
        self.report_change(VmChange::Updated);
    }

    /// Has the VM's cell record on which cells' CPUs its vCPUs run.
    fn announce(&self, vm: &str, own: u16, cpus: &[BorrowedCpu]) -> io::Result<()> {
        let request = CellRequest::BorrowCpus {
            vm: vm.to_owned(),
            cpus: cpus.to_vec(),
        };
        ask(own, &request)
    }

    /// Writes into the record that a vCPU runs on another cell's CPU, `cpus` being all such vCPUs. Its pin
    /// ends, which names CPUs of the VM's own cell. Returns the CPUs of the pin.
    ///
    /// # Errors
    /// If the record can't be written: then it is as before.
    fn record_loan(&self, cpus: &[BorrowedCpu], borrowed: BorrowedCpu) -> io::Result<Option<Vec<usize>>> {
        let BorrowedCpu { vcpu, cell, cpu, .. } = borrowed;
        let mut dropped = None;
        self.recorder().try_change(|record| {
            record.borrowed_cpus = cpus.to_vec();
            let pin = record.pins.get(&vcpu).map(|cpus| cpulist::write(cpus));
            let why = format!(
                "CPUs {}; vCPU {vcpu} moved to CPU {cpu} of cell {cell}",
                pin.unwrap_or_default()
            );
            dropped = drop_pin(record, vcpu, why);
        })?;
        Ok(dropped)
    }
}

fn is_being_changed() -> io::Error {
    io::Error::other("another change of the VM is under way")
}

/// The CPUs with one more, in place of the vCPU's former one.
fn with(cpus: &[BorrowedCpu], borrowed: BorrowedCpu) -> Vec<BorrowedCpu> {
    let others = cpus.iter().copied().filter(|other| other.vcpu != borrowed.vcpu);
    let mut all: Vec<_> = others.chain([borrowed]).collect();
    all.sort_unstable_by_key(|borrowed| borrowed.vcpu);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpu_has_one_borrowed_cpu_at_a_time() {
        let borrowed = |vcpu, cell, cpu| BorrowedCpu {
            vcpu,
            cell,
            cpu,
            is_automatic: false,
        };
        let one = with(&[], borrowed(1, 2, 4));
        let two = with(&one, borrowed(0, 1, 2));
        assert_eq!(two, [borrowed(0, 1, 2), borrowed(1, 2, 4)]);
        assert_eq!(
            with(&two, borrowed(1, 1, 3)),
            [borrowed(0, 1, 2), borrowed(1, 1, 3)]
        );
    }
}
