//! Gate: which vCPUs of a CPU are stopped, and the orders that keep it so. Pure: the caller passes the time.
//!
//! A vCPU that waits is stopped by leases of [`LEASE_MS`], each renewed at half its time. When this process
//! dies, the leases run out, and the vCPUs go on. A vCPU that is halted is not stopped: an interrupt wakes
//! it as Linux would.
//!
//! A shard refuses a stop of more than 5 s with its renewals. So a vCPU that has waited for [`STOP_MAX`]
//! runs for [`BREATH`], also beside the chosen one, and is stopped anew. The driver lets no VM wait much
//! longer than a second, so that this concerns CPUs with more than a hundred busy vCPUs, and VMs at a cap.

use std::collections::{BTreeMap, BTreeSet};

use policy::cpu::entry::VcpuState;
use policy::cpu::run_queue::Queued;
use policy::cpu::{MILLISECOND, Nanos, VcpuId, VmId};
use shard_api::launch::VCPU_STOP_MS_MAX;

/// Length of a lease, milliseconds.
pub(super) const LEASE_MS: u16 = VCPU_STOP_MS_MAX;
/// Time after which a lease is renewed. Ours: half, so that one late order loses no stop.
const RENEWAL: Nanos = LEASE_MS as Nanos * MILLISECOND / 2;
/// Longest stop with its renewals. Ours: a tenth below the shard's limit, so that no renewal is refused.
const STOP_MAX: Nanos = 4_500 * MILLISECOND;
/// Time for which a vCPU runs between two stops. Ours: a tick, enough for its thread to see that the lease
/// is over, and 0.2 percent of the longest stop.
const BREATH: Nanos = 10 * MILLISECOND;

/// Order to the thread of a vCPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum GateOrder {
    /// Use the driver's CPU only.
    Pin,
    /// Use all CPUs that the VM may use: Linux divides them.
    Spread,
    /// Stop for [`LEASE_MS`] from now.
    Stop,
    /// End a stop before its time.
    Continue,
}

/// State of a vCPU, as ordered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Ordered {
    Runs,
    /// Stopped since a time; the lease was renewed at another.
    Stopped {
        since: Nanos,
        renewed: Nanos,
    },
    /// Runs until a time, though it waits.
    Breathes {
        until: Nanos,
    },
    /// May run or be stopped, as the last order was not sent.
    Unknown,
}

/// Orders to the vCPUs of one CPU's queue.
#[derive(Debug, Default)]
pub(super) struct Gate {
    vcpus: BTreeMap<VcpuId, Ordered>,
    /// vCPUs that may use all CPUs.
    spread: BTreeSet<VcpuId>,
}

impl Gate {
    /// Appends the orders after which the vCPUs of the queue that wait are stopped, and no others; stops come
    /// first. A vCPU that has left the queue gets none: its new driver gives them.
    pub(super) fn apply(&mut self, now: Nanos, queue: &[Queued], out: &mut Vec<(VcpuId, GateOrder)>) {
        self.vcpus
            .retain(|vcpu, _| queue.iter().any(|queued| queued.vcpu == *vcpu));
        self.spread.retain(|vcpu| self.vcpus.contains_key(vcpu));
        for waits in [true, false] {
            for queued in queue {
                if (queued.entry.state == VcpuState::Waiting) == waits {
                    self.place(queued, out);
                    self.order(now, queued.vcpu, waits, out);
                }
            }
        }
    }

    /// Restricts a vCPU that has just come to its CPU, and lets one that halts often use the others too.
    fn place(&mut self, queued: &Queued, out: &mut Vec<(VcpuId, GateOrder)>) {
        let vcpu = queued.vcpu;
        let is_new = !self.vcpus.contains_key(&vcpu);
        let is_spread = queued.halt_rate.is_high();
        if !is_new && is_spread == self.spread.contains(&vcpu) {
            return;
        }
        if is_spread {
            self.spread.insert(vcpu);
            out.push((vcpu, GateOrder::Spread));
        } else {
            self.spread.remove(&vcpu);
            out.push((vcpu, GateOrder::Pin));
        }
    }

    fn order(&mut self, now: Nanos, vcpu: VcpuId, waits: bool, out: &mut Vec<(VcpuId, GateOrder)>) {
        let former = self.vcpus.get(&vcpu).copied();
        let stopped = Ordered::Stopped {
            since: now,
            renewed: now,
        };
        let (next, order) = match (former, waits) {
            (Some(Ordered::Runs), false) => return,
            (Some(Ordered::Breathes { .. }), false) => (Ordered::Runs, None),
            // The driver before this one may have stopped it.
            (None | Some(Ordered::Stopped { .. } | Ordered::Unknown), false) => {
                (Ordered::Runs, Some(GateOrder::Continue))
            }
            (None | Some(Ordered::Runs | Ordered::Unknown), true) => (stopped, Some(GateOrder::Stop)),
            (Some(Ordered::Breathes { until }), true) if now >= until => (stopped, Some(GateOrder::Stop)),
            (Some(Ordered::Breathes { .. }), true) => return,
            (Some(Ordered::Stopped { since, .. }), true) if now.saturating_sub(since) >= STOP_MAX => {
                let until = now + BREATH;
                (Ordered::Breathes { until }, Some(GateOrder::Continue))
            }
            (Some(Ordered::Stopped { since, renewed }), true) if now.saturating_sub(renewed) >= RENEWAL => {
                let renewed = now;
                (Ordered::Stopped { since, renewed }, Some(GateOrder::Stop))
            }
            (Some(Ordered::Stopped { .. }), true) => return,
        };
        self.vcpus.insert(vcpu, next);
        out.extend(order.map(|order| (vcpu, order)));
    }

    /// Time of the next order that no event brings.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        let due = |ordered: &Ordered| match *ordered {
            Ordered::Runs | Ordered::Unknown => None,
            Ordered::Stopped { since, renewed } => Some((renewed + RENEWAL).min(since + STOP_MAX)),
            Ordered::Breathes { until } => Some(until),
        };
        self.vcpus.values().filter_map(due).min()
    }

    /// Whether the vCPU is ordered to stop, so that its thread shows nothing of the guest.
    pub(super) fn is_stopped(&self, vcpu: VcpuId) -> bool {
        matches!(self.vcpus.get(&vcpu), Some(Ordered::Stopped { .. }))
    }

    /// Notes that the last order to a vCPU was not sent: it is given again at the next call.
    pub(super) fn note_unsent(&mut self, vcpu: VcpuId) {
        if let Some(ordered) = self.vcpus.get_mut(&vcpu) {
            *ordered = Ordered::Unknown;
        }
    }

    /// Whether it has given a vCPU orders.
    #[cfg(test)]
    pub(super) fn knows(&self, vcpu: VcpuId) -> bool {
        self.vcpus.contains_key(&vcpu)
    }

    /// Drops the orders to a VM, so that all are given again.
    pub(super) fn forget(&mut self, vm: VmId) {
        self.vcpus.retain(|vcpu, _| vcpu.vm != vm);
        self.spread.retain(|vcpu| vcpu.vm != vm);
    }
}

#[cfg(test)]
mod tests {
    use policy::cpu::entry::VcpuEntry;
    use policy::cpu::halt_rate::HaltRate;

    use super::*;

    fn vcpu(vm: u16) -> VcpuId {
        VcpuId {
            vm: VmId(vm),
            index: 0,
        }
    }

    fn queue(states: &[(u16, VcpuState)]) -> Vec<Queued> {
        let queued = |(vm, state): &(u16, VcpuState)| {
            let entry = VcpuEntry {
                state: *state,
                ..VcpuEntry::default()
            };
            Queued::new(vcpu(*vm), entry)
        };
        states.iter().map(queued).collect()
    }

    fn orders(gate: &mut Gate, at_ms: u64, states: &[(u16, VcpuState)]) -> Vec<(u16, GateOrder)> {
        let mut out = Vec::new();
        gate.apply(at_ms * MILLISECOND, &queue(states), &mut out);
        out.into_iter().map(|(vcpu, order)| (vcpu.vm.0, order)).collect()
    }

    use GateOrder::{Continue, Pin, Spread, Stop};
    use VcpuState::{Idle, Running, Waiting};

    #[test]
    fn waiting_vcpus_are_stopped_before_the_chosen_one_goes_on() {
        let mut gate = Gate::default();
        let first = [(1, Running), (2, Waiting), (3, Idle)];
        assert_eq!(
            orders(&mut gate, 0, &first),
            [
                (2, Pin),
                (2, Stop),
                (1, Pin),
                (1, Continue),
                (3, Pin),
                (3, Continue)
            ]
        );
        assert!(gate.is_stopped(vcpu(2)) && !gate.is_stopped(vcpu(1)));
        assert!(orders(&mut gate, 1, &first).is_empty());
        let second = [(1, Waiting), (2, Running), (3, Idle)];
        assert_eq!(orders(&mut gate, 2, &second), [(1, Stop), (2, Continue)]);
    }

    #[test]
    fn vcpu_that_halts_often_may_use_all_cpus_and_is_not_stopped_while_linux_runs_it() {
        let mut gate = Gate::default();
        orders(&mut gate, 0, &[(1, Waiting), (2, Running)]);
        let mut apply = |at_ms: u64, is_high, state| {
            let mut out = Vec::new();
            let mut queue = queue(&[(1, state), (2, Running)]);
            queue[0].halt_rate = HaltRate::new(is_high);
            gate.apply(at_ms * MILLISECOND, &queue, &mut out);
            out.into_iter()
                .map(|(vcpu, order)| (vcpu.vm.0, order))
                .collect::<Vec<_>>()
        };
        assert_eq!(apply(1, true, VcpuState::Ungated), [(1, Spread), (1, Continue)]);
        assert_eq!(apply(60, true, VcpuState::Ungated), []);
        assert_eq!(apply(61, true, Waiting), [(1, Stop)]);
        assert_eq!(apply(62, false, Waiting), [(1, Pin)]);
    }

    #[test]
    fn lease_is_renewed_at_half_its_time_while_the_vcpu_waits() {
        let mut gate = Gate::default();
        orders(&mut gate, 0, &[(1, Waiting)]);
        assert_eq!(gate.deadline(), Some(50 * MILLISECOND));
        assert!(orders(&mut gate, 49, &[(1, Waiting)]).is_empty());
        assert_eq!(orders(&mut gate, 51, &[(1, Waiting)]), [(1, Stop)]);
        assert_eq!(gate.deadline(), Some(101 * MILLISECOND));
        assert_eq!(orders(&mut gate, 60, &[(1, Running)]), [(1, Continue)]);
        assert_eq!(gate.deadline(), None);
    }

    #[test]
    fn vcpu_that_waits_for_long_runs_for_a_moment_before_the_shard_refuses() {
        let mut gate = Gate::default();
        let (mut stopped_at, mut longest, mut breaths) = (None, 0, 0);
        for now in 0..20_000 {
            for (_, order) in orders(&mut gate, now, &[(1, Waiting)]) {
                match order {
                    Pin | Spread => {}
                    Stop => {
                        let since = *stopped_at.get_or_insert(now);
                        longest = longest.max(now - since + u64::from(LEASE_MS));
                    }
                    Continue => {
                        breaths += 1;
                        stopped_at = None;
                        assert!(!gate.is_stopped(vcpu(1)));
                        assert_eq!(gate.deadline(), Some((now + 10) * MILLISECOND));
                    }
                }
            }
        }
        assert_eq!(breaths, 4);
        let total = shard_api::launch::VCPU_STOP_TOTAL_MAX.as_millis();
        assert!(u128::from(longest) < total, "{longest} ms");
    }

    #[test]
    fn order_that_was_not_sent_is_given_again() {
        let mut gate = Gate::default();
        orders(&mut gate, 0, &[(1, Waiting), (2, Running)]);
        gate.note_unsent(vcpu(1));
        assert!(!gate.is_stopped(vcpu(1)));
        assert_eq!(orders(&mut gate, 1, &[(1, Waiting), (2, Running)]), [(1, Stop)]);
        assert!(gate.is_stopped(vcpu(1)));
        assert_eq!(
            orders(&mut gate, 2, &[(1, Running), (2, Waiting)]),
            [(2, Stop), (1, Continue)]
        );
        gate.note_unsent(vcpu(1));
        assert_eq!(
            orders(&mut gate, 3, &[(1, Running), (2, Waiting)]),
            [(1, Continue)]
        );
        assert!(orders(&mut gate, 4, &[(1, Running), (2, Waiting)]).is_empty());
        // One that has left gets none.
        gate.note_unsent(vcpu(3));
        assert!(orders(&mut gate, 5, &[(1, Running), (2, Waiting)]).is_empty());
    }

    #[test]
    fn vcpu_that_has_left_the_queue_gets_no_order_and_one_that_comes_gets_all() {
        let mut gate = Gate::default();
        orders(&mut gate, 0, &[(1, Waiting), (2, Running)]);
        assert!(orders(&mut gate, 1, &[(2, Running)]).is_empty());
        assert_eq!(gate.deadline(), None);
        // It may still be stopped by the order of its former driver.
        assert_eq!(
            orders(&mut gate, 2, &[(2, Running), (1, Idle)]),
            [(1, Pin), (1, Continue)]
        );
        gate.forget(VmId(2));
        assert_eq!(
            orders(&mut gate, 3, &[(2, Running), (1, Idle)]),
            [(2, Pin), (2, Continue)]
        );
    }
}
