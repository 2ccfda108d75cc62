//! Guests of the simulated machine: the phases of their programs, by which vCPUs spin, halt and wake.

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
    fn account(&mut self, now: Time) {
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
                self.queue.put(at, Step::Burst(id));
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
            self.wake(id);
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
        if let Some(since) = vcpu.waits_since.take() {
            vcpu.longest_wait_ns = vcpu.longest_wait_ns.max(now - since);
        }
        let change = Change::Halt;
        self.queue.put(
            now,
            Step::Driver(self.owner(id), Event::Vcpu { vcpu: id, change }),
        );
    }

    /// Gives a halted vCPU work.
    pub(super) fn wake(&mut self, id: VcpuId) {
        let program = self.vms[usize::from(id.vm.0)].program;
        let work = program.work(&mut self.chance);
        let now = self.now;
        let vcpu = self.vcpu(id);
        vcpu.account(now);
        vcpu.phase = Phase::Compute(work);
        if vcpu.on.is_none() {
            vcpu.waits_since = Some(now);
        }
        let change = Change::Wake;
        self.queue.put(
            now,
            Step::Driver(self.owner(id), Event::Vcpu { vcpu: id, change }),
        );
        self.go_on(id);
    }
}
