//! Idle balancer: an idle CPU looks for a vCPU whose move lets its VM run.
//!
//! It runs on the CPU that became idle, looks at the queues of its cell, nearest first, and takes a vCPU
//! only if all busy vCPUs of the VM can run at once after the move, and only if it has waited for 4 ms in
//! the same node or 6 ms in another one (Cellular Disco, section 4.2). It takes no vCPU whose reservation
//! the CPU has no room for.

use super::entry::VcpuState;
use super::gang::{Gang, is_runnable};
use super::reserved_time::{may_move, of_queue, share};
use super::topology::Topology;
use super::tunables::Tunables;
use super::view::View;
use super::word::Mode;
use super::{CpuId, Nanos, VcpuId, VmId};

/// Result of a search.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Search {
    /// vCPU to take.
    Found {
        /// vCPU whose move lets its VM run.
        vcpu: VcpuId,
        /// CPU that has it.
        owner: CpuId,
    },
    /// None now; the first that may be taken has waited long enough at this time.
    Later(Nanos),
    /// No vCPU may be taken, now or by waiting.
    Nothing,
}

/// Searches the queues of the neighbours of the idle CPU `here`, on which `is_taken` names the VMs that have
/// a vCPU there already. `first` is the number of the neighbour with which a search of more queues than the
/// limit goes on, after those of the first half of the limit.
pub fn search(
    view: &impl View,
    topology: &Topology,
    here: CpuId,
    first: u16,
    is_taken: impl Fn(VmId) -> bool,
    now: Nanos,
    tunables: &Tunables,
) -> Search {
    let neighbours = topology.neighbours(here);
    let max = usize::from(tunables.idle_search_queues_max);
    let (near, far) = neighbours.split_at(neighbours.len().min(max / 2));
    let turned = far.iter().cycle().skip(usize::from(first) % far.len().max(1));
    let mut later = None;
    for owner in near.iter().chain(turned.take(far.len().min(max - max / 2))) {
        let Some(delay) = topology.idle_delay(*owner, here, tunables) else {
            continue;
        };
        let word = view.word(*owner);
        for slot in 0..usize::from(word.queued) {
            let Some(vcpu) = view.queued(*owner, slot) else {
                continue;
            };
            let entry = view.vcpu(vcpu);
            let is_candidate = entry.state == VcpuState::Waiting
                && entry.cpu == *owner
                && !is_taken(vcpu.vm)
                && view.may_run(vcpu, here);
            // An offline CPU sends its vCPUs away itself.
            if !is_candidate || word.mode == Mode::Offline {
                continue;
            }
            let gang = Gang::of(view, vcpu.vm, now, tunables);
            let share = share(&gang.terms);
            if share > 0 && !may_move(share, of_queue(view, *owner), of_queue(view, here)) {
                continue;
            }
            let moved = Some(vcpu.index);
            if gang.is_throttled
                || gang.terms.is_gang && !is_runnable(view, &gang, here, moved, now, tunables)
            {
                continue;
            }
            let ready_at = entry.since.saturating_add(delay);
            if ready_at <= now {
                return Search::Found { vcpu, owner: *owner };
            }
            later = Some(later.map_or(ready_at, |other: Nanos| other.min(ready_at)));
        }
    }
    later.map_or(Search::Nothing, Search::Later)
}
