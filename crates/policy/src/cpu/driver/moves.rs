//! Moves of vCPUs between drivers.
//!
//! The receiver starts each transfer, also if the sender found the reason, because it alone guards its queue
//! against two vCPUs of one VM: it takes none of a VM that it has or awaits. The owner may refuse.

use super::super::entry::{VcpuEntry, VcpuState};
use super::super::message::{Change, Effect, Message, MoveReason, Refusal};
use super::super::reserved_time::{may_move, of_queue, share, sum};
use super::super::run_queue::Queued;
use super::super::view::View;
use super::super::word::Mode;
use super::super::{CpuId, Nanos, VcpuId};
use super::{Driver, Pull, Seen, sight};

/// Transfers that a driver awaits at most.
const PULLS_MAX: usize = 8;

impl Driver {
    /// Requests a vCPU from its owner.
    pub(super) fn pull(
        &mut self,
        vcpu: VcpuId,
        owner: CpuId,
        reason: MoveReason,
        suggested_by: CpuId,
        out: &mut Vec<Effect>,
    ) {
        self.pulls.push(Pull {
            vcpu,
            reason,
            suggested_by,
            is_ordered: false,
            is_halted: None,
        });
        let message = Message::Give { vcpu, reason };
        out.push(Effect::Send { to: owner, message });
    }

    /// Takes the order to move a vCPU here.
    pub(super) fn order(&mut self, vcpu: VcpuId, view: &impl View, out: &mut Vec<Effect>) {
        let owner = sight!(self, view).vcpu(vcpu).cpu;
        self.suggested(self.cpu, vcpu, owner, MoveReason::Order, view, out);
    }

    /// Follows a suggestion, or refuses it.
    pub(super) fn suggested(
        &mut self,
        from: CpuId,
        vcpu: VcpuId,
        owner: CpuId,
        reason: MoveReason,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        if let Some(pull) = self.pulls.iter_mut().find(|pull| pull.vcpu == vcpu) {
            // An order gets an answer, though a balancer awaits the vCPU already.
            pull.is_ordered |= reason == MoveReason::Order;
            return;
        }
        let Some(refusal) = self.refusal(vcpu, owner, reason, view) else {
            self.pull(vcpu, owner, reason, from, out);
            return;
        };
        self.counters.count_refusal(refusal);
        self.report_refusal(from, vcpu, reason, refusal, out);
    }

    /// The reason against taking a vCPU.
    fn refusal(&self, vcpu: VcpuId, owner: CpuId, reason: MoveReason, view: &impl View) -> Option<Refusal> {
        let is_last_resort = reason == MoveReason::LastResort;
        if owner == self.cpu {
            return Some(Refusal::NotHere);
        }
        if !self.is_online || self.queue.is_full() || self.pulls.len() >= PULLS_MAX {
            return Some(Refusal::NoRoom);
        }
        let has_vm = self.queue.has(vcpu.vm) || self.pulls.iter().any(|pull| pull.vcpu.vm == vcpu.vm);
        if has_vm && !is_last_resort {
            return Some(Refusal::SameVm);
        }
        if !is_last_resort && !view.may_run(vcpu, self.cpu) {
            return Some(Refusal::NotAllowed);
        }
        let is_by_balancer = matches!(reason, MoveReason::Idle | MoveReason::Balance);
        if is_by_balancer && !self.has_reservable_time(vcpu, owner, view) {
            return Some(Refusal::Reserved);
        }
        let own = u32::from(self.queue.load()) + self.pulls.len() as u32;
        let other = u32::from(sight!(self, view).word(owner).load);
        (reason == MoveReason::Balance && other <= own + self.tunables.disparity).then_some(Refusal::Balanced)
    }

    /// Whether this CPU has room for the reservation of a vCPU beside those that it has and awaits. Only this
    /// driver knows both for certain.
    fn has_reservable_time(&self, vcpu: VcpuId, owner: CpuId, view: &impl View) -> bool {
        let share = share(&view.terms(vcpu.vm));
        if share == 0 {
            return true;
        }
        let queued = self.queue.slots().iter().map(|queued| queued.vcpu);
        let own = sum(view, queued.chain(self.pulls.iter().map(|pull| pull.vcpu)));
        may_move(share, of_queue(&sight!(self, view), owner), own)
    }

    fn report_refusal(
        &self,
        to: CpuId,
        vcpu: VcpuId,
        reason: MoveReason,
        refusal: Refusal,
        out: &mut Vec<Effect>,
    ) {
        if to != self.cpu {
            let message = Message::Refuse { vcpu, refusal };
            out.push(Effect::Send { to, message });
        } else if reason == MoveReason::Order {
            out.push(Effect::Refused(vcpu, refusal));
        }
    }

    /// Gives a vCPU away, or refuses.
    pub(super) fn give(
        &mut self,
        to: CpuId,
        vcpu: VcpuId,
        reason: MoveReason,
        now: Nanos,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        if let Some(refusal) = self.reason_to_keep(to, vcpu, reason, now, view) {
            self.counters.count_refusal(refusal);
            let message = Message::Refuse { vcpu, refusal };
            out.push(Effect::Send { to, message });
            return;
        }
        if self.current.is_some_and(|current| current.vcpu == vcpu) {
            self.stop(now, view, out);
        }
        let Some(slot) = self.queue.slot(vcpu) else { return };
        let mut queued = self.dequeue(slot, out);
        if queued.halted_at.is_some() {
            queued.entry.state = VcpuState::Idle;
        }
        queued.entry.cpu = to;
        out.push(Effect::Entry(vcpu, queued.entry));
        self.given.note(vcpu, to);
        let message = Message::Take {
            vcpu,
            entry: queued.entry,
            has_spun: queued.has_spun,
            reason,
        };
        out.push(Effect::Send { to, message });
    }

    fn reason_to_keep(
        &self,
        to: CpuId,
        vcpu: VcpuId,
        reason: MoveReason,
        now: Nanos,
        view: &impl View,
    ) -> Option<Refusal> {
        let Some(queued) = self.queue.find(vcpu) else {
            return Some(Refusal::NotHere);
        };
        if matches!(
            reason,
            MoveReason::Order | MoveReason::Evacuation | MoveReason::LastResort
        ) {
            return None;
        }
        if queued.entry.state == VcpuState::Running {
            return Some(Refusal::Running);
        }
        let waited = now.saturating_sub(queued.entry.since);
        let is_soon = match reason {
            MoveReason::Idle => {
                let delay = self.topology.idle_delay(self.cpu, to, &self.tunables);
                delay.is_none_or(|delay| waited < delay) || queued.entry.state == VcpuState::Idle
            }
            _ => queued
                .moved_at
                .is_some_and(|at| now.saturating_sub(at) < self.tunables.move_hold_ns),
        };
        if is_soon {
            return Some(Refusal::TooSoon);
        }
        let other = u32::from(sight!(self, view).word(to).load);
        let own = u32::from(self.queue.load());
        (reason == MoveReason::Balance && own <= other + self.tunables.disparity).then_some(Refusal::Balanced)
    }

    /// Receives a vCPU.
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of a message, and what each handler has"
    )]
    pub(super) fn take(
        &mut self,
        from: CpuId,
        vcpu: VcpuId,
        entry: VcpuEntry,
        has_spun: bool,
        reason: MoveReason,
        now: Nanos,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        let pull = self.pulls.iter().position(|pull| pull.vcpu == vcpu);
        let pull = pull.map(|index| self.pulls.swap_remove(index));
        let mut queued = Queued::new(vcpu, entry);
        queued.entry.cpu = self.cpu;
        queued.has_spun = has_spun;
        queued.moved_at = (reason == MoveReason::Balance).then_some(now);
        match pull.and_then(|pull| pull.is_halted) {
            Some(true) => queued.entry.state = VcpuState::Idle,
            Some(false) if entry.state == VcpuState::Idle => {
                queued.entry.state = VcpuState::Waiting;
                queued.entry.since = now;
            }
            _ => {}
        }
        self.enqueue(queued, out);
        self.counters.count_move(self.topology.kind(from, self.cpu));
        self.counters.doubled += u64::from(reason == MoveReason::LastResort);
        self.raise_sleeper(vcpu.vm, now, view, out);
    }

    /// Ends a transfer that the other side refused, or tries another CPU for an evacuated vCPU.
    pub(super) fn refused(
        &mut self,
        vcpu: VcpuId,
        refusal: Refusal,
        now: Nanos,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        self.counters.count_refusal(refusal);
        if let Some(queued) = self.queue.find_mut(vcpu) {
            queued.tried = queued.tried.saturating_add(1);
            return;
        }
        if let Some(index) = self.pulls.iter().position(|pull| pull.vcpu == vcpu) {
            let pull = self.pulls.swap_remove(index);
            self.next_search = now + self.tunables.idle_search_interval_ns;
            self.search_at = Some(self.next_search);
            self.report_refusal(pull.suggested_by, vcpu, pull.reason, refusal, out);
            if pull.is_ordered && pull.reason != MoveReason::Order {
                self.order(vcpu, view, out);
            }
        }
    }

    /// Passes an event on to the CPU that has the vCPU.
    pub(super) fn forward(&mut self, vcpu: VcpuId, change: Change, view: &impl View, out: &mut Vec<Effect>) {
        // The next sample comes to the driver that has it then.
        if matches!(change, Change::Sample(_)) {
            return;
        }
        if let Some(pull) = self.pulls.iter_mut().find(|pull| pull.vcpu == vcpu) {
            match change {
                Change::Wake => pull.is_halted = Some(false),
                Change::Halt => pull.is_halted = Some(true),
                Change::Spin | Change::Remove | Change::Sample(_) => {}
            }
            if change != Change::Remove {
                return;
            }
        }
        let to = self.given.to(vcpu).unwrap_or_else(|| view.vcpu(vcpu).cpu);
        if to == self.cpu {
            self.counters.lost_events += 1;
        } else {
            let message = Message::Forward { vcpu, change };
            out.push(Effect::Send { to, message });
        }
    }

    /// Suggests each vCPU that can't stay to the next CPU that may take it: all if this CPU is gone, else
    /// those of a VM that has another one here. Neighbours are tried in their order; then, if this
    /// CPU is gone, the
    /// least loaded CPU of the machine, whose rules it may break.
    pub(super) fn evacuate(&mut self, view: &impl View, out: &mut Vec<Effect>) {
        let topology = std::sync::Arc::clone(&self.topology);
        let neighbours = topology.neighbours(self.cpu);
        for slot in 0..self.queue.slots().len() {
            let Queued { vcpu, mut tried, .. } = self.queue.slots()[slot];
            let is_double = self.queue.slots()[..slot]
                .iter()
                .any(|one| one.vcpu.vm == vcpu.vm);
            if self.is_online && !is_double {
                continue;
            }
            let seen = sight!(self, view);
            let is_fit = |cpu: &CpuId| {
                let word = seen.word(*cpu);
                let mut queued = (0..usize::from(word.queued)).filter_map(|slot| seen.queued(*cpu, slot));
                word.mode != Mode::Offline
                    && seen.may_run(vcpu, *cpu)
                    && !queued.any(|other| other.vm == vcpu.vm)
            };
            while neighbours.get(usize::from(tried)).is_some_and(|cpu| !is_fit(cpu)) {
                tried += 1;
            }
            let next = neighbours.get(usize::from(tried)).copied();
            let last = || {
                (0..topology.cpus())
                    .map(CpuId)
                    .filter(|cpu| *cpu != self.cpu && seen.word(*cpu).mode != Mode::Offline)
                    .min_by_key(|cpu| {
                        let is_near = topology.place(*cpu).cell == topology.place(self.cpu).cell;
                        (!is_near, !seen.may_run(vcpu, *cpu), seen.word(*cpu).load, *cpu)
                    })
            };
            let target = match next {
                Some(to) => Some((to, MoveReason::Evacuation)),
                None if self.is_online => None,
                None => last().map(|to| (to, MoveReason::LastResort)),
            };
            // A CPU that is here tries all neighbours again at the next tick.
            let tried = if self.is_online && target.is_none() {
                0
            } else {
                tried
            };
            self.queue.slots_mut()[slot].tried = tried;
            if let Some((to, reason)) = target {
                self.suggest(to, vcpu, self.cpu, reason, view, out);
            }
        }
    }
}
