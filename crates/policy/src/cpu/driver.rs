//! CPU driver: the owner of one CPU's run queue.
//!
//! It takes one event at a time and returns effects; it has no clock, thread or lock, and shares no writable
//! state (Multikernel, section 4.3). It runs the gang algorithm of Cellular Disco, section 4.3: it chooses
//! among its own vCPUs, and asks the CPUs that have others of the same VM to choose again.

mod accounting;
mod counters;
mod current;
mod gang_calls;
mod moves;
mod seen;
mod ungated;

use std::sync::Arc;

pub use counters::Counters;

use self::current::Current;
use self::gang_calls::Calls;
use self::seen::{Given, Heard, Seen};
use super::clock::Clock;
use super::entitlement::{Class, period};
use super::entry::{VcpuEntry, VcpuState};
use super::gang::{self, Candidate, Gang};
use super::idle_balancer::{self, Search};
use super::load_tree::Branch;
use super::message::{Change, Effect, Event, Message, MoveReason};
use super::periodic_balancer::Pass;
use super::run_queue::{Queued, RunQueue};
use super::topology::Topology;
use super::tunables::Tunables;
use super::view::View;
use super::word::{Mode, Word, beat_ms};
use super::{CpuId, Nanos, VcpuId, VmId};

/// Least time until the timer. Ours: far below all times of the schedule.
const TIMER_MIN: Nanos = 1_000;

/// Ticks after which a driver reads no older entry. Ours: the three by which a view may be stale, and one.
const LAG_MAX_TICKS: Nanos = 4;

/// Transfer that this driver has requested.
#[derive(Clone, Copy, Debug)]
struct Pull {
    vcpu: VcpuId,
    reason: MoveReason,
    /// Driver that suggested it.
    suggested_by: CpuId,
    /// Whether an order for it came while it was awaited.
    is_ordered: bool,
    /// Whether an event that came before the vCPU halted it.
    is_halted: Option<bool>,
}

/// Builds the view of a driver from fields that are not being changed.
macro_rules! sight {
    ($driver:ident, $view:expr) => {
        Seen {
            view: $view,
            cpu: $driver.cpu,
            queue: &$driver.queue,
            word: $driver.word,
            branch: &$driver.branch,
            heard: &$driver.heard,
            given: &$driver.given,
        }
    };
}
use sight;

/// See the module.
#[derive(Debug)]
pub struct Driver {
    cpu: CpuId,
    topology: Arc<Topology>,
    tunables: Tunables,
    clock: Clock,
    queue: RunQueue,
    current: Option<Current>,
    /// The last [`Effect::Run`].
    applied: Option<VcpuId>,
    word: Word,
    branch: Branch,
    heard: Heard,
    given: Given,
    calls: Calls,
    pulls: Vec<Pull>,
    candidates: Vec<Candidate>,
    pass: Pass,
    /// Virtual time of the CPU, to which VMs that wake are raised.
    virtual_clock: Nanos,
    next_tick: Nanos,
    next_search: Nanos,
    /// Time at which a waiting vCPU elsewhere may be taken.
    search_at: Option<Nanos>,
    search_turn: u16,
    region_pass: u64,
    machine_pass: u64,
    is_online: bool,
    timer: Option<Nanos>,
    counters: Counters,
}

impl Driver {
    /// The driver of a CPU of a machine, with an empty queue.
    pub fn new(cpu: CpuId, topology: Arc<Topology>, tunables: Tunables) -> Self {
        Self {
            cpu,
            topology,
            tunables,
            clock: Clock::new(tunables.clock_step_max_ns, tunables.tick_ns),
            queue: RunQueue::default(),
            current: None,
            applied: None,
            word: Word::default(),
            branch: Branch::default(),
            heard: Heard::default(),
            given: Given::default(),
            calls: Calls::default(),
            pulls: Vec::new(),
            candidates: Vec::new(),
            pass: Pass::default(),
            virtual_clock: 0,
            next_tick: 0,
            next_search: 0,
            search_at: None,
            search_turn: 0,
            region_pass: 0,
            machine_pass: 0,
            is_online: true,
            timer: None,
            counters: Counters::default(),
        }
    }

    /// Counts of its decisions.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The vCPU that it runs, and how.
    pub fn running(&self) -> Option<(VcpuId, Mode)> {
        self.current.map(|current| (current.vcpu, current.mode))
    }

    /// The vCPUs of its queue.
    pub fn queue(&self) -> &[Queued] {
        self.queue.slots()
    }

    /// Takes an event at a time of the caller's clock and appends its effects to `out`.
    pub fn handle(&mut self, now: Nanos, event: Event, view: &impl View, out: &mut Vec<Effect>) {
        let now = self.clock.advance(now);
        self.account(now);
        let mut answer_to = None;
        match event {
            // An early one, as after a small jump of the clock, is set again.
            Event::Timer => self.timer = None,
            Event::Add { vcpu, is_awake } => self.add(vcpu, is_awake, now, view, out),
            Event::Vcpu { vcpu, change } => self.change(vcpu, change, now, view, out),
            Event::Order { vcpu } => self.order(vcpu, view, out),
            Event::Offline => self.is_online = false,
            Event::Online => {
                self.is_online = true;
                for queued in self.queue.slots_mut() {
                    queued.tried = 0;
                }
            }
            Event::Message { from, message } => match message {
                Message::Answer { word } => {
                    self.heard.note(from, word);
                    self.set_timer(out);
                    return;
                }
                Message::Reconsider {
                    vm,
                    is_displaced,
                    word,
                } => {
                    self.heard.note(from, word);
                    match &mut self.current {
                        Some(current) if is_displaced && current.vcpu.vm == vm => current.is_broken = true,
                        _ => {}
                    }
                    answer_to = (!is_displaced).then_some(from);
                }
                Message::Adjust { vm, least, most } => self.adjust(vm, least, most, now, view, out),
                Message::Forward { vcpu, change } => self.change(vcpu, change, now, view, out),
                Message::Suggest { vcpu, owner, reason } => {
                    self.suggested(from, vcpu, owner, reason, view, out)
                }
                Message::Give { vcpu, reason } => self.give(from, vcpu, reason, now, view, out),
                Message::Refuse { vcpu, refusal } => self.refused(vcpu, refusal, now, view, out),
                Message::Take {
                    vcpu,
                    entry,
                    has_spun,
                    reason,
                } => self.take(from, vcpu, entry, has_spun, reason, now, view, out),
            },
        }
        self.expire_halts(now, view, out);
        self.decide(now, view, out);
        if now >= self.next_tick {
            self.tick(now, view, out);
        }
        if let Some(to) = answer_to {
            // A new version shows that the driver has decided since.
            self.publish_word(now, view, true, out);
            let message = Message::Answer { word: self.word };
            out.push(Effect::Send { to, message });
        }
        self.set_timer(out);
    }

    fn add(&mut self, vcpu: VcpuId, is_awake: bool, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        if self.queue.find(vcpu).is_some() {
            return;
        }
        let is_awaited = self.pulls.iter().any(|pull| pull.vcpu.vm == vcpu.vm);
        self.counters.doubled += u64::from(is_awaited || self.queue.has(vcpu.vm));
        let entry = VcpuEntry {
            cpu: self.cpu,
            state: if is_awake {
                VcpuState::Waiting
            } else {
                VcpuState::Idle
            },
            since: now,
            ..VcpuEntry::default()
        };
        self.enqueue(Queued::new(vcpu, entry), out);
        if is_awake {
            self.raise_sleeper(vcpu.vm, now, view, out);
        }
    }

    fn enqueue(&mut self, queued: Queued, out: &mut Vec<Effect>) {
        self.given.forget(queued.vcpu);
        out.push(Effect::Entry(queued.vcpu, queued.entry));
        let slot = self.queue.push(queued);
        out.push(Effect::Slot(slot as u8, Some(queued.vcpu)));
    }

    fn dequeue(&mut self, slot: usize, out: &mut Vec<Effect>) -> Queued {
        let queued = self.queue.remove(slot);
        let slots = self.queue.slots();
        if let Some(moved) = slots.get(slot) {
            out.push(Effect::Slot(slot as u8, Some(moved.vcpu)));
        }
        out.push(Effect::Slot(slots.len() as u8, None));
        queued
    }

    fn change(&mut self, vcpu: VcpuId, change: Change, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        let current = self.current;
        let Some(queued) = self.queue.find_mut(vcpu) else {
            self.forward(vcpu, change, view, out);
            return;
        };
        match change {
            Change::Wake => {
                queued.halted_at = None;
                if queued.entry.state == VcpuState::Idle {
                    queued.entry.state = VcpuState::Waiting;
                    queued.entry.since = now;
                    out.push(Effect::Entry(vcpu, queued.entry));
                    self.raise_sleeper(vcpu.vm, now, view, out);
                }
            }
            Change::Halt => {
                if queued.entry.state != VcpuState::Idle {
                    queued.halted_at.get_or_insert(now);
                }
            }
            Change::Spin => {
                let is_filler =
                    current.is_some_and(|current| current.vcpu == vcpu && current.mode == Mode::Filler);
                if is_filler && !queued.has_spun {
                    queued.has_spun = true;
                    self.counters.spins += 1;
                }
            }
            Change::Sample(sample) => self.sample(vcpu, &sample, now, view, out),
            Change::Remove => {
                if current.is_some_and(|current| current.vcpu == vcpu) {
                    self.stop(now, view, out);
                }
                if let Some(slot) = self.queue.slot(vcpu) {
                    self.dequeue(slot, out);
                    out.push(Effect::Entry(vcpu, VcpuEntry::default()));
                }
            }
        }
    }

    /// Takes vCPUs that have been halted for the hysteresis out of their gangs.
    fn expire_halts(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        let tunables = self.tunables;
        let is_over = |one: &&mut Queued| one.idle_at(&tunables).is_some_and(|at| now >= at);
        while let Some(queued) = self.queue.slots_mut().iter_mut().find(is_over) {
            queued.halted_at = None;
            let vcpu = queued.vcpu;
            if self.current.is_some_and(|current| current.vcpu == vcpu) {
                self.stop(now, view, out);
            }
            if let Some(queued) = self.queue.find_mut(vcpu) {
                queued.entry.state = VcpuState::Idle;
                out.push(Effect::Entry(vcpu, queued.entry));
            }
        }
    }

    /// Chooses what to run, and tells the CPUs concerned.
    fn decide(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        let begin = out.len();
        let is_over = self.current.is_some_and(|current| now >= current.slice_end);
        if is_over {
            self.charge(now, view, out);
            if let Some(current) = &mut self.current {
                current.slice_end = now + self.tunables.slice_ns;
                current.is_broken = false;
            }
        }
        self.check_stragglers(now, view);
        self.follow_halt_rates(now, view, out);
        let choice = self.choice(now, view, is_over);
        let former = self.current;
        let mut started = None;
        match (choice, former) {
            (None, None) => {}
            (Some((vcpu, mode)), Some(current)) if current.vcpu == vcpu => {
                if current.mode != mode || is_over {
                    started = self.renew(mode, now);
                }
            }
            (choice, former) => {
                if former.is_some() {
                    self.stop(now, view, out);
                }
                if let Some((vcpu, mode)) = choice {
                    self.start(vcpu, mode, now, out);
                    started = Some((vcpu.vm, mode));
                }
            }
        }
        let vcpu = self.current.map(|current| current.vcpu);
        if vcpu != self.applied {
            self.applied = vcpu;
            self.counters.switches += 1;
            out.push(Effect::Run(vcpu));
        }
        self.publish_word(now, view, false, out);
        if now >= self.next_tick && self.calls.begin_tick() {
            // The CPUs that got no call since the last tick get one now.
            started = self.running().map(|(vcpu, mode)| (vcpu.vm, mode));
        }
        if let Some((vm, Mode::Entitled)) = started {
            self.call_gang(vm, false, begin, now, view, out);
        }
        if let Some(former) = former
            && former.mode == Mode::Entitled
            && self
                .current
                .is_none_or(|current| current.vcpu.vm != former.vcpu.vm)
        {
            self.call_gang(former.vcpu.vm, true, begin, now, view, out);
        }
        let has_hole = self.current.is_none_or(|current| current.mode == Mode::Filler);
        // Linux has a vCPU for the CPU.
        if has_hole && self.is_online && !self.queue.has_ungated() {
            self.search(now, view, out);
        } else {
            self.search_at = None;
        }
    }

    /// The vCPU to run, and how. `is_over` says that the slice of the present one has ended.
    fn choice(&mut self, now: Nanos, view: &impl View, is_over: bool) -> Option<(VcpuId, Mode)> {
        if !self.is_online {
            return None;
        }
        self.candidates.clear();
        let seen = sight!(self, view);
        for (slot, queued) in self.queue.slots().iter().enumerate() {
            if !queued.entry.state.is_gated() {
                continue;
            }
            let current = self.current.filter(|current| current.vcpu == queued.vcpu);
            self.candidates.push(Candidate {
                gang: Gang::of(&seen, queued.vcpu.vm, now, &self.tunables),
                slot,
                is_kept: current
                    .is_some_and(|current| current.mode == Mode::Entitled && !is_over && !current.is_broken),
                is_held: now < queued.held_until,
                has_spun: queued.has_spun,
            });
        }
        let (number, lag) = self.period_and_lag(now);
        for one in &mut self.candidates {
            let seen = &mut self.queue.slots_mut()[one.slot].seen;
            seen.note(number, one.gang.used_us, one.gang.rank.vtime, now, lag);
            one.gang
                .raise(seen.used_us(number), seen.vtime(now, lag), &self.tunables);
        }
        let seen = sight!(self, view);
        let (slot, mode) = gang::choose(&seen, &mut self.candidates, self.cpu, now, &self.tunables)?;
        if mode == Mode::Entitled {
            self.advance_virtual_clock(slot);
        }
        Some((self.queue.slots()[slot].vcpu, mode))
    }

    /// Raises the CPU's virtual time to that of the chosen VM.
    ///
    /// A VM with a reservation may be far ahead of the others, above all one of small weight: those that wake
    /// would be put behind it. So it counts only where all have a reservation. The virtual time of a VM that
    /// spans cells has no part in the order.
    fn advance_virtual_clock(&mut self, slot: usize) {
        let is_reserved = |one: &Candidate| one.gang.terms.reservation_permille > 0;
        let Some(chosen) = self.candidates.iter().find(|one| one.slot == slot) else {
            return;
        };
        let counts = !is_reserved(chosen) || self.candidates.iter().all(is_reserved);
        if counts && chosen.gang.rank.class != Class::Windowed {
            self.virtual_clock = self.virtual_clock.max(chosen.gang.rank.vtime);
        }
    }

    /// A VM of the queue in this driver's view, with the greatest times that it has seen.
    fn gang(&self, vm: VmId, now: Nanos, view: &impl View) -> Gang {
        let mut gang = Gang::of(&sight!(self, view), vm, now, &self.tunables);
        if let Some(queued) = self.queue.slots().iter().find(|one| one.vcpu.vm == vm) {
            let (number, lag) = self.period_and_lag(now);
            let seen = &queued.seen;
            gang.raise(seen.used_us(number), seen.vtime(now, lag), &self.tunables);
        }
        gang
    }

    /// Number of the entitlement period, and an age that no entry of it has.
    fn period_and_lag(&self, now: Nanos) -> (u32, Nanos) {
        let number = period(now, self.tunables.entitlement_period_ns);
        (number, LAG_MAX_TICKS * self.tunables.tick_ns)
    }

    /// Looks for a vCPU of another CPU that can run here with its VM.
    fn search(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        if !self.pulls.is_empty() {
            // The answer brings the next search.
            self.search_at = None;
            return;
        }
        if now < self.next_search {
            return;
        }
        self.counters.searches += 1;
        self.next_search = now + self.tunables.idle_search_interval_ns;
        let seen = sight!(self, view);
        let queue = &self.queue;
        let is_taken = |vm| queue.has(vm);
        let turn = self.search_turn;
        let found = idle_balancer::search(
            &seen,
            &self.topology,
            self.cpu,
            turn,
            is_taken,
            now,
            &self.tunables,
        );
        self.search_turn = turn.wrapping_add(self.tunables.idle_search_queues_max / 2);
        self.search_at = None;
        match found {
            Search::Found { vcpu, owner } => self.pull(vcpu, owner, MoveReason::Idle, self.cpu, out),
            Search::Later(at) => {
                self.search_at = Some(at);
                self.next_search = self.next_search.min(at);
            }
            Search::Nothing => self.search_at = Some(now + self.tunables.idle_delay_intra_node_ns),
        }
    }

    /// Publishes the word, if it changed or `is_beat`.
    fn publish_word(&mut self, now: Nanos, view: &impl View, is_beat: bool, out: &mut Vec<Effect>) {
        let mut word = Word {
            mode: if self.is_online { Mode::Idle } else { Mode::Offline },
            load: self.queue.load(),
            queued: self.queue.slots().len().min(usize::from(u8::MAX)) as u8,
            version: self.word.version,
            beat_ms: self.word.beat_ms,
            ..Word::default()
        };
        if let Some(current) = self.current {
            let gang = self.gang(current.vcpu.vm, now, view);
            word.mode = current.mode;
            word.vm = current.vcpu.vm;
            word.class = gang.rank.class;
            word.vtime = gang.rank.vtime;
            self.watch_cap(&gang, now, out);
        }
        if word != self.word || is_beat {
            word.version = word.version.wrapping_add(1);
            word.beat_ms = beat_ms(now);
            self.word = word;
            out.push(Effect::Word(word));
        }
    }

    /// Sets the timer to the next time at which anything may change.
    fn set_timer(&mut self, out: &mut Vec<Effect>) {
        let current = self.current.iter();
        let times = current.flat_map(|current| [Some(current.slice_end), current.check_at, current.cap_at]);
        let search_at = self.search_at.map(|at| at.max(self.next_search));
        let queue = self.queue.slots().iter();
        let halts = queue.filter_map(|one| one.idle_at(&self.tunables));
        let next = times
            .flatten()
            .chain(search_at)
            .chain(halts)
            .fold(self.next_tick, Nanos::min);
        // Never at once: a driver that woke for nothing must not keep its thread busy.
        let raw = self.clock.raw_at(next.max(self.clock.now() + TIMER_MIN));
        if self.timer != Some(raw) {
            self.timer = Some(raw);
            out.push(Effect::Timer(raw));
        }
    }
}

#[cfg(test)]
mod tests;
