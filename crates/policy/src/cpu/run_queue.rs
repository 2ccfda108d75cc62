//! Run queue of one CPU.

use super::entry::{VcpuEntry, VcpuState};
use super::halt_rate::HaltRate;
use super::tunables::Tunables;
use super::word::LOAD_MAX;
use super::{Nanos, VcpuId, VmId};

/// vCPU of a queue, with the times that only its driver keeps.
#[derive(Clone, Copy, Debug)]
pub struct Queued {
    /// Name of the vCPU.
    pub vcpu: VcpuId,
    /// Its published entry.
    pub entry: VcpuEntry,
    /// Time at which it halted, while the hysteresis lasts.
    pub halted_at: Option<Nanos>,
    /// Time at which it came to this queue by the periodic balancer.
    pub moved_at: Option<Nanos>,
    /// Whether it was seen to spin since its VM last ran as a gang.
    pub has_spun: bool,
    /// Time until which its VM does not start as a gang, because a CPU did not follow.
    pub held_until: Nanos,
    /// CPUs that evacuation has tried.
    pub tried: u16,
    /// Whether it halts so often that it runs without its gang.
    pub halt_rate: HaltRate,
    /// Its VM's times, as far as the driver has seen them.
    pub seen: SeenTimes,
}

/// The greatest times of a VM that a driver has seen.
///
/// Entries are read as they are, older ones after newer ones too. A driver that believed each of them would
/// have a VM now before and now behind another one, or its reservation, and change its choice each time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SeenTimes {
    period: u32,
    used_us: u64,
    vtime: Nanos,
    /// Time at which `vtime` was seen last.
    at: Nanos,
}

impl SeenTimes {
    /// The most CPU time that was seen in an entitlement period, microseconds. It only grows within one.
    pub fn used_us(&self, period: u32) -> u64 {
        if self.period == period { self.used_us } else { 0 }
    }

    /// The greatest virtual time that was seen within `lag`, which is the greatest age of an entry.
    pub fn vtime(&self, now: Nanos, lag: Nanos) -> Nanos {
        if now.saturating_sub(self.at) < lag {
            self.vtime
        } else {
            0
        }
    }

    /// Notes the times of an entitlement period.
    pub fn note(&mut self, period: u32, used_us: u64, vtime: Nanos, now: Nanos, lag: Nanos) {
        self.used_us = used_us.max(self.used_us(period));
        self.period = period;
        if vtime >= self.vtime(now, lag) {
            (self.vtime, self.at) = (vtime, now);
        }
    }

    /// Forgets the virtual time, which is about to fall.
    pub fn forget_vtime(&mut self) {
        self.vtime = 0;
    }
}

impl Queued {
    /// Time at which it no longer belongs to its gang, if it has halted and does not wake until then.
    pub fn idle_at(&self, tunables: &Tunables) -> Option<Nanos> {
        let hysteresis = match self.halt_rate.is_high() {
            true => tunables.halt_hysteresis_high_ns,
            false => tunables.halt_hysteresis_ns,
        };
        Some(self.halted_at?.saturating_add(hysteresis))
    }

    /// A vCPU that has just come.
    pub fn new(vcpu: VcpuId, entry: VcpuEntry) -> Self {
        Self {
            vcpu,
            entry,
            halted_at: None,
            moved_at: None,
            has_spun: false,
            held_until: 0,
            tried: 0,
            halt_rate: HaltRate::new(entry.state == VcpuState::Ungated),
            seen: SeenTimes::default(),
        }
    }
}

/// vCPUs of one CPU, in slots without gaps. Its CPU's driver alone changes it.
#[derive(Clone, Debug, Default)]
pub struct RunQueue {
    slots: Vec<Queued>,
}

impl RunQueue {
    /// Number of the slot that holds a vCPU; none if it is on another queue.
    pub fn slot(&self, vcpu: VcpuId) -> Option<usize> {
        self.slots.iter().position(|one| one.vcpu == vcpu)
    }

    /// The vCPU with this name.
    pub fn find(&self, vcpu: VcpuId) -> Option<&Queued> {
        self.slots.iter().find(|one| one.vcpu == vcpu)
    }

    /// The vCPU with this name, to change it.
    pub fn find_mut(&mut self, vcpu: VcpuId) -> Option<&mut Queued> {
        self.slots.iter_mut().find(|one| one.vcpu == vcpu)
    }

    /// Whether it has a vCPU of a VM.
    pub fn has(&self, vm: VmId) -> bool {
        self.slots.iter().any(|one| one.vcpu.vm == vm)
    }

    /// Whether no vCPU can be added.
    pub fn is_full(&self) -> bool {
        self.slots.len() >= usize::from(LOAD_MAX)
    }

    /// Adds a vCPU; returns its slot.
    pub fn push(&mut self, queued: Queued) -> usize {
        self.slots.push(queued);
        self.slots.len() - 1
    }

    /// Removes the vCPU of a slot. The last one takes its place.
    pub fn remove(&mut self, slot: usize) -> Queued {
        self.slots.swap_remove(slot)
    }

    /// All vCPUs by slot.
    pub fn slots(&self) -> &[Queued] {
        &self.slots
    }

    /// All vCPUs by slot, to change them.
    pub fn slots_mut(&mut self) -> &mut [Queued] {
        &mut self.slots
    }

    /// Whether Linux runs a vCPU of it beside the chosen one.
    pub fn has_ungated(&self) -> bool {
        self.slots.iter().any(|one| one.entry.state == VcpuState::Ungated)
    }

    /// Number of vCPUs that are not idle.
    pub fn load(&self) -> u8 {
        let busy = self.slots.iter().filter(|one| one.entry.state != VcpuState::Idle);
        u8::try_from(busy.count()).unwrap_or(LOAD_MAX).min(LOAD_MAX)
    }
}
