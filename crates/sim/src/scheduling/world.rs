//! The simulated machine: CPUs with drivers, messages between them, and virtual time.

mod guest;
mod linux;

use std::collections::HashMap;
use std::sync::Arc;

use policy::cpu::dependency::{Dependencies, Use};
use policy::cpu::driver::Driver;
use policy::cpu::message::{Effect, Event, Message, Refusal};
use policy::cpu::set::CpuSet;
use policy::cpu::topology::Topology;
use policy::cpu::tunables::Tunables;
use policy::cpu::view::Terms;
use policy::cpu::word::Mode;
use policy::cpu::{CpuId, VcpuId, VmId};

use self::guest::Halts;
pub use self::guest::{Vcpu, Vm};
use self::linux::Linux;
use super::costs::Costs;
use super::program::{Phase, Program};
use super::published::{History, VmFacts};
use super::round_robin::RoundRobin;
use crate::chance::Chance;
use crate::queue::Queue;
use crate::{MILLISECOND, SECOND, Time};

/// Time of the drivers' clock at the start: a host has run for a day, so that a jump back has room.
const CLOCK_START_NS: i64 = 86_400 * SECOND as i64;

/// Messages from one driver to another between two ticks, on the average over all pairs, from which they are
/// a storm. Ours: twice what the calls of gangs and their answers may be, and as much for all others.
const MESSAGES_MAX: u64 = 64;

/// A future event.
#[derive(Debug)]
enum Step {
    /// A driver takes an event.
    Driver(CpuId, Event),
    /// A driver's timer; an older one than the last set is void.
    Timer(CpuId, u64),
    /// A vCPU's phase ends, unless it was stopped since.
    Phase(VcpuId, u64),
    /// A vCPU has spun for so long that it is reported, or halts.
    Spun(VcpuId, u64, bool),
    /// A halted vCPU has work again.
    Wake(VcpuId),
    /// Linux looks at its waiting threads.
    Reschedule,
    /// The state of this tick is kept, and checked.
    Tick,
}

/// Move of a vCPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Move {
    /// Virtual time at which the former CPU sent it.
    pub at: Time,
    /// vCPU that moved.
    pub vcpu: VcpuId,
    /// CPU that gave it.
    pub from: CpuId,
    /// CPU that took it.
    pub to: CpuId,
}

/// Machine, VMs and future events.
pub struct World {
    /// Virtual time, nanoseconds since the start.
    pub now: Time,
    topology: Arc<Topology>,
    tunables: Tunables,
    costs: Costs,
    /// Driver of each CPU.
    pub drivers: Vec<Driver>,
    /// Schedulers in their place.
    robins: Option<Vec<RoundRobin>>,
    /// State that they publish.
    pub history: History,
    /// VMs by their number.
    pub vms: Vec<Vm>,
    /// Moves so far.
    pub moves: Vec<Move>,
    /// Orders that were refused.
    pub refused: Vec<(VcpuId, Refusal)>,
    /// Messages between drivers.
    pub messages: u64,
    /// The most messages between two ticks so far.
    pub messages_of_a_tick: u64,
    /// Messages at the last tick.
    messages_before: u64,
    /// First rule that was broken.
    pub violation: Option<String>,
    /// CPUs without a driver's thread until a time.
    stalled: HashMap<CpuId, Time>,
    /// Difference of the drivers' clock from virtual time.
    skew_ns: i64,
    timers: Vec<u64>,
    /// The vCPU that each driver has chosen.
    chosen: Vec<Option<VcpuId>>,
    linux: Linux,
    /// The vCPU on each CPU, and the last one there.
    on_cpu: Vec<Option<VcpuId>>,
    last_vcpu: Vec<Option<VcpuId>>,
    /// Last delivery between two CPUs: messages stay in order.
    delivered: HashMap<(CpuId, CpuId), Time>,
    queue: Queue<Step>,
    chance: Chance,
    lag_max: u64,
    effects: Vec<Effect>,
}

impl World {
    /// A machine without VMs. Drivers read the state of 0 to `lag_max` ticks ago, at random.
    pub fn new(topology: Topology, tunables: Tunables, costs: Costs, lag_max: u64, seed: u64) -> Self {
        let topology = Arc::new(topology);
        let cpus = topology.cpus();
        let driver = |cpu| Driver::new(CpuId(cpu), Arc::clone(&topology), tunables);
        let mut world = Self {
            now: 0,
            drivers: (0..cpus).map(driver).collect(),
            robins: None,
            history: History::new(usize::from(cpus), lag_max as usize),
            topology,
            tunables,
            costs,
            vms: Vec::new(),
            moves: Vec::new(),
            refused: Vec::new(),
            messages: 0,
            messages_of_a_tick: 0,
            messages_before: 0,
            violation: None,
            stalled: HashMap::new(),
            skew_ns: CLOCK_START_NS,
            timers: vec![0; usize::from(cpus)],
            chosen: vec![None; usize::from(cpus)],
            linux: Linux::default(),
            on_cpu: vec![None; usize::from(cpus)],
            last_vcpu: vec![None; usize::from(cpus)],
            delivered: HashMap::new(),
            queue: Queue::default(),
            chance: Chance::new(seed),
            lag_max,
            effects: Vec::new(),
        };
        for cpu in 0..cpus {
            world.queue.put(0, Step::Driver(CpuId(cpu), Event::Timer));
        }
        world.queue.put(tunables.tick_ns, Step::Tick);
        world
    }

    /// Has each CPU alternate between its vCPUs, in the place of the drivers, before VMs are added.
    #[must_use]
    pub fn with_round_robin(mut self) -> Self {
        self.robins = Some(
            (0..self.topology.cpus())
                .map(|cpu| RoundRobin::new(CpuId(cpu)))
                .collect(),
        );
        self
    }

    /// Adds a VM whose vCPUs start on these CPUs, each at a random time within `stagger_ns`.
    pub fn add(&mut self, terms: Terms, program: Program, cpus: &[CpuId], stagger_ns: Time) -> VmId {
        let vm = VmId(self.vms.len() as u16);
        let mut dependencies = Dependencies::default();
        for cpu in cpus {
            dependencies.begin(self.topology.place(*cpu).cell, Use::Cpu, 1);
        }
        let vcpus = u16::try_from(cpus.len()).unwrap_or(u16::MAX);
        self.history.add(VmFacts {
            terms: Terms { vcpus, ..terms },
            cpus: CpuSet::ALL,
            dependencies,
        });
        let mut all = Vec::new();
        for (index, cpu) in (0..vcpus).zip(cpus) {
            let phase = program.first(index, &mut self.chance);
            let is_awake = phase != Phase::Halt;
            let at = self.now + self.chance.below(stagger_ns + 1);
            all.push(Vcpu {
                phase,
                on: None,
                runs_from: 0,
                last_cpu: Some(*cpu),
                turn: 0,
                ran_ns: 0,
                waits_since: is_awake.then_some(at),
                longest_wait_ns: 0,
                credit_ns: 0,
                halts: Halts::new(is_awake, self.now),
            });
            let vcpu = VcpuId { vm, index };
            self.queue
                .put(at, Step::Driver(*cpu, Event::Add { vcpu, is_awake }));
        }
        self.vms.push(Vm {
            program,
            vcpus: all,
            leader: vm,
            round: 0,
            arrived: 0,
            ended_at: None,
        });
        vm
    }

    /// Lets a VM run on these CPUs only.
    pub fn confine(&mut self, vm: VmId, cpus: CpuSet) {
        self.history.vms[usize::from(vm.0)].cpus = cpus;
    }

    /// Has a driver take an event at a time.
    pub fn send(&mut self, at: Time, cpu: CpuId, event: Event) {
        self.queue.put(at, Step::Driver(cpu, event));
    }

    /// Stops a driver's thread until a time. The CPU goes on with its vCPU, as Linux would.
    pub fn stall(&mut self, cpu: CpuId, until: Time) {
        self.stalled.insert(cpu, until);
    }

    /// Lets the clock of all drivers jump.
    pub fn jump(&mut self, by_ns: i64) {
        self.skew_ns += by_ns;
    }

    /// A random number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.chance.below(bound)
    }

    /// The vCPU that a CPU runs, and how.
    pub fn running(&self, cpu: CpuId) -> Option<(VcpuId, Mode)> {
        self.drivers[cpu.index()].running()
    }

    /// The terms of a VM, to change them.
    pub fn terms_mut(&mut self, vm: VmId) -> &mut Terms {
        &mut self.history.vms[usize::from(vm.0)].terms
    }

    /// Time on CPUs of a VM so far.
    pub fn ran_ns(&self, vm: VmId) -> Time {
        let all = self.vms[usize::from(vm.0)].vcpus.iter();
        all.map(|vcpu| {
            vcpu.ran_ns
                + if vcpu.on.is_some() {
                    self.now.saturating_sub(vcpu.runs_from)
                } else {
                    0
                }
        })
        .sum()
    }

    /// Barriers that a VM has passed.
    pub fn rounds(&self, vm: VmId) -> u64 {
        self.vms[usize::from(vm.0)].round
    }

    /// Runs to a time, or until all programs that end have ended.
    pub fn run(&mut self, until: Time) {
        while self.violation.is_none() {
            let Some((at, step)) = self.queue.take() else {
                break;
            };
            if at > until {
                self.queue.put(at, step);
                break;
            }
            self.now = at;
            self.step(step);
            let ends = |vm: &Vm| matches!(vm.program, Program::Barrier { .. });
            if self.vms.iter().any(ends)
                && self
                    .vms
                    .iter()
                    .filter(|vm| ends(vm))
                    .all(|vm| vm.ended_at.is_some())
            {
                return;
            }
        }
        self.now = self.now.max(until);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Driver(cpu, event) => self.drive(cpu, event),
            Step::Timer(cpu, number) => {
                if self.timers[cpu.index()] == number {
                    self.drive(cpu, Event::Timer);
                }
            }
            Step::Phase(vcpu, turn) => {
                if self.vcpu(vcpu).turn == turn {
                    self.end_phase(vcpu);
                }
            }
            Step::Spun(vcpu, turn, halts) => {
                if self.vcpu(vcpu).turn == turn && self.vcpu(vcpu).phase == Phase::Spin {
                    self.spun(vcpu, halts);
                }
            }
            Step::Wake(vcpu) => self.wake(vcpu),
            Step::Reschedule => self.reschedule_in_time(),
            Step::Tick => {
                self.messages_before = self.messages;
                self.history.tick();
                self.send_samples();
                self.check();
                self.queue.put(self.now + self.tunables.tick_ns, Step::Tick);
            }
        }
    }

    fn vcpu(&mut self, vcpu: VcpuId) -> &mut Vcpu {
        &mut self.vms[usize::from(vcpu.vm.0)].vcpus[usize::from(vcpu.index)]
    }

    fn drive(&mut self, cpu: CpuId, event: Event) {
        if let Some(until) = self.stalled.get(&cpu).copied() {
            if self.now < until {
                self.queue.put(until, Step::Driver(cpu, event));
                return;
            }
            self.stalled.remove(&cpu);
        }
        let lag = self.chance.below(self.lag_max + 1) as usize;
        let raw = self.now.saturating_add_signed(self.skew_ns);
        let mut effects = std::mem::take(&mut self.effects);
        let view = self.history.lagging(lag);
        match &mut self.robins {
            None if self.linux.is_alone => Self::handle_alone(cpu, event, &mut effects),
            None => self.drivers[cpu.index()].handle(raw, event, &view, &mut effects),
            Some(robins) => robins[cpu.index()].handle(raw, event, self.tunables.slice_ns, &mut effects),
        }
        for effect in effects.drain(..) {
            self.apply(cpu, effect);
        }
        self.effects = effects;
        self.reschedule();
    }

    fn apply(&mut self, cpu: CpuId, effect: Effect) {
        self.note_move(cpu, &effect);
        self.note_ungated(&effect);
        self.history.now.apply(cpu, &effect);
        match effect {
            Effect::Run(vcpu) => {
                self.chosen[cpu.index()] = vcpu;
                if !self.linux.is_active {
                    self.switch(cpu, vcpu);
                }
            }
            Effect::Send { to, message } => {
                self.count_message();
                let last = self.delivered.entry((cpu, to)).or_default();
                let jitter = self.chance.below(self.costs.message_ns / 2 + 1);
                *last = (self.now + self.costs.message_ns + jitter).max(*last);
                let event = Event::Message { from: cpu, message };
                self.queue.put(*last, Step::Driver(to, event));
            }
            Effect::Timer(raw) => {
                self.timers[cpu.index()] += 1;
                let at = raw.saturating_add_signed(-self.skew_ns).max(self.now);
                self.queue.put(at, Step::Timer(cpu, self.timers[cpu.index()]));
            }
            Effect::Refused(vcpu, refusal) => self.refused.push((vcpu, refusal)),
            Effect::Word(_) | Effect::Entry(..) | Effect::Slot(..) | Effect::Load { .. } => {}
        }
    }

    /// Counts a message. Messages that multiply without bound would keep virtual time from passing.
    fn count_message(&mut self) {
        self.messages += 1;
        let of_tick = self.messages - self.messages_before;
        self.messages_of_a_tick = self.messages_of_a_tick.max(of_tick);
        let pairs = (self.drivers.len() as u64).pow(2);
        if of_tick > MESSAGES_MAX * pairs {
            let at = self.now / MILLISECOND;
            self.violation = Some(format!("{of_tick} messages between two ticks at {at} ms"));
        }
    }

    fn note_move(&mut self, cpu: CpuId, effect: &Effect) {
        if let Effect::Send {
            to,
            message: Message::Take { vcpu, .. },
        } = effect
        {
            let (at, from, to) = (self.now, cpu, *to);
            self.moves.push(Move {
                at,
                vcpu: *vcpu,
                from,
                to,
            });
            let [old, new] = [from, to].map(|cpu| self.topology.place(cpu).cell);
            self.history.vms[usize::from(vcpu.vm.0)]
                .dependencies
                .move_vcpu(old, new);
        }
    }

    /// Changes what a CPU runs.
    fn switch(&mut self, cpu: CpuId, next: Option<VcpuId>) {
        let now = self.now;
        if let Some(former) = std::mem::replace(&mut self.on_cpu[cpu.index()], next) {
            let former = self.vcpu(former);
            // One that has moved may run elsewhere by now.
            if former.on == Some(cpu) {
                former.stop(now);
            }
        }
        let Some(next) = next else { return };
        let is_other = self.last_vcpu[cpu.index()].replace(next) != Some(next);
        let mut cost = self.costs.switch_ns + if is_other { self.costs.refill_ns } else { 0 };
        let last_cpu = self.vcpu(next).last_cpu.replace(cpu);
        if let Some(last) = last_cpu.filter(|last| *last != cpu) {
            cost += self.costs.of_move(self.topology.kind(last, cpu));
        }
        let vcpu = self.vcpu(next);
        let is_twice = vcpu.on.is_some();
        vcpu.on = Some(cpu);
        vcpu.runs_from = now + cost;
        if let Some(since) = vcpu.waits_since.take() {
            vcpu.longest_wait_ns = vcpu.longest_wait_ns.max(now - since);
        }
        if is_twice {
            self.violation = Some(format!("{next:?} runs on two CPUs at {now} ns"));
        }
        self.go_on(next);
    }

    /// Rules at a tick: a CPU runs a vCPU of its queue; no vCPU is on two queues; no queue has two vCPUs of a
    /// VM, but for those of lost CPUs; no vCPU is lost for longer than a message takes.
    fn check(&mut self) {
        let mut places: HashMap<VcpuId, CpuId> = HashMap::new();
        let mut broken = None;
        for (cpu, driver) in (0..).map(CpuId).zip(&self.drivers) {
            let mut vms: Vec<VmId> = Vec::new();
            for queued in driver.queue() {
                if let Some(other) = places.insert(queued.vcpu, cpu) {
                    broken = Some(format!(
                        "{:?} is on the queues of {other:?} and {cpu:?}",
                        queued.vcpu
                    ));
                }
                if vms.contains(&queued.vcpu.vm) && driver.counters().doubled == 0 {
                    broken = Some(format!("{cpu:?} has two vCPUs of {:?}", queued.vcpu.vm));
                }
                vms.push(queued.vcpu.vm);
            }
            if let Some((vcpu, _)) = driver.running()
                && places.get(&vcpu) != Some(&cpu)
            {
                broken = Some(format!("{cpu:?} runs {vcpu:?}, which is not on its queue"));
            }
        }
        if let Some(broken) = broken {
            self.violation = Some(format!("{broken} at {} ms", self.now / MILLISECOND));
        }
    }

    /// Number of vCPUs that are on a queue.
    pub fn queued(&self) -> usize {
        self.drivers.iter().map(|driver| driver.queue().len()).sum()
    }

    /// The longest time for which a vCPU with work has had no CPU, up to now.
    pub fn longest_wait_ns(&self) -> Time {
        let vcpus = self.vms.iter().flat_map(|vm| &vm.vcpus);
        let wait = |vcpu: &Vcpu| {
            let open = vcpu.waits_since.map_or(0, |since| self.now.saturating_sub(since));
            open.max(vcpu.longest_wait_ns)
        };
        vcpus.map(wait).max().unwrap_or(0)
    }
}
