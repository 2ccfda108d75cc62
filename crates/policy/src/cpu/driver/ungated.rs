//! vCPUs that halt often: Linux runs them, and the driver stops none of them, in these cases.
//!
//! 1. No other vCPU competes for the CPU. Then Linux alone divides it.
//! 2. The driver has chosen one of them: its slice is open to all of them.
//! 3. The driver has chosen a vCPU of a gang, and this one uses little time.
//!
//! Else it waits for its turn, as all do: one that runs half of the time beside one vCPU of a gang has the
//! other vCPUs of the gang spin for half of the time. All are charged for the time that they run. One whose
//! VM is ahead of the others by more than two slices waits in any case: a guest gains no time by halting.

use super::super::entitlement::{self, Class};
use super::super::entry::VcpuState;
use super::super::gang::Gang;
use super::super::halt_rate::Sample;
use super::super::message::Effect;
use super::super::run_queue::Queued;
use super::super::view::{Terms, View};
use super::super::windows::WindowState;
use super::super::{MICROSECOND, Nanos, VcpuId};
use super::{Driver, Seen, sight};

/// Whether a VM's vCPUs may leave their gang. A reservation, a cap and a window are kept by the order alone.
fn may_leave(terms: &Terms) -> bool {
    terms.reservation_permille == 0 && terms.cap_permille.is_none() && terms.window == WindowState::Absent
}

impl Driver {
    /// Takes what a vCPU of the queue did while no driver stopped it, and charges its VM for the time that it
    /// ran beside the chosen one.
    pub(super) fn sample(
        &mut self,
        vcpu: VcpuId,
        sample: &Sample,
        now: Nanos,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        let Some(queued) = self.queue.find_mut(vcpu) else {
            return;
        };
        queued.halt_rate.note(sample, &self.tunables);
        if queued.entry.state != VcpuState::Ungated {
            return;
        }
        let ran = sample.ran.min(sample.length);
        let gang = Gang::of(&sight!(self, view), vcpu.vm, now, &self.tunables);
        let time = entitlement::charge(ran, gang.terms.weight, gang.using());
        if let Some(queued) = self.queue.find_mut(vcpu) {
            queued.entry.vtime = queued.entry.vtime.wrapping_add(time);
            out.push(Effect::Entry(vcpu, queued.entry));
        }
        if let Some(current) = &mut self.current {
            // The chosen vCPU did not run meanwhile.
            current.uncharged = current.uncharged.saturating_sub(ran / MICROSECOND * MICROSECOND);
        }
        if self.queue.slots().iter().all(|one| !one.entry.state.is_gated()) {
            // A VM that comes later does not go before this one for all the time that no driver divided.
            let vtime = gang.rank.vtime.saturating_add(time);
            self.virtual_clock = self.virtual_clock.max(vtime);
        }
        self.raise_sleeper(vcpu.vm, now, view, out);
    }

    /// Lets vCPUs with a high rate of halts run without their gangs, and has those wait that may not.
    pub(super) fn follow_halt_rates(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        for slot in 0..self.queue.slots().len() {
            let queued = self.queue.slots()[slot];
            let is_ungated = queued.entry.state == VcpuState::Ungated;
            if queued.entry.state == VcpuState::Idle || !queued.halt_rate.is_high() && !is_ungated {
                continue;
            }
            if self.may_run_ungated(&queued, now, view) == is_ungated {
                continue;
            }
            let vcpu = queued.vcpu;
            if self.current.is_some_and(|current| current.vcpu == vcpu) {
                self.stop(now, view, out);
            }
            if let Some(queued) = self.queue.find_mut(vcpu) {
                queued.entry.state = match is_ungated {
                    false => VcpuState::Ungated,
                    true => VcpuState::Waiting,
                };
                queued.entry.since = now;
                out.push(Effect::Entry(vcpu, queued.entry));
            }
            self.counters.gate_changes += 1;
        }
    }

    /// Whether Linux may run a vCPU beside the chosen one.
    fn may_run_ungated(&self, queued: &Queued, now: Nanos, view: &impl View) -> bool {
        let is_eligible = |one: &Queued| one.halt_rate.is_high() && may_leave(&view.terms(one.vcpu.vm));
        if !is_eligible(queued) {
            return false;
        }
        let mut slots = self.queue.slots().iter();
        if !slots.any(|one| one.entry.state.is_gated() && !is_eligible(one)) {
            return true;
        }
        let Some(current) = self.current else { return false };
        let is_open = current.vcpu != queued.vcpu && self.queue.find(current.vcpu).is_some_and(is_eligible);
        // A reservation and a window have the whole CPU, and a gang nearly.
        if !is_open && (self.word.class != Class::Shared || !queued.halt_rate.is_light()) {
            return false;
        }
        // It goes on for a slice more, so that it does not stop and go on at each sample.
        let is_ungated = queued.entry.state == VcpuState::Ungated;
        let slack = self.tunables.slice_ns << u32::from(is_ungated);
        let vtime = Gang::of(&sight!(self, view), queued.vcpu.vm, now, &self.tunables)
            .rank
            .vtime;
        vtime <= self.virtual_clock.saturating_add(slack)
    }
}
