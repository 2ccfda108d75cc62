//! Gangs: the total order of VMs, and whether the busy vCPUs of one can run at the same time.
//!
//! A VM's busy vCPUs run together (Cellular Disco, section 4.3). The paper names neither the priority nor
//! the order of equals. Ours is total, and a function of published entries alone, so that drivers with the
//! same entries have the same order: class, virtual time, waiting since, VM's number.

use super::entitlement::{Class, Standing, period};
use super::entry::VcpuState;
use super::set::CpuSet;
use super::tunables::Tunables;
use super::view::{Terms, View};
use super::word::{Mode, Word};
use super::{CpuId, Nanos, VcpuId, VmId};

/// Place of a VM in the order. The lesser one goes first.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Rank {
    /// Class by its reservation and its window: a reserved VM goes before one in its window, and that before
    /// a shared one.
    pub class: Class,
    /// CPU time over weight, nanoseconds.
    pub vtime: Nanos,
    /// Earliest time since which one of its busy vCPUs has waited or run uncharged.
    pub since: Nanos,
    /// Its number, which decides between equals.
    pub vm: VmId,
}

/// A VM as its entries show it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Gang {
    /// Its place in the order.
    pub rank: Rank,
    /// Weight, reservation and cap.
    pub terms: Terms,
    /// Number of its vCPUs that run together.
    pub busy: u16,
    /// Number of its vCPUs that Linux runs without the others.
    pub ungated: u16,
    /// Whether two busy vCPUs are on one CPU, so that they can't run together.
    pub is_doubled: bool,
    /// CPU time of its vCPUs in this period, microseconds.
    pub used_us: u64,
    /// Whether it has reached its cap.
    pub is_throttled: bool,
    /// CPU time up to its cap in this period, microseconds, if it has a cap.
    pub left_us: Option<u64>,
}

impl Gang {
    /// The VM in a view, at a time.
    pub fn of(view: &impl View, vm: VmId, now: Nanos, tunables: &Tunables) -> Self {
        let terms = view.terms(vm);
        let number = period(now, tunables.entitlement_period_ns);
        let mut rank = Rank {
            since: Nanos::MAX,
            vm,
            ..Rank::default()
        };
        let (mut busy, mut ungated, mut used_us, mut is_doubled) = (0, 0, 0_u64, false);
        let mut cpus = CpuSet::default();
        for index in 0..terms.vcpus {
            let entry = view.vcpu(VcpuId { vm, index });
            rank.vtime = rank.vtime.wrapping_add(entry.vtime);
            used_us += entry.used_us(number);
            ungated += u16::from(entry.state == VcpuState::Ungated);
            if entry.state.is_gated() {
                busy += 1;
                rank.since = rank.since.min(entry.since);
                is_doubled |= !cpus.insert(entry.cpu);
            }
        }
        // A part may be negative after an adjustment. A sum is that only while another part is stale.
        rank.vtime = rank.vtime.cast_signed().max(0).cast_unsigned();
        let mut gang = Self {
            rank,
            terms,
            busy,
            ungated,
            is_doubled,
            used_us,
            is_throttled: false,
            left_us: None,
        };
        gang.set_standing(tunables);
        gang
    }

    /// Counts at least so much time as used in this period, and as virtual time.
    pub fn raise(&mut self, used_us: u64, vtime: Nanos, tunables: &Tunables) {
        self.rank.vtime = self.rank.vtime.max(vtime);
        if used_us > self.used_us {
            self.used_us = used_us;
            self.set_standing(tunables);
        }
    }

    /// Its class and its cap by the time that it has used.
    fn set_standing(&mut self, tunables: &Tunables) {
        let standing = Standing::of(&self.terms, self.used_us, tunables.entitlement_period_ns);
        self.rank.class = standing.class;
        self.is_throttled = standing.is_throttled;
        self.left_us = standing.left_us;
    }

    /// Number of its vCPUs that use CPU time.
    pub fn using(&self) -> u16 {
        self.busy.saturating_add(self.ungated)
    }

    /// Whether its busy vCPUs have to run together: it is a gang of several, each on its own CPU.
    pub fn is_bound(&self) -> bool {
        self.terms.is_gang && self.busy > 1 && !self.is_doubled
    }
}

/// Whether a CPU runs the VM of `rank`, or yields to it: it is idle, fills a hole, or runs a VM of a later
/// rank. A CPU that is gone or stalled counts as one that yields, so that it holds no gang up forever.
///
/// `known` keeps the last rank that was computed, because most CPUs of a gang run the same other gang.
pub fn admits(
    view: &impl View,
    word: &Word,
    rank: &Rank,
    known: &mut Option<Rank>,
    now: Nanos,
    tunables: &Tunables,
) -> bool {
    match word.mode {
        Mode::Offline | Mode::Idle | Mode::Filler => true,
        Mode::Entitled => {
            word.vm == rank.vm
                || (rank.class, rank.vtime) < (word.class, word.vtime)
                || word.is_stalled(now, tunables.stall_timeout_ns)
                // The word may be older than the last charge of the VM that it names.
                || match known {
                    Some(other) if other.vm == word.vm => *rank < *other,
                    _ => *rank < *known.insert(Gang::of(view, word.vm, now, tunables).rank),
                }
        }
    }
}

/// Whether a VM is gang-runnable (section 4.3): each busy vCPU runs, or waits on a CPU that yields to it.
/// vCPUs on the CPU `here` are about to be chosen, and the vCPU `moved` about to come there.
pub fn is_runnable(
    view: &impl View,
    gang: &Gang,
    here: CpuId,
    moved: Option<u16>,
    now: Nanos,
    tunables: &Tunables,
) -> bool {
    let vm = gang.rank.vm;
    let mut known = None;
    (0..gang.terms.vcpus).all(|index| {
        let entry = view.vcpu(VcpuId { vm, index });
        !entry.state.is_gated()
            || moved == Some(index)
            || entry.cpu == here
            || admits(view, &view.word(entry.cpu), &gang.rank, &mut known, now, tunables)
    })
}

/// Candidate of one CPU's queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// VM of the vCPU in that slot.
    pub gang: Gang,
    /// Slot of the queue.
    pub slot: usize,
    /// Whether the CPU runs it by its VM's rank, in a slice that has not ended and a gang that is whole.
    pub is_kept: bool,
    /// Whether it may not start as a gang now: a CPU that should have followed did not.
    pub is_held: bool,
    /// Whether it was seen to spin without its gang.
    pub has_spun: bool,
}

/// Chooses what a CPU runs: a slot of its queue and the mode. `None` for nothing.
///
/// The rules, the first that applies wins:
/// 1. reservation: the first VM in its reservation that can run as a gang, else the first one in it;
/// 2. window: a VM that spans cells, in its window;
/// 3. gang: the first VM whose busy vCPUs can all run, or that the CPU runs in a whole gang until the slice
///    ends, or that is no gang;
/// 4. filling: the first VM that was not seen to spin.
///
/// `candidates` is sorted here.
pub fn choose(
    view: &impl View,
    candidates: &mut [Candidate],
    here: CpuId,
    now: Nanos,
    tunables: &Tunables,
) -> Option<(usize, Mode)> {
    candidates.sort_unstable_by_key(|candidate| (candidate.gang.rank, candidate.slot));
    let free = || candidates.iter().filter(|one| !one.gang.is_throttled);
    let runs = |one: &&Candidate| {
        one.is_kept
            || !one.gang.is_bound()
            || (!one.is_held && is_runnable(view, &one.gang, here, None, now, tunables))
    };
    let mut reserved = free().filter(|one| one.gang.rank.class == Class::Reserved);
    if let Some(first) = reserved.clone().next() {
        let one = reserved.find(runs).unwrap_or(first);
        return Some((one.slot, Mode::Entitled));
    }
    if let Some(one) = free().find(runs) {
        return Some((one.slot, Mode::Entitled));
    }
    let filler = free().find(|one| !one.has_spun)?;
    Some((filler.slot, Mode::Filler))
}
