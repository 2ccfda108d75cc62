//! The vCPU that a driver's CPU runs: its start, its next slice and its stop.

use super::super::entry::VcpuState;
use super::super::message::Effect;
use super::super::view::View;
use super::super::word::Mode;
use super::super::{Nanos, VcpuId, VmId};
use super::Driver;

/// The vCPU that a CPU runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Current {
    pub(super) vcpu: VcpuId,
    pub(super) mode: Mode,
    /// Start of this run, or of its present mode.
    pub(super) started: Nanos,
    /// Time up to which its run is accounted.
    pub(super) accounted_at: Nanos,
    /// Accounted time that its VM's virtual time does not have yet.
    pub(super) uncharged: Nanos,
    pub(super) slice_end: Nanos,
    /// Time at which the other CPUs of the gang have to have followed.
    pub(super) check_at: Option<Nanos>,
    /// Time at which its VM reaches its cap if all its busy vCPUs run on.
    pub(super) cap_at: Option<Nanos>,
    /// Whether the next look at the cap follows a publication by all.
    pub(super) is_cap_near: bool,
    /// Whether another CPU has left this gang.
    pub(super) is_broken: bool,
}

impl Driver {
    pub(super) fn start(&mut self, vcpu: VcpuId, mode: Mode, now: Nanos, out: &mut Vec<Effect>) {
        if let Some(queued) = self.queue.find_mut(vcpu) {
            queued.entry.state = VcpuState::Running;
            queued.has_spun &= mode == Mode::Filler;
            out.push(Effect::Entry(vcpu, queued.entry));
        }
        match mode {
            Mode::Entitled => self.counters.entitled += 1,
            _ => self.counters.fillers += 1,
        }
        self.current = Some(Current {
            vcpu,
            mode,
            started: now,
            accounted_at: now,
            uncharged: 0,
            slice_end: now + self.tunables.slice_ns,
            check_at: (mode == Mode::Entitled).then_some(now + self.tunables.straggler_timeout_ns),
            cap_at: None,
            is_cap_near: false,
            is_broken: false,
        });
    }

    /// Goes on with the same vCPU, in a new slice or in another mode. Returns what to call its gang for.
    pub(super) fn renew(&mut self, mode: Mode, now: Nanos) -> Option<(VmId, Mode)> {
        let current = self.current.as_mut()?;
        let is_new = current.mode != mode;
        if is_new {
            current.mode = mode;
            current.started = now;
            current.slice_end = now + self.tunables.slice_ns;
            current.is_broken = false;
        }
        current.check_at = (mode == Mode::Entitled).then_some(now + self.tunables.straggler_timeout_ns);
        let (vcpu, mode) = (current.vcpu, current.mode);
        if mode == Mode::Entitled
            && let Some(queued) = self.queue.find_mut(vcpu)
        {
            queued.has_spun = false;
        }
        Some((vcpu.vm, mode))
    }

    /// Takes the present vCPU off the CPU. It waits, unless it is idle by then.
    pub(super) fn stop(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        self.charge(now, view, out);
        if let Some(current) = self.current.take()
            && let Some(queued) = self.queue.find_mut(current.vcpu)
        {
            queued.entry.state = VcpuState::Waiting;
            queued.entry.since = now;
            out.push(Effect::Entry(current.vcpu, queued.entry));
        }
    }
}
