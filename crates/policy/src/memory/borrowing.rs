//! Borrowing of memory between the cells of one host (Cellular Disco, SOSP '99, sections 5.1 and 5.2).
//!
//! The memory of a *home*, the cell whose NUMA nodes have it, is lent to a *holder*. A cell makes a
//! [`pass`] at most every [`PERIOD_MS`], after a change. Below its low water it recalls what it has lent, and
//! then borrows a chunk from each preferred home of which it has less than a chunk available. The test is
//! for each home, not for their sum (section 5.2). It returns what it does not need.
//!
//! A lender agrees while it keeps its floor ([`agrees`]). The floor is above the low water, so a lender that
//! recalls memory does not lend it again at once. Only a cell's own memory is lent, so no loan depends on
//! another loan.
//!
//! All inputs but a cell's own memory may be stale. A step is a request to the other cell, which may refuse;
//! the caller does not repeat a refused request before its inputs have changed.
//!
//! Ours, since the paper has none: returning, recall, and the test for large VMs.

mod limits;
#[cfg(test)]
mod tests;

pub use limits::{CHUNK_MIN_BYTES, FLOOR_CHUNKS, LOW_WATER_CHUNKS, Limits, PERIOD_MS};

/// The memory of the cell that makes a pass.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct OwnMemory {
    /// Free memory of the cell itself, without borrowed memory, in bytes.
    pub free_bytes: u64,
    /// Whether the cell takes no new VM, and so borrows nothing in advance.
    pub is_cordoned: bool,
}

/// Another cell as a lender.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Home {
    /// Number of the lender.
    pub cell: u16,
    /// Free memory of that cell itself, as far as this one knows, in bytes.
    pub free_bytes: u64,
    /// Memory of that home which this cell holds and no VM uses, in bytes.
    pub available_bytes: u64,
    /// The part of `available_bytes` that was lent on request, and is returned without a command.
    pub returnable_bytes: u64,
    /// Whether a request makes sense: the cell lives, is not cordoned, and has not just refused one.
    pub lends: bool,
}

/// Another cell as a borrower.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Holder {
    /// Number of the borrower.
    pub cell: u16,
    /// Memory that this cell has lent it on request and that none of its VMs uses, as far as this cell
    /// knows, in bytes.
    pub unused_bytes: u64,
}

/// A request to another cell.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Step {
    /// Requests memory that this cell has lent.
    Recall {
        /// Cell that holds the memory.
        from: u16,
        /// Maximum amount, in bytes.
        bytes: u64,
    },
    /// Requests a loan.
    Borrow {
        /// Cell whose memory it is.
        from: u16,
        /// The amount, in bytes.
        bytes: u64,
    },
    /// Returns borrowed memory.
    Return {
        /// Cell whose memory it is.
        to: u16,
        /// The amount, in bytes.
        bytes: u64,
    },
}

/// Preferences of a VM of the cell.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct VmPreference {
    /// Cells whose memory the VM may have, the preferred one first; any cell when empty.
    pub cells: Vec<u16>,
    /// Homes whose memory the VM uses.
    pub suppliers: Vec<u16>,
}

/// Whether memory of a cell may be used by a VM with this list. An empty list allows all cells.
pub fn allows(cells: &[u16], cell: u16) -> bool {
    cells.is_empty() || cells.contains(&cell)
}

/// The homes from which a cell borrows in advance, by the preferences of all its VMs (section 5.1): first
/// those that supply most VMs, then those that most VMs allow, then those that come first in the VMs' lists,
/// then by number. A home that no VM may use is left out. Without VMs all homes count alike.
pub fn combined(vms: &[VmPreference], homes: &[u16]) -> Vec<u16> {
    let mut kept: Vec<u16> = homes.to_vec();
    kept.retain(|home| vms.is_empty() || vms.iter().any(|vm| allows(&vm.cells, *home)));
    let supplied = |home: u16| vms.iter().filter(|vm| vm.suppliers.contains(&home)).count();
    let allowing = |home: u16| vms.iter().filter(|vm| allows(&vm.cells, home)).count();
    let rank = |home: u16| -> usize {
        let ranks = vms
            .iter()
            .filter_map(|vm| vm.cells.iter().position(|cell| *cell == home));
        ranks.sum()
    };
    kept.sort_by_key(|home| {
        (
            usize::MAX - supplied(*home),
            usize::MAX - allowing(*home),
            rank(*home),
            *home,
        )
    });
    kept.dedup();
    kept
}

/// The requests of a cell for one period. `preferred` are the homes from which it may borrow, in order
/// ([`combined`]).
pub fn pass(
    own: OwnMemory,
    preferred: &[u16],
    homes: &[Home],
    holders: &[Holder],
    limits: Limits,
) -> Vec<Step> {
    let mut steps = Vec::new();
    let short = limits.low_water_bytes.saturating_sub(own.free_bytes);
    let still_short = recall(short, holders, &mut steps);
    if still_short > 0 && !own.is_cordoned {
        let preferred = preferred
            .iter()
            .filter_map(|cell| homes.iter().find(|home| home.cell == *cell));
        let wanting = preferred.filter(|home| {
            let spare = home.free_bytes.saturating_sub(limits.floor_bytes);
            home.lends && home.available_bytes < limits.chunk_bytes && spare >= limits.chunk_bytes
        });
        steps.extend(wanting.map(|home| Step::Borrow {
            from: home.cell,
            bytes: limits.chunk_bytes,
        }));
    }
    for home in homes {
        let kept = match home.available_bytes > 2 * limits.chunk_bytes {
            _ if own.free_bytes >= limits.high_water_bytes() => 0,
            true => limits.chunk_bytes,
            false => continue,
        };
        let bytes = home
            .returnable_bytes
            .min(home.available_bytes.saturating_sub(kept));
        if bytes > 0 {
            steps.push(Step::Return { to: home.cell, bytes });
        }
    }
    steps
}

/// The requests by which a cell gets `short_bytes` more for a VM that it can't admit without: its own memory
/// from holders, then loans. `homes` are the lenders that the VM may use, in order. `None` if all of it
/// together does not suffice.
pub fn for_admission(
    short_bytes: u64,
    homes: &[Home],
    holders: &[Holder],
    limits: Limits,
) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    let mut missing = recall(short_bytes, holders, &mut steps);
    for home in homes.iter().filter(|home| home.lends) {
        let bytes = home.free_bytes.saturating_sub(limits.floor_bytes).min(missing);
        if bytes > 0 {
            missing -= bytes;
            steps.push(Step::Borrow {
                from: home.cell,
                bytes,
            });
        }
    }
    (missing == 0 && !steps.is_empty()).then_some(steps)
}

/// Adds recalls of up to `short` bytes, from the holder with the most unused memory first. Returns the bytes
/// that are missing still.
fn recall(mut short: u64, holders: &[Holder], steps: &mut Vec<Step>) -> u64 {
    let mut holders: Vec<&Holder> = holders.iter().collect();
    holders.sort_by_key(|holder| (u64::MAX - holder.unused_bytes, holder.cell));
    for holder in holders {
        let bytes = holder.unused_bytes.min(short);
        if bytes > 0 {
            short -= bytes;
            steps.push(Step::Recall {
                from: holder.cell,
                bytes,
            });
        }
    }
    short
}

/// Whether a lender with `free_bytes` of its own memory agrees to lend `bytes` (section 5.2: as long as it
/// has more than its floor). Ours: it keeps its floor afterwards, and lends nothing while it is cordoned.
pub fn agrees(free_bytes: u64, bytes: u64, is_cordoned: bool, limits: Limits) -> bool {
    !is_cordoned && free_bytes.saturating_sub(limits.floor_bytes) >= bytes
}

/// Whether a VM is above its fair share of its cell: more than an equal part of the cell's memory for each
/// VM, itself included. `vms` is the number of the cell's other VMs. Ours: the paper names the aim (section
/// 5.2), that small VMs keep local memory.
pub fn is_large(vm_bytes: u64, cell_bytes: u64, vms: usize) -> bool {
    let parts = (vms as u64).saturating_add(1);
    vm_bytes > cell_bytes / parts
}

/// The lenders that a VM may use, in the order of use: by the VM's list, or the one with the most free memory
/// first, so that the VM depends on few.
pub fn in_order(cells: &[u16], mut lenders: Vec<(u16, u64)>) -> Vec<(u16, u64)> {
    lenders.retain(|(cell, _)| allows(cells, *cell));
    lenders.sort_by_key(|(cell, free)| {
        let rank = cells.iter().position(|listed| listed == cell);
        (rank, if rank.is_some() { 0 } else { u64::MAX - free }, *cell)
    });
    lenders
}

/// Divides the memory of a new VM between its cell, with `own_free` bytes, and lenders with their free bytes,
/// in order. A large VM leaves the cell its low water as far as borrowed memory goes; any other VM takes the
/// cell's own memory first. `None` if the sum does not suffice.
pub fn divide(
    vm_bytes: u64,
    own: (u16, u64),
    lenders: &[(u16, u64)],
    is_large: bool,
    low_water_bytes: u64,
) -> Option<Vec<(u16, u64)>> {
    let (me, own_free) = own;
    let lendable = lenders
        .iter()
        .fold(0_u64, |sum, (_, free)| sum.saturating_add(*free));
    if own_free.saturating_add(lendable) < vm_bytes {
        return None;
    }
    let left = own_free.saturating_sub(if is_large { low_water_bytes } else { 0 });
    let of_lenders = vm_bytes.saturating_sub(left).min(lendable);
    let mut parts = vec![(me, vm_bytes - of_lenders)];
    let mut missing = of_lenders;
    for (home, free) in lenders {
        let part = (*free).min(missing);
        missing -= part;
        parts.push((*home, part));
    }
    parts.retain(|(_, bytes)| *bytes > 0);
    Some(parts)
}
