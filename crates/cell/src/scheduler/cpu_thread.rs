//! Thread of one CPU: runs the CPU's driver, one event at a time, and applies its effects.
//!
//! It shares no state that another thread writes too. It sleeps while no vCPUs compete for a CPU of the cell,
//! but for a look twice a second: then there is nothing to choose and nothing to balance. A driver whose CPU
//! gets a second busy vCPU wakes the others, so that one of them can take it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use policy::cpu::driver::Driver;
use policy::cpu::entry::VcpuState;
use policy::cpu::message::{Change, Effect, Event, Message, MoveReason};
use policy::cpu::topology::Topology;
use policy::cpu::tunables::Tunables;
use policy::cpu::windows::WindowState;
use policy::cpu::{CpuId, MILLISECOND, Nanos, VcpuId, VmId};
use tracing::{debug, warn};

use super::activity::{
    Activity, BUSY_PARTS, BUSY_PARTS_HALTING, CHOSEN_INTERVAL, OTHERS_INTERVAL, START_LIMIT,
    WINDOW_START_LIMIT, interval,
};
use super::gate::{Gate, GateOrder};
use super::host_clock::monotonic;
use super::order::Outcome;
use super::published::{CellView, Counts, CpuState, VmFacts, Vms};

/// Interval of polls of a CPU for which no vCPUs compete: the driver's clock must not miss a second. Ours.
const IDLE_INTERVAL: Nanos = 500 * MILLISECOND;
/// Time of the drivers' clock when the cell's process starts, so that times before it are no negative ones.
const CLOCK_START: Nanos = 86_400_000 * MILLISECOND;
/// Slice that a driver's thread requests from Linux, nanoseconds: the least (`sched(7)`, `sched_setattr(2)`).
/// A thread with a shorter slice than the running one preempts it when it wakes (Linux 6.12 and later).
const THREAD_SLICE: u64 = 100_000;

/// State of a cell's drivers that all of them read.
#[derive(Debug)]
pub(super) struct Shared {
    /// The host's number of each CPU.
    pub(super) host_cpus: Vec<usize>,
    /// State that each driver publishes.
    pub(super) cpus: Vec<CpuState>,
    /// Places of the CPUs.
    pub(super) topology: Arc<Topology>,
    /// Times of the drivers.
    pub(super) tunables: Tunables,
    /// Start of the drivers' clock.
    started: Instant,
}

impl Shared {
    /// State of drivers that are to start.
    pub(super) fn new(host_cpus: Vec<usize>, topology: Topology, tunables: Tunables) -> Self {
        Self {
            cpus: host_cpus.iter().map(|_| CpuState::default()).collect(),
            host_cpus,
            topology: Arc::new(topology),
            tunables,
            started: Instant::now(),
        }
    }

    /// Time of the drivers' clock.
    pub(super) fn now(&self) -> Nanos {
        let elapsed = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        CLOCK_START.saturating_add(elapsed)
    }
}

/// Message to the thread of a CPU.
pub(super) enum Input {
    /// An event of the driver.
    Event(Event),
    /// The facts of a VM, or that it is gone.
    Vm(VmId, Option<Arc<VmFacts>>),
    /// The driver is to take a vCPU, by order of a person.
    Order(VcpuId, Sender<Outcome>),
    /// Report that all messages before this one are handled.
    Passed(Sender<()>),
    /// A CPU of the cell has several busy vCPUs now.
    Contended,
    /// The thread is to end.
    End,
}

/// Thread of one CPU.
pub(super) struct CpuThread {
    cpu: CpuId,
    shared: Arc<Shared>,
    /// The threads of all CPUs, this one's too.
    peers: Vec<Sender<Input>>,
    driver: Driver,
    gate: Gate,
    vms: Vms,
    activities: BTreeMap<VcpuId, Activity>,
    /// vCPUs of VMs that span cells whose window is open.
    open: BTreeSet<VcpuId>,
    /// vCPUs that were ordered here, each with the receiver of the outcome.
    ordered: BTreeMap<VcpuId, Sender<Outcome>>,
    /// Time of the driver's timer.
    timer: Option<Nanos>,
    /// Time of the next poll of the threads of vCPUs.
    look_at: Option<Nanos>,
    is_online: bool,
    /// Time of the next check whether the CPU is there.
    check_at: Nanos,
    /// Whether this CPU had several busy vCPUs after the last event.
    was_contended: bool,
    counts: Counts,
    effects: Vec<Effect>,
    orders: Vec<(VcpuId, GateOrder)>,
}

impl CpuThread {
    /// The thread of a CPU, before it runs.
    pub(super) fn new(cpu: CpuId, shared: Arc<Shared>, peers: Vec<Sender<Input>>) -> Self {
        let driver = Driver::new(cpu, Arc::clone(&shared.topology), shared.tunables);
        Self {
            cpu,
            shared,
            peers,
            driver,
            gate: Gate::default(),
            vms: Vms::new(),
            activities: BTreeMap::new(),
            open: BTreeSet::new(),
            ordered: BTreeMap::new(),
            timer: None,
            look_at: None,
            is_online: true,
            check_at: 0,
            was_contended: false,
            counts: Counts::default(),
            effects: Vec::new(),
            orders: Vec::new(),
        }
    }

    /// Takes events until the end.
    pub(super) fn run(mut self, inputs: &Receiver<Input>) {
        shorten_slice();
        self.handle(Event::Timer);
        self.check_cpu();
        loop {
            let until = self.wake_at().saturating_sub(self.shared.now());
            match inputs.recv_timeout(Duration::from_nanos(until)) {
                Ok(Input::End) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => self.handle(Event::Timer),
            }
            self.check_cpu();
            self.follow_windows();
            self.look();
            self.apply_gate();
            self.publish_counts();
        }
    }

    /// Takes one message.
    pub(super) fn take(&mut self, input: Input) {
        match input {
            Input::Event(event) => {
                self.count_move(&event);
                self.handle(event);
            }
            Input::Order(vcpu, tell) => {
                // An order before it for the same vCPU gets no answer: its sender has gone.
                self.ordered.insert(vcpu, tell);
                if self.driver.queue().iter().all(|queued| queued.vcpu != vcpu) {
                    self.handle(Event::Order { vcpu });
                }
            }
            Input::Vm(vm, facts) => {
                // The orders to its vCPUs went to other threads, or were undone.
                self.gate.forget(vm);
                match facts {
                    Some(facts) => _ = self.vms.insert(vm, facts),
                    None => {
                        self.vms.remove(&vm);
                        self.ordered.retain(|vcpu, _| vcpu.vm != vm);
                    }
                }
                self.handle(Event::Timer);
            }
            // A sender that has gone needs no answer.
            Input::Passed(tell) => _ = tell.send(()),
            Input::Contended => self.handle(Event::Timer),
            Input::End => {}
        }
        self.report_arrivals();
    }

    /// Reports the ordered vCPUs that have come.
    fn report_arrivals(&mut self) {
        let queue = self.driver.queue();
        self.ordered.retain(|vcpu, tell| {
            let has_come = queue.iter().any(|queued| queued.vcpu == *vcpu);
            if has_come {
                // A client that has gone gets no answer.
                let _ = tell.send(Outcome::Moved);
            }
            !has_come
        });
    }

    /// Counts a vCPU that comes. One that leaves a lost CPU counts as ordered.
    fn count_move(&mut self, event: &Event) {
        let Event::Message {
            message: Message::Take { reason, .. },
            ..
        } = event
        else {
            return;
        };
        let kind = match reason {
            MoveReason::Idle => 0,
            MoveReason::Balance => 1,
            MoveReason::Order | MoveReason::Evacuation | MoveReason::LastResort => 2,
        };
        self.counts.moved[kind] += 1;
    }

    /// Publishes the counts, if they have changed.
    fn publish_counts(&mut self) {
        let queue = self.driver.queue().iter();
        let waiting = queue.filter(|one| one.entry.state == VcpuState::Waiting).count() as u64;
        let refused = self.driver.counters().refused.iter().sum();
        let queue = self.driver.queue().iter();
        let ungated = queue.filter(|one| one.entry.state == VcpuState::Ungated).count() as u64;
        let counts = Counts {
            waiting,
            ungated,
            refused,
            ..self.counts
        };
        let own = &self.shared.cpus[self.cpu.index()];
        if counts != own.counts() {
            own.set_counts(counts);
        }
    }

    /// The driver takes an event now; its effects are applied, but for those of the gate.
    fn handle(&mut self, event: Event) {
        self.handle_one(event);
        // vCPUs of a VM that has ended may arrive from another CPU.
        loop {
            let mut queue = self.driver.queue().iter();
            let Some(gone) = queue.find(|queued| !self.vms.contains_key(&queued.vcpu.vm)) else {
                break;
            };
            let (vcpu, change) = (gone.vcpu, Change::Remove);
            self.handle_one(Event::Vcpu { vcpu, change });
        }
        let is_contended = self.own_load() > 1;
        if is_contended && !self.was_contended {
            let others = self.peers.iter().enumerate();
            for (_, peer) in others.filter(|(cpu, _)| *cpu != self.cpu.index()) {
                let _ = peer.send(Input::Contended);
            }
        }
        self.was_contended = is_contended;
    }

    fn handle_one(&mut self, event: Event) {
        let view = CellView {
            cpus: &self.shared.cpus,
            vms: &self.vms,
            host_now: monotonic(),
        };
        let now = self.shared.now();
        let mut effects = mem::take(&mut self.effects);
        self.driver.handle(now, event, &view, &mut effects);
        for effect in effects.drain(..) {
            view.publish(self.cpu, &effect);
            match effect {
                Effect::Send { to, message } => {
                    let from = self.cpu;
                    if let Some(peer) = self.peers.get(to.index()) {
                        // A thread that has ended has given its vCPUs back to Linux.
                        let _ = peer.send(Input::Event(Event::Message { from, message }));
                    }
                }
                Effect::Timer(at) => self.timer = Some(at),
                Effect::Refused(vcpu, refusal) => {
                    if let Some(tell) = self.ordered.remove(&vcpu) {
                        let _ = tell.send(Outcome::Refused(refusal));
                    }
                }
                // The gate follows the states in the queue.
                Effect::Run(_)
                | Effect::Word(_)
                | Effect::Entry(..)
                | Effect::Slot(..)
                | Effect::Load { .. } => {}
            }
        }
        self.effects = effects;
    }

    /// Has the driver choose again when a window of a VM that spans cells has opened or closed. Its vCPUs
    /// count as ones with work when it opens: before that, their threads show their stop.
    fn follow_windows(&mut self) {
        let now = monotonic();
        let is_open = |vcpu: &VcpuId| {
            let facts = self.vms.get(&vcpu.vm);
            facts.is_some_and(|facts| facts.window(now) == WindowState::Open)
        };
        let queue = self.driver.queue().iter().map(|queued| queued.vcpu);
        let open: BTreeSet<VcpuId> = queue.filter(is_open).collect();
        if open == self.open {
            return;
        }
        let former = mem::replace(&mut self.open, open.clone());
        self.handle(Event::Timer);
        for vcpu in open.difference(&former).copied() {
            let change = Change::Wake;
            self.handle(Event::Vcpu { vcpu, change });
        }
    }

    /// Time of this thread's clock at which a window opens or closes next.
    fn window_change(&self) -> Option<Nanos> {
        let now = monotonic();
        let queue = self.driver.queue().iter();
        let facts = queue.filter_map(|queued| self.vms.get(&queued.vcpu.vm));
        let changes = facts.filter_map(|facts| facts.windows?.next_change(now));
        let next = changes.min()?;
        Some(self.shared.now().saturating_add(next - now))
    }

    /// Reads the threads of vCPUs if that is due, and reports to the driver which of them have work.
    pub(super) fn look(&mut self) {
        let now = self.shared.now();
        let queue = self.driver.queue();
        let waits = queue.iter().any(|one| one.entry.state == VcpuState::Waiting);
        let Some(interval) = interval(queue.len(), self.is_contended(), waits) else {
            self.look_at = None;
            self.activities.clear();
            return;
        };
        let interval = match interval {
            CHOSEN_INTERVAL => self.chosen_interval(),
            other => other,
        };
        let earliest = now + interval;
        if self.look_at.is_none_or(|at| now >= at || at > earliest) {
            self.look_at = Some(earliest);
            self.look_at_all(now, interval);
        }
    }

    /// Interval at which the chosen vCPU is read.
    fn chosen_interval(&self) -> Nanos {
        let chosen = self.driver.running().map(|(vcpu, _)| vcpu);
        let activity = chosen.and_then(|vcpu| self.activities.get(&vcpu));
        activity.map_or(CHOSEN_INTERVAL, Activity::chosen_interval)
    }

    fn look_at_all(&mut self, now: Nanos, interval: Nanos) {
        let queue: Vec<_> = self.driver.queue().to_vec();
        self.activities
            .retain(|vcpu, _| queue.iter().any(|queued| queued.vcpu == *vcpu));
        for queued in queue {
            let vcpu = queued.vcpu;
            if self.gate.is_stopped(vcpu) || queued.entry.state == VcpuState::Waiting {
                self.activities.entry(vcpu).or_default().pause();
                continue;
            }
            let is_halting = queued.halt_rate.is_high();
            let is_chosen = queued.entry.state == VcpuState::Running && !is_halting;
            let activity = self.activities.entry(vcpu).or_default();
            if !activity.is_due(
                now,
                if is_chosen {
                    interval
                } else {
                    interval.max(OTHERS_INTERVAL)
                },
            ) {
                continue;
            }
            let facts = self.vms.get(&vcpu.vm);
            let Some(times) = facts.and_then(|facts| facts.threads.read(vcpu.index)) else {
                continue;
            };
            let parts = if is_halting {
                BUSY_PARTS_HALTING
            } else {
                BUSY_PARTS
            };
            let is_awake = activity.note(now, times, parts);
            let sample = activity.take_sample();
            let was_awake = queued.entry.state != VcpuState::Idle && queued.halted_at.is_none();
            if is_awake != was_awake {
                let change = if is_awake { Change::Wake } else { Change::Halt };
                self.handle(Event::Vcpu { vcpu, change });
            }
            if let Some(sample) = sample {
                let change = Change::Sample(sample);
                self.handle(Event::Vcpu { vcpu, change });
            }
        }
    }

    /// Gives the orders that make the vCPUs of the queue run or stop as the driver has chosen.
    pub(super) fn apply_gate(&mut self) {
        let mut orders = mem::take(&mut self.orders);
        self.gate
            .apply(self.shared.now(), self.driver.queue(), &mut orders);
        for (vcpu, order) in orders.drain(..) {
            let Some(facts) = self.vms.get(&vcpu.vm) else {
                continue;
            };
            match order {
                GateOrder::Pin => {
                    let cpu = self.shared.host_cpus[self.cpu.index()];
                    if let Err(error) = facts.threads.pin(vcpu.index, &[cpu]) {
                        // A thread that has ended; or the CPU is gone, which the next look at it shows.
                        debug!(%error, ?vcpu, cpu, "the thread of a vCPU is not on its CPU");
                    }
                }
                GateOrder::Spread => {
                    let cpus = facts.host_cpus_of(vcpu.index, &self.shared.host_cpus);
                    if let Err(error) = facts.threads.pin(vcpu.index, &cpus) {
                        debug!(%error, ?vcpu, ?cpus, "the thread of a vCPU does not use all of its CPUs");
                    }
                }
                GateOrder::Stop => facts.threads.stop(vcpu.index),
                GateOrder::Continue => {
                    let is_chosen = self.driver.running().is_some_and(|(chosen, _)| chosen == vcpu);
                    if let Some(times) = is_chosen.then(|| facts.threads.read(vcpu.index)).flatten() {
                        let limit = match facts.windows {
                            None => START_LIMIT,
                            Some(_) => WINDOW_START_LIMIT,
                        };
                        let activity = self.activities.entry(vcpu).or_default();
                        activity.resume(self.shared.now(), times, limit);
                    }
                    facts.threads.go_on(vcpu.index);
                }
            }
        }
        self.orders = orders;
    }

    /// Time at which the thread has to wake if no message comes.
    pub(super) fn wake_at(&self) -> Nanos {
        let timer = self.timer.filter(|_| self.is_contended() || self.has_cap());
        let times = [timer, self.look_at, self.gate.deadline(), self.window_change()];
        let idle = self.shared.now() + IDLE_INTERVAL;
        times.into_iter().flatten().fold(idle, Nanos::min)
    }

    /// Whether vCPUs compete for a CPU of the cell.
    fn is_contended(&self) -> bool {
        let view = CellView {
            cpus: &self.shared.cpus,
            vms: &self.vms,
            host_now: monotonic(),
        };
        self.own_load() > 1 || view.is_contended()
    }

    fn own_load(&self) -> usize {
        let queue = self.driver.queue().iter();
        queue.filter(|one| one.entry.state != VcpuState::Idle).count()
    }

    /// Whether a VM of the queue has a cap, which it may reach without a rival.
    fn has_cap(&self) -> bool {
        let mut queue = self.driver.queue().iter();
        queue.any(|one| {
            let vm = self.vms.get(&one.vcpu.vm);
            vm.is_some_and(|vm| vm.terms.cap_permille.is_some())
        })
    }

    /// Keeps this thread on its CPU, which it checks twice a second. If the CPU is gone, the driver sends its
    /// vCPUs to others, until it is back.
    fn check_cpu(&mut self) {
        let now = self.shared.now();
        if now < self.check_at {
            return;
        }
        self.check_at = now + IDLE_INTERVAL;
        let cpu = self.shared.host_cpus[self.cpu.index()];
        let stays = on_cpu(cpu).is_ok();
        if stays != self.is_online {
            warn!(cpu, stays, "a CPU of the cell has gone, or is back");
            self.is_online = stays;
            self.handle(if stays { Event::Online } else { Event::Offline });
        }
    }

    /// Whether its driver runs this vCPU.
    #[cfg(test)]
    pub(super) fn runs(&self, vm: u16) -> bool {
        self.driver.running().is_some_and(|(vcpu, _)| vcpu.vm == VmId(vm))
    }
}

/// Restricts the calling thread to a CPU.
fn on_cpu(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// `struct sched_attr` of `sched_setattr(2)`, first version.
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Requests short slices from Linux for the calling thread, which needs no privilege. An older kernel ignores
/// or refuses that; the driver then starts a little later.
pub(super) fn shorten_slice() {
    // SAFETY: takes numbers only; 0 is the calling thread.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    let attributes = SchedAttr {
        size: mem::size_of::<SchedAttr>() as u32,
        policy: libc::SCHED_OTHER as u32,
        flags: 0,
        nice,
        priority: 0,
        runtime: THREAD_SLICE,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the kernel reads the structure, whose size is in its first field, and changes this thread's
    // scheduling alone.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &attributes, 0) };
    if result != 0 {
        debug!(
            error = %io::Error::last_os_error(),
            "a driver's thread has the slice of other threads"
        );
    }
}
