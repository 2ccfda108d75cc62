//! Guests of the simulated machine: the phases of their programs, by which vCPUs spin, halt and wake.

use policy::cpu::halt_rate::Sample;
use policy::cpu::message::{Change, Event};
use policy::cpu::{CpuId, VcpuId, VmId};

use super::{Step, World};
use crate::Time;
use crate::scheduling::program::{Phase, Program};

/// Time of spinning after which the processor reports it. Ours: KVM's window of 4,096 cycles of pauses, and
/// an exit, are below it.
const SPIN_REPORT_NS: Time = 20_000;
/// Time between two reports while it goes on. Ours: a driver that has just left a gang needs one soon.
const SPIN_REPEAT_NS: Time = 200_000;

/// A vCPU, and its activity in its guest's program.
#[derive(Clone, Debug)]
pub struct Vcpu {
    /// Present phase of the program.
    pub phase: Phase,
    /// CPU that runs it.
    pub on: Option<CpuId>,
    /// Start of its run, after the costs of the switch.
    pub(super) runs_from: Time,
    /// CPU of its last run.
    pub(super) last_cpu: Option<CpuId>,
    /// Number of its present run or phase.
    pub(super) turn: u64,
    /// Time on a CPU.
    pub ran_ns: Time,
    /// Time since which it has had work and no CPU.
    pub(super) waits_since: Option<Time>,
    /// Longest time with work and without a CPU.
    pub longest_wait_ns: Time,
    /// Time that Linux adds to its run for its sleeps.
    pub(super) credit_ns: Time,
    pub(super) halts: Halts,
}

/// Halts of a vCPU, as KVM and the host's kernel count them.
#[derive(Clone, Debug)]
pub(super) struct Halts {
    count: u64,
    since: Option<Time>,
    halted_ns: Time,
    /// Count, time halted and run time at the last sample.
    sampled: (u64, Time, Time),
}

impl Halts {
    pub(super) fn new(is_awake: bool, now: Time) -> Self {
        Self {
            count: 0,
            since: (!is_awake).then_some(now),
            halted_ns: 0,
            sampled: (0, 0, 0),
        }
    }

    fn end(&mut self, now: Time) {
        self.halted_ns += self.since.take().map_or(0, |since| now - since);
    }
}

/// A VM whose vCPUs run one program.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Program of every vCPU.
    pub program: Program,
    /// vCPUs by their number.
    pub vcpus: Vec<Vcpu>,
    /// VM whose barriers it shares: itself, or the first part of the same spanning VM.
    pub(super) leader: VmId,
    pub(super) round: u64,
    pub(super) arrived: u16,
    /// Time at which its program ended.
    pub ended_at: Option<Time>,
}

impl Vcpu {
    /// Counts the run up to now.
    pub(super) fn account(&mut self, now: Time) {
        if self.phase == Phase::Halt {
            self.runs_from = self.runs_from.max(now);
        } else if self.on.is_some() && now > self.runs_from {
            let ran = now - self.runs_from;
            self.ran_ns += ran;
            self.runs_from = now;
            if let Phase::Compute(left) = &mut self.phase
                && *left != Time::MAX
            {
                *left = left.saturating_sub(ran);
            }
        }
    }

    /// Sample of the time since the last one; none as long as the vCPU has never halted.
    pub(super) fn take_sample(&mut self, now: Time, length: Time) -> Option<Sample> {
        if let Some(since) = &mut self.halts.since {
            self.halts.halted_ns += now.saturating_sub(*since);
            *since = now;
        }
        let figures = (self.halts.count, self.halts.halted_ns, self.ran_ns);
        let (halts, halted_ns, ran_ns) = std::mem::replace(&mut self.halts.sampled, figures);
        (self.halts.count > 0).then(|| Sample {
            length,
            ran: figures.2 - ran_ns,
            ready: length.saturating_sub(figures.1 - halted_ns),
            halts: figures.0 - halts,
        })
    }

    /// Ends the run on a CPU.
    pub(super) fn stop(&mut self, now: Time) {
        self.account(now);
        self.on = None;
        self.turn += 1;
        if self.phase != Phase::Halt {
            self.waits_since = Some(now);
        }
    }
}

impl World {
    /// Plans the end of a running vCPU's phase.
    pub(super) fn go_on(&mut self, id: VcpuId) {
        let program = self.vms[usize::from(id.vm.0)].program;
        let now = self.now;
        let vcpu = self.vcpu(id);
        if vcpu.on.is_none() {
            return;
        }
        vcpu.turn += 1;
        let (turn, from) = (vcpu.turn, vcpu.runs_from.max(now));
        match vcpu.phase {
            Phase::Compute(Time::MAX) | Phase::Halt => {}
            Phase::Compute(left) => self.queue.put(from + left, Step::Phase(id, turn)),
            Phase::Spin => {
                self.queue.put(from + SPIN_REPORT_NS, Step::Spun(id, turn, false));
                if let Program::Barrier {
                    halt_after_ns: Some(after),
                    ..
                } = program
                {
                    self.queue.put(from + after, Step::Spun(id, turn, true));
                }
            }
        }
    }

    /// Ends the phase of a vCPU: it goes on, halts or spins, by its program.
    pub(super) fn end_phase(&mut self, id: VcpuId) {
        let now = self.now;
        let vm = &mut self.vms[usize::from(id.vm.0)];
        let program = vm.program;
        let vcpu = &mut vm.vcpus[usize::from(id.index)];
        vcpu.account(now);
        match program {
            Program::Busy | Program::Single => {}
            Program::Bursts { idle_ns, .. } => {
                vcpu.phase = Phase::Halt;
                let at = now + 1 + self.chance.below(2 * idle_ns);
                self.queue.put(at, Step::Wake(id));
                self.halt(id);
            }
            Program::Barrier { rounds, .. } => {
                vcpu.phase = Phase::Spin;
                let leader = vm.leader;
                let members: Vec<VcpuId> = self.members(leader);
                let first = &mut self.vms[usize::from(leader.0)];
                first.arrived += 1;
                if usize::from(first.arrived) < members.len() {
                    self.go_on(id);
                    return;
                }
                first.arrived = 0;
                first.round += 1;
                let is_over = first.round >= rounds;
                for id in members {
                    if is_over {
                        self.vms[usize::from(id.vm.0)].ended_at = Some(now);
                        self.vcpu(id).phase = Phase::Halt;
                        self.halt(id);
                    } else {
                        self.open(id, program);
                    }
                }
            }
        }
    }

    /// Has a VM meet at the barriers of another one with the same program, before they run.
    pub fn join(&mut self, vm: VmId, leader: VmId) {
        self.vms[usize::from(vm.0)].leader = leader;
    }

    /// vCPUs that meet at the barriers of a VM.
    fn members(&self, leader: VmId) -> Vec<VcpuId> {
        let all = (0..)
            .map(VmId)
            .zip(&self.vms)
            .filter(|(_, vm)| vm.leader == leader);
        let vcpus =
            all.flat_map(|(vm, of)| (0..of.vcpus.len() as u16).map(move |index| VcpuId { vm, index }));
        vcpus.collect()
    }

    /// Lets a vCPU go on after a barrier.
    fn open(&mut self, id: VcpuId, program: Program) {
        let now = self.now;
        let vcpu = self.vcpu(id);
        vcpu.account(now);
        if vcpu.phase == Phase::Halt {
            match self.costs.wake_ns {
                0 => self.wake(id),
                later => self.queue.put(now + later, Step::Wake(id)),
            }
        } else {
            let work = program.work(&mut self.chance);
            self.vcpu(id).phase = Phase::Compute(work);
            self.go_on(id);
        }
    }

    /// Reports to the driver that a vCPU has spun for long, or halts it (`halts`), as a guest's lock does.
    pub(super) fn spun(&mut self, id: VcpuId, halts: bool) {
        if halts {
            self.vcpu(id).phase = Phase::Halt;
            self.halt(id);
        } else if let Some(cpu) = self.vcpu(id).on {
            let change = Change::Spin;
            self.queue
                .put(self.now, Step::Driver(cpu, Event::Vcpu { vcpu: id, change }));
            let turn = self.vcpu(id).turn;
            self.queue
                .put(self.now + SPIN_REPEAT_NS, Step::Spun(id, turn, false));
        }
    }

    /// CPU whose driver gets a vCPU's events, by its published entry.
    fn owner(&self, id: VcpuId) -> CpuId {
        self.history.now.entries[usize::from(id.vm.0)][usize::from(id.index)].cpu
    }

    fn halt(&mut self, id: VcpuId) {
        let now = self.now;
        let vcpu = self.vcpu(id);
        vcpu.account(now);
        vcpu.turn += 1;
        vcpu.halts.count += 1;
        vcpu.halts.since = Some(now);
        if let Some(since) = vcpu.waits_since.take() {
            vcpu.longest_wait_ns = vcpu.longest_wait_ns.max(now - since);
        }
        let change = Change::Halt;
        self.queue.put(
            now,
            Step::Driver(self.owner(id), Event::Vcpu { vcpu: id, change }),
        );
        self.reschedule();
    }

    /// Gives a halted vCPU work.
    pub(super) fn wake(&mut self, id: VcpuId) {
        let program = self.vms[usize::from(id.vm.0)].program;
        let work = program.work(&mut self.chance);
        let now = self.now;
        let vcpu = self.vcpu(id);
        vcpu.account(now);
        vcpu.phase = Phase::Compute(work);
        vcpu.halts.end(now);
        if vcpu.on.is_none() {
            vcpu.waits_since = Some(now);
        }
        let change = Change::Wake;
        self.queue.put(
            now,
            Step::Driver(self.owner(id), Event::Vcpu { vcpu: id, change }),
        );
        if self.linux.is_active {
            self.credit_sleeper(id);
        }
        self.go_on(id);
        self.reschedule();
    }
}
