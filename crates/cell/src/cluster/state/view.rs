//! The table of a cell, as cells and VMs.

use config::cluster::CellPlan;
use protocol::grant::Amounts;
use registry::cluster::interface::{BorrowedCpu, CellStatus, LentMemory, RegionGrant, Status, VmShare};

use super::{Key, RegionEntry, State, Value};

/// Amounts by cell, in the form for clients.
pub(super) fn list(amounts: &Amounts) -> Vec<LentMemory> {
    let parts = amounts.iter().map(|(cell, bytes)| (*cell, *bytes));
    parts.map(|(cell, bytes)| LentMemory { cell, bytes }).collect()
}

/// A cell in the table.
pub(super) struct KnownCell<'a> {
    pub(super) number: u16,
    pub(super) pid: u32,
    pub(super) plan: &'a CellPlan,
    pub(super) lent: &'a Amounts,
    pub(super) lent_on_request: &'a Amounts,
    pub(super) is_cordoned: bool,
    pub(super) regions: &'a [RegionEntry],
}

/// A VM in the table.
#[derive(Clone, Copy)]
pub(super) struct KnownVm<'a> {
    pub(super) name: &'a str,
    pub(super) cell: u16,
    pub(super) share: VmShare,
    pub(super) borrowed: &'a [LentMemory],
    pub(super) cells: &'a [u16],
    pub(super) borrowed_cpus: &'a [BorrowedCpu],
    pub(super) regions: &'a [RegionGrant],
}

impl KnownVm<'_> {
    /// Its entry.
    pub(super) fn value(&self) -> Value {
        Value::Vm {
            share: self.share,
            borrowed: self.borrowed.to_vec(),
            cells: self.cells.to_vec(),
            borrowed_cpus: self.borrowed_cpus.to_vec(),
            regions: self.regions.to_vec(),
        }
    }
}

impl State {
    pub(super) fn cells(&self) -> impl Iterator<Item = KnownCell<'_>> {
        let entries = self.node.entries();
        entries.filter_map(|(key, _, value)| match (key, value) {
            (
                Key::Cell(number),
                Value::Cell {
                    pid,
                    plan,
                    lent,
                    lent_on_request,
                    is_cordoned,
                    regions,
                },
            ) => Some(KnownCell {
                number: *number,
                pid: *pid,
                plan,
                lent,
                lent_on_request,
                is_cordoned: *is_cordoned,
                regions,
            }),
            _ => None,
        })
    }

    pub(super) fn vms(&self) -> impl Iterator<Item = KnownVm<'_>> {
        let entries = self.node.entries();
        entries.filter_map(|(key, cell, value)| match (key, value) {
            (
                Key::Vm(name),
                Value::Vm {
                    share,
                    borrowed,
                    cells,
                    borrowed_cpus,
                    regions,
                },
            ) => Some(KnownVm {
                name,
                cell,
                share: *share,
                borrowed,
                cells,
                borrowed_cpus,
                regions,
            }),
            _ => None,
        })
    }

    /// The host of a cell, when there are several.
    pub(super) fn host_of(&self, number: u16) -> Option<&str> {
        let mut cells = self.cells();
        let cell = cells.find(|cell| cell.number == number)?;
        cell.plan.host.as_deref()
    }

    pub(super) fn owns(&self, name: &str) -> bool {
        self.node.owns(&Key::Vm(name.to_owned()))
    }

    /// A cell's incarnation, if it runs.
    pub(super) fn life(&self, number: u16) -> Option<u32> {
        let mut known = self.node.links().chain([self.me]);
        known.find(|cell| cell.number == number).map(|cell| cell.life)
    }

    pub(super) fn status(&self) -> Status {
        let cells = self.cells().map(|cell| {
            let here = || self.vms().filter(|vm| vm.cell == cell.number);
            CellStatus {
                plan: cell.plan.clone(),
                pid: cell.pid,
                life: self.life(cell.number),
                failed: self.has_failed(cell.number),
                cordoned: cell.is_cordoned,
                given_bytes: self.given_by(&cell),
                lent: list(cell.lent),
                borrowed: self.borrowed_by(cell.number),
                lent_cpus: self.lent_cpus(cell.number),
                vcpus: here().map(|vm| vm.share.vcpus).sum(),
                vms: here().map(|vm| vm.name.to_owned()).collect(),
                lent_on_request: list(cell.lent_on_request),
                regions: self.region_status(&cell),
            }
        });
        Status {
            cells: cells.collect(),
            ready: self.node.is_ready(),
        }
    }
}
