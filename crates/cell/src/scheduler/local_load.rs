//! Load of a cell's CPUs by VMs in this cell alone, for the windows of VMs that span cells.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use policy::cpu::entry::{VcpuEntry, VcpuState};
use policy::cpu::windows::BUSY_PERMILLE;
use policy::cpu::{VcpuId, VmId};

use super::published::VmFacts;

/// Least time between two measures.
const INTERVAL: Duration = Duration::from_secs(1);
/// Measures of the threads of the cell's vCPUs.
#[derive(Debug, Default)]
pub(super) struct LocalLoad {
    measured: Option<Instant>,
    /// Time that each thread has run or waited for a CPU, nanoseconds.
    ready_ns: BTreeMap<VcpuId, u64>,
    weight: u32,
}

impl LocalLoad {
    /// The sum of the weights of the busy vCPUs of these VMs, for each of `cpus` CPUs. Measured anew once in
    /// [`INTERVAL`].
    pub(super) fn weight<'a>(
        &mut self,
        vms: impl Iterator<Item = (VmId, &'a VmFacts)>,
        cpus: usize,
        now: Instant,
    ) -> u32 {
        let passed = self.measured.map(|at| now.saturating_duration_since(at));
        if passed.is_some_and(|passed| passed < INTERVAL) {
            return self.weight;
        }
        let (mut ready_ns, mut weight) = (BTreeMap::new(), 0_u64);
        for (vm, facts) in vms {
            for (index, entry) in (0..).zip(facts.entries.iter()) {
                let Some(times) = facts.threads.read(index) else {
                    continue;
                };
                let vcpu = VcpuId { vm, index };
                let before = self.ready_ns.get(&vcpu).copied();
                ready_ns.insert(vcpu, times.ready_ns);
                let is_idle = VcpuEntry::unpack(entry.read_or_torn()).state == VcpuState::Idle;
                let is_busy = before.zip(passed).is_some_and(|(before, passed)| {
                    let ran = times.ready_ns.saturating_sub(before);
                    is_share(ran, passed)
                });
                if is_busy && !is_idle {
                    weight = weight.saturating_add(facts.terms.weight.into());
                }
            }
        }
        self.measured = Some(now);
        self.ready_ns = ready_ns;
        self.weight = u32::try_from(weight / (cpus.max(1) as u64)).unwrap_or(u32::MAX);
        self.weight
    }
}

/// Whether a thread that ran or waited for `ran_ns` of the time that has passed is a busy vCPU's.
fn is_share(ran_ns: u64, passed: Duration) -> bool {
    u128::from(ran_ns) * 1_000 >= passed.as_nanos() * u128::from(BUSY_PERMILLE)
}
