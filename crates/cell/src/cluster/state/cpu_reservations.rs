//! CPU time that a cell reserves for its VMs, which its drivers give them before others.
//!
//! The sum of a cell's reservations is bounded ([`entitlement::admit`]). A VM's reservation is in its
//! entry of the table of all cells, whose only writer is the VM's cell, and in the VM's record, from
//! which the cell's next process takes it. A VM that runs keeps its reservation, also where the next
//! process has fewer CPUs.

use policy::cpu::entitlement::{self, EntitlementError};
use policy::cpu::view::Terms;
use registry::cluster::interface::{AdmitVm, VmShare, owner_of};

use super::view::KnownVm;
use super::{Action, Client, State, Value};

/// Reason against a reservation, with the help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum CpuReservationError {
    #[error(
        "VM {vm} reserves CPU time (`cpu_reservation`), and Linux divides the CPUs of this cluster; write \
         `cpus = \"gangs\"` in [scheduling] of the cluster file, or leave it out"
    )]
    NoDrivers { vm: String },
    #[error(
        "VM {vm} reserves {} CPUs, and {reasons}; reserve less, or end a VM or its reservation",
        entitlement::cpus(*wanted_permille)
    )]
    NoRoom {
        vm: String,
        wanted_permille: u64,
        /// The reason of each cell.
        reasons: String,
    },
    #[error("VM {vm} is another user's, and only VMs of the cluster's owner reserve CPU time")]
    OtherUser { vm: String },
    #[error(
        "vCPU {vcpu} of VM {vm} runs on a CPU of cell {cell}, where Linux schedules it; move it back before"
    )]
    Away { vm: String, vcpu: u8, cell: u16 },
    #[error("VM {vm} has no place in cell {me}")]
    NoVm { vm: String, me: u16 },
}

impl State {
    /// The cell, with or without drivers of its CPUs.
    #[must_use]
    pub fn with_drivers(self, has_drivers: bool) -> Self {
        Self { has_drivers, ..self }
    }

    /// The cells of `cells` that can reserve the CPU time that a VM wants; all if it wants none.
    ///
    /// # Errors
    /// The reasons, if none can.
    pub(super) fn check_cpu_reservation(
        &self,
        host: &AdmitVm,
        mut cells: Vec<u16>,
    ) -> Result<Vec<u16>, CpuReservationError> {
        if host.share.cpu_reservation_permille == 0 {
            return Ok(cells);
        }
        self.check_may_reserve(&host.name)?;
        let mut reasons = Vec::new();
        cells.retain(|cell| match self.has_cpu_time(*cell, host.share, "") {
            Ok(()) => true,
            Err(error) => {
                reasons.push(format!("cell {cell}: {error}"));
                false
            }
        });
        if cells.is_empty() && !reasons.is_empty() {
            return Err(no_room(&host.name, host.share, reasons.join("; ")));
        }
        Ok(cells)
    }

    /// Changes the CPU time that is reserved for a VM of this cell. The answer is sent when all cells
    /// have it.
    pub(super) fn reserve_cpu(&mut self, client: Client, vm: &str, permille: u32) -> Vec<Action> {
        let value = self.with_cpu_reservation(vm, permille);
        self.change_entry(client, vm, value)
    }

    /// The entry of a VM of this cell with another reservation.
    fn with_cpu_reservation(&self, name: &str, permille: u32) -> Result<Value, CpuReservationError> {
        let me = self.me.number;
        let vm = self.vms().find(|vm| vm.name == name && vm.cell == me);
        let vm = vm.ok_or_else(|| CpuReservationError::NoVm {
            vm: name.to_owned(),
            me,
        })?;
        let share = VmShare {
            cpu_reservation_permille: permille,
            ..vm.share
        };
        if permille > 0 {
            self.check_may_reserve(name)?;
            if let Some(borrowed) = vm.borrowed_cpus.first() {
                return Err(CpuReservationError::Away {
                    vm: name.to_owned(),
                    vcpu: borrowed.vcpu,
                    cell: borrowed.cell,
                });
            }
            let checked = self.has_cpu_time(me, share, name);
            checked.map_err(|error| no_room(name, share, error.to_string()))?;
        }
        Ok(KnownVm { share, ..vm }.value())
    }

    fn check_may_reserve(&self, vm: &str) -> Result<(), CpuReservationError> {
        if owner_of(vm).is_some() {
            return Err(CpuReservationError::OtherUser { vm: vm.to_owned() });
        }
        match self.has_drivers {
            true => Ok(()),
            false => Err(CpuReservationError::NoDrivers { vm: vm.to_owned() }),
        }
    }

    /// Checks a reservation in a cell, beside those of its other VMs. `vm` is the VM's name if it is there.
    fn has_cpu_time(&self, cell: u16, share: VmShare, vm: &str) -> Result<(), EntitlementError> {
        let reserved = |share: VmShare| u64::from(share.cpu_reservation_permille);
        let is_other = |known: &KnownVm<'_>| known.cell == cell && known.name != vm;
        let of_vms: u64 = self
            .vms()
            .filter(is_other)
            .map(|known| reserved(known.share))
            .sum();
        // VMs that are about to start here.
        let claimed = self.claims.values().filter(|_| cell == self.me.number);
        let of_claims: u64 = claimed.map(|(_, _, share)| reserved(*share)).sum();
        let plan = self.cells().find(|known| known.number == cell);
        let cpus = plan.map_or(0, |known| known.plan.cpus.len());
        let terms = Terms {
            vcpus: u16::try_from(share.vcpus).unwrap_or(u16::MAX),
            reservation_permille: share.cpu_reservation_permille,
            ..Terms::default()
        };
        let cpus = u16::try_from(cpus).unwrap_or(u16::MAX);
        entitlement::admit(&terms, cpus, of_vms.saturating_add(of_claims))
    }
}

fn no_room(vm: &str, share: VmShare, reasons: String) -> CpuReservationError {
    CpuReservationError::NoRoom {
        vm: vm.to_owned(),
        wanted_permille: share.cpu_reservation_permille.into(),
        reasons,
    }
}
