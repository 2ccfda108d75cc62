//! Linux's scheduler on the simulated machine: it runs vCPUs that no driver stops beside the chosen ones.
//!
//! It is better than the real one: it knows all CPUs at once, a CPU that is free takes a thread without
//! delay, and the thread that has run least has a CPU.

use policy::cpu::entry::{VcpuEntry, VcpuState};
use policy::cpu::message::{Change, Effect, Event};
use policy::cpu::{CpuId, VcpuId, VmId};

use super::{Step, World};
use crate::Time;
use crate::scheduling::program::Phase;

/// Time that a thread has to have run less than another one to take its CPU. Ours: about Linux's least slice
/// (`base_slice_ns`, 0.75 ms for each doubling of the CPUs).
const GRANULARITY_NS: Time = 1_500_000;
/// Time by which a thread that has slept counts as having run less than the others at most. The same source.
const SLEEPER_CREDIT_NS: Time = GRANULARITY_NS;

/// State of Linux's scheduler.
#[derive(Debug, Default)]
pub(super) struct Linux {
    /// Whether it has the choice: a vCPU has been left to it.
    pub(super) is_active: bool,
    /// Whether it has all vCPUs, without drivers.
    pub(super) is_alone: bool,
    /// Whether a look at the waiting threads is planned.
    is_planned: bool,
}

impl World {
    /// Has Linux run all vCPUs, in the place of the drivers, before VMs are added.
    #[must_use]
    pub fn with_linux(mut self) -> Self {
        self.linux.is_alone = true;
        self
    }

    /// Effects of an event without a driver: the vCPU is Linux's.
    pub(super) fn handle_alone(cpu: CpuId, event: Event, out: &mut Vec<Effect>) {
        if let Event::Add { vcpu, .. } = event {
            let state = VcpuState::Ungated;
            let entry = VcpuEntry {
                cpu,
                state,
                ..VcpuEntry::default()
            };
            out.push(Effect::Entry(vcpu, entry));
        }
    }

    /// Notes that a vCPU is about to be Linux's.
    pub(super) fn note_ungated(&mut self, effect: &Effect) {
        if let Effect::Entry(vcpu, entry) = effect
            && entry.state == VcpuState::Ungated
            && !self.is_ungated(*vcpu)
        {
            self.linux.is_active = true;
            self.credit_sleeper(*vcpu);
        }
    }

    fn is_ungated(&self, vcpu: VcpuId) -> bool {
        let entry = &self.history.now.entries[usize::from(vcpu.vm.0)][usize::from(vcpu.index)];
        entry.state == VcpuState::Ungated
    }

    /// All vCPUs that are Linux's or chosen, with work.
    fn ready(&self) -> Vec<VcpuId> {
        let all = (0..).map(VmId).zip(&self.vms).flat_map(|(vm, of)| {
            let numbered = (0..).zip(&of.vcpus);
            let busy = numbered.filter(|(_, vcpu)| vcpu.phase != Phase::Halt);
            busy.map(move |(index, _)| VcpuId { vm, index })
        });
        all.filter(|vcpu| self.is_ungated(*vcpu) || self.chosen.contains(&Some(*vcpu)))
            .collect()
    }

    /// Those without a CPU, the one that has run least first.
    fn waiting(&self) -> Vec<VcpuId> {
        let mut waiting = self.ready();
        waiting.retain(|id| {
            self.vms[usize::from(id.vm.0)].vcpus[usize::from(id.index)]
                .on
                .is_none()
        });
        waiting.sort_by_key(|id| (self.virtual_ns(*id), *id));
        waiting
    }

    /// The time that a thread has run, with the credit of its sleeps.
    fn virtual_ns(&self, id: VcpuId) -> Time {
        let vcpu = &self.vms[usize::from(id.vm.0)].vcpus[usize::from(id.index)];
        vcpu.ran_ns + vcpu.credit_ns
    }

    /// Brings a thread that has slept near the others.
    pub(super) fn credit_sleeper(&mut self, id: VcpuId) {
        let others = self.ready().into_iter().filter(|other| *other != id);
        let Some(least) = others.map(|other| self.virtual_ns(other)).min() else {
            return;
        };
        let lag = least
            .saturating_sub(SLEEPER_CREDIT_NS)
            .saturating_sub(self.virtual_ns(id));
        self.vcpu(id).credit_ns += lag;
    }

    /// Gives the CPUs to the threads that have run least.
    pub(super) fn reschedule(&mut self) {
        if !self.linux.is_active {
            return;
        }
        let now = self.now;
        let cpus = self.on_cpu.len();
        for cpu in 0..cpus {
            let Some(id) = self.on_cpu[cpu] else { continue };
            self.vcpu(id).account(now);
            if self.chosen[cpu] != Some(id) && !self.is_ungated(id) {
                self.switch(CpuId(cpu as u16), None);
            }
        }
        for id in self.waiting() {
            if let Some(cpu) = self.cpu_for(id) {
                self.put(id, cpu);
            }
        }
        if !self.linux.is_planned && !self.waiting().is_empty() {
            self.linux.is_planned = true;
            self.queue.put(now + GRANULARITY_NS / 2, Step::Reschedule);
        }
    }

    /// Looks at the waiting threads again.
    pub(super) fn reschedule_in_time(&mut self) {
        self.linux.is_planned = false;
        self.reschedule();
    }

    /// Whether a CPU runs no vCPU with work.
    fn is_free(&self, cpu: usize) -> bool {
        self.on_cpu[cpu]
            .is_none_or(|id| self.vms[usize::from(id.vm.0)].vcpus[usize::from(id.index)].phase == Phase::Halt)
    }

    /// The CPU that a thread takes: a free one, the nearest to its last, or that of the thread that has run
    /// most. A chosen vCPU may use its driver's CPU alone.
    fn cpu_for(&self, id: VcpuId) -> Option<usize> {
        let own = self.chosen.iter().position(|chosen| *chosen == Some(id));
        let own = own.filter(|_| !self.is_ungated(id));
        let last = self.vms[usize::from(id.vm.0)].vcpus[usize::from(id.index)].last_cpu;
        let cpus: Vec<usize> = match own {
            Some(cpu) => vec![cpu],
            None => (0..self.on_cpu.len()).collect(),
        };
        let free = cpus.iter().copied().filter(|cpu| self.is_free(*cpu));
        if let Some(cpu) = free.min_by_key(|cpu| last.is_none_or(|last| last.index() != *cpu)) {
            return Some(cpu);
        }
        let taken = |cpu: &usize| self.on_cpu[*cpu].map_or(0, |id| self.virtual_ns(id));
        let most = cpus.into_iter().max_by_key(taken)?;
        // An ungated vCPU makes room for the chosen one if another CPU is free.
        let has_room = own.is_some()
            && self.on_cpu[most].is_some_and(|id| self.is_ungated(id))
            && (0..self.on_cpu.len()).any(|cpu| self.is_free(cpu));
        (has_room || self.virtual_ns(id) + GRANULARITY_NS <= taken(&most)).then_some(most)
    }

    /// Puts a thread on a CPU. The thread that was there takes a free CPU if there is one.
    fn put(&mut self, id: VcpuId, cpu: usize) {
        let former = self.on_cpu[cpu].filter(|_| !self.is_free(cpu));
        self.switch(CpuId(cpu as u16), Some(id));
        let former = former.filter(|former| self.is_ungated(*former));
        let free = (0..self.on_cpu.len()).find(|cpu| self.is_free(*cpu));
        if let Some((former, free)) = former.zip(free) {
            self.switch(CpuId(free as u16), Some(former));
        }
    }

    /// Sends the drivers what their vCPUs have done since the last tick.
    pub(super) fn send_samples(&mut self) {
        let now = self.now;
        let length = self.tunables.tick_ns;
        for vm in 0..self.vms.len() {
            for index in 0..self.vms[vm].vcpus.len() {
                let entry = self.history.now.entries[vm][index];
                let vcpu = &mut self.vms[vm].vcpus[index];
                vcpu.account(now);
                let Some(sample) = vcpu.take_sample(now, length) else {
                    continue;
                };
                if entry.state == VcpuState::Waiting {
                    continue;
                }
                let vcpu = VcpuId {
                    vm: VmId(vm as u16),
                    index: index as u16,
                };
                let change = Change::Sample(sample);
                self.queue
                    .put(now, Step::Driver(entry.cpu, Event::Vcpu { vcpu, change }));
            }
        }
    }
}
