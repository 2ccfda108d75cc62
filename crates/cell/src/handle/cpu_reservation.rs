//! Changes of the CPU time that a VM's cell reserves for it.

use std::io;

use config::VmSpec;
use registry::cluster::interface::CellRequest;
use registry::vms::Record;

use super::VmHandle;
use super::cell_requests::{ask, own_cell};

impl VmHandle {
    /// Has the VM's cell reserve the CPU time of `next`, if that differs from the record's.
    ///
    /// The record never has more than the cell, in whichever step the process dies: the next one takes the
    /// cell's reservations from the records.
    ///
    /// # Errors
    /// If the VM is in no cell of its user's, the cell refuses, or the record can't be written.
    pub(super) fn reserve_cpu(&self, record: &Record, next: &VmSpec) -> io::Result<()> {
        let (before, after) = (&record.spec, next);
        let (old, new) = (
            before.cpu_reservation_permille(),
            after.cpu_reservation_permille(),
        );
        if old == new {
            return Ok(());
        }
        let own = own_cell(record)?;
        let reserve = || {
            let request = CellRequest::ReserveCpu {
                vm: record.name.clone(),
                permille: new,
            };
            ask(own, &request)
        };
        let note = || {
            self.recorder()
                .try_change(|record| record.spec.cpu_reservation = after.cpu_reservation)
        };
        if new < old {
            note()?;
            return reserve();
        }
        reserve()?;
        note()
    }
}
