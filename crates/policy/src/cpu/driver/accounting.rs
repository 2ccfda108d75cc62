//! A driver's tick, and its accounts: CPU time, virtual time and their bounds.

use super::super::entitlement::{self, Class};
use super::super::entry::VcpuState;
use super::super::gang::Gang;
use super::super::load_tree::{LEVELS, REGION_CPUS};
use super::super::message::{Effect, Message, MoveReason};
use super::super::periodic_balancer::{is_runner, pass_number};
use super::super::view::View;
use super::super::word::Mode;
use super::super::{CpuId, MICROSECOND, Nanos, VcpuId, VmId};
use super::{Driver, Seen, sight};

/// Least time between two checks of a cap. Ours: a cap is then exceeded by this time for each vCPU.
const CAP_CHECK_INTERVAL_MIN: Nanos = 100 * MICROSECOND;

impl Driver {
    /// Adds the time since the last account to the present vCPU's. A slice at most is added.
    pub(super) fn account(&mut self, now: Nanos) {
        let Some(current) = &mut self.current else { return };
        let run = now
            .saturating_sub(current.accounted_at)
            .min(self.tunables.slice_ns);
        let run_us = run / MICROSECOND;
        // The rest below a microsecond counts next time.
        current.accounted_at = now - run % MICROSECOND;
        current.uncharged += run_us * MICROSECOND;
        if let Some(queued) = self.queue.find_mut(current.vcpu) {
            let number = entitlement::period(now, self.tunables.entitlement_period_ns);
            let entry = &mut queued.entry;
            if entry.period != number {
                entry.period = number;
                entry.used_us = 0;
            }
            entry.used_us = entry.used_us.saturating_add(run_us as u32);
        }
    }

    /// Charges the accounted time to the VM's virtual time.
    pub(super) fn charge(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        self.account(now);
        let Some(current) = self.current else { return };
        let gang = Gang::of(&sight!(self, view), current.vcpu.vm, now, &self.tunables);
        let time = entitlement::charge(current.uncharged, gang.terms.weight, gang.using());
        if let Some(current) = &mut self.current {
            current.uncharged = 0;
        }
        if let Some(queued) = self.queue.find_mut(current.vcpu) {
            queued.entry.vtime = queued.entry.vtime.wrapping_add(time);
            // A VM goes behind its equals when it is charged.
            if time > 0 {
                queued.entry.since = now;
            }
            out.push(Effect::Entry(current.vcpu, queued.entry));
        }
    }

    /// Plans the time at which the present VM may reach its cap, and publishes the time used until then:
    /// the drivers of its other vCPUs do the same, so that the sum is fresh when it matters.
    pub(super) fn watch_cap(&mut self, gang: &Gang, now: Nanos, out: &mut Vec<Effect>) {
        let Some(current) = &mut self.current else { return };
        let is_due = current.cap_at.is_some_and(|at| now >= at);
        if is_due || current.cap_at.is_none() || !current.is_cap_near {
            current.is_cap_near = is_due && !current.is_cap_near;
            // An earlier plan stands, because the time that others have used since may not be published.
            let planned = current.cap_at.filter(|_| !is_due).unwrap_or(Nanos::MAX);
            current.cap_at = gang.left_us.map(|left_us| {
                let left = left_us * MICROSECOND / u64::from(gang.using().max(1));
                let wait = if current.is_cap_near { 0 } else { left };
                (now + wait.max(CAP_CHECK_INTERVAL_MIN)).min(planned)
            });
        }
        if is_due && let Some(queued) = self.queue.find(current.vcpu) {
            out.push(Effect::Entry(queued.vcpu, queued.entry));
        }
    }

    /// Raises the virtual time of a VM that wakes or arrives to that of this CPU, less the sleeper's credit.
    pub(super) fn raise_sleeper(&mut self, vm: VmId, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        let least = self.virtual_clock.saturating_sub(self.tunables.sleeper_credit_ns);
        let vtime = Gang::of(&sight!(self, view), vm, now, &self.tunables).rank.vtime;
        if vtime < least {
            self.send_adjustment(vm, least, Nanos::MAX, now, view, out);
        }
    }

    fn send_adjustment(
        &mut self,
        vm: VmId,
        least: Nanos,
        most: Nanos,
        now: Nanos,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        let to = sight!(self, view).vcpu(VcpuId { vm, index: 0 }).cpu;
        if to == self.cpu {
            self.adjust(vm, least, most, now, view, out);
        } else {
            let message = Message::Adjust { vm, least, most };
            out.push(Effect::Send { to, message });
        }
    }

    /// Brings a VM's virtual time within bounds, by the part of its first vCPU.
    pub(super) fn adjust(
        &mut self,
        vm: VmId,
        least: Nanos,
        most: Nanos,
        now: Nanos,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        let vtime = Gang::of(&sight!(self, view), vm, now, &self.tunables).rank.vtime;
        let wanted = vtime.max(least).min(most);
        let vcpu = VcpuId { vm, index: 0 };
        if wanted != vtime
            && let Some(queued) = self.queue.find_mut(vcpu)
        {
            queued.entry.vtime = queued.entry.vtime.wrapping_add(wanted.wrapping_sub(vtime));
            queued.seen.forget_vtime();
            out.push(Effect::Entry(vcpu, queued.entry));
        }
    }

    /// Publishes what others rely on, and runs the balancers that are due.
    pub(super) fn tick(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        self.next_tick = (now / self.tunables.tick_ns + 1) * self.tunables.tick_ns;
        if let Some(current) = self.current
            && let Some(queued) = self.queue.find(current.vcpu)
        {
            out.push(Effect::Entry(queued.vcpu, queued.entry));
        }
        self.publish_word(now, view, true, out);
        let own = if self.is_online {
            u32::from(self.word.load)
        } else {
            0
        };
        let mut branch = self.branch;
        let changed = branch.update(view, self.cpu, own, self.topology.cpus());
        self.branch = branch;
        for level in (0..LEVELS).filter(|level| changed >> level & 1 == 1) {
            let load = branch.load(level);
            let level = level as u8;
            out.push(Effect::Load { level, load });
        }
        self.heard.forget(view);
        self.lower_overdue(now, view, out);
        if self.is_online {
            self.balance(now, view, out);
        }
        self.evacuate(view, out);
    }

    /// Lowers the virtual time of VMs that have waited too long to that of the VM that runs.
    fn lower_overdue(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        let Some(current) = self.current.filter(|current| current.mode == Mode::Entitled) else {
            return;
        };
        let overdue_ns = self.tunables.overdue_ns;
        for slot in 0..self.queue.slots().len() {
            let queued = self.queue.slots()[slot];
            let waits = queued.entry.state == VcpuState::Waiting
                && now.saturating_sub(queued.entry.since) > overdue_ns
                && queued.vcpu.vm != current.vcpu.vm;
            if !waits {
                continue;
            }
            let seen = sight!(self, view);
            let running = Gang::of(&seen, current.vcpu.vm, now, &self.tunables).rank;
            // A window ends by itself, and its VM's virtual time has no part in the order.
            if running.class == Class::Windowed {
                return;
            }
            let most = running.vtime;
            let gang = Gang::of(&seen, queued.vcpu.vm, now, &self.tunables);
            if gang.rank.vtime > most && !gang.is_throttled {
                self.send_adjustment(queued.vcpu.vm, 0, most, now, view, out);
            }
        }
    }

    /// Runs the passes of the periodic balancer that are due and this CPU's turn.
    fn balance(&mut self, now: Nanos, view: &impl View, out: &mut Vec<Effect>) {
        let cpus = self.topology.cpus();
        let region = pass_number(now, self.tunables.region_balance_period_ns);
        if region != self.region_pass {
            self.region_pass = region;
            let first = self.cpu.0 / REGION_CPUS * REGION_CPUS;
            let span = REGION_CPUS.min(cpus - first);
            if is_runner(self.cpu, first, span, region) {
                let mut pass = std::mem::take(&mut self.pass);
                pass.region(&sight!(self, view), &self.topology, self.cpu, &self.tunables);
                self.pass = pass;
                self.send_suggestions(view, out);
            }
        }
        let machine = pass_number(now, self.tunables.machine_balance_period_ns);
        if machine != self.machine_pass {
            self.machine_pass = machine;
            if cpus > REGION_CPUS && is_runner(self.cpu, 0, cpus, machine) {
                let mut pass = std::mem::take(&mut self.pass);
                pass.machine(&sight!(self, view), &self.topology, &self.tunables);
                self.pass = pass;
                self.send_suggestions(view, out);
            }
        }
    }

    fn send_suggestions(&mut self, view: &impl View, out: &mut Vec<Effect>) {
        self.counters.passes += 1;
        self.counters.unresolved += u64::from(self.pass.unresolved);
        for (sum, count) in self.counters.refused.iter_mut().zip(self.pass.refused) {
            *sum += u64::from(count);
        }
        let suggestions = std::mem::take(&mut self.pass.suggestions);
        for one in &suggestions {
            self.suggest(one.to, one.vcpu, one.owner, MoveReason::Balance, view, out);
        }
        self.pass.suggestions = suggestions;
    }

    /// Suggests a move to its receiver, which may be this CPU.
    pub(super) fn suggest(
        &mut self,
        to: CpuId,
        vcpu: VcpuId,
        owner: CpuId,
        reason: MoveReason,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        if to == self.cpu {
            self.suggested(self.cpu, vcpu, owner, reason, view, out);
        } else {
            let message = Message::Suggest { vcpu, owner, reason };
            out.push(Effect::Send { to, message });
        }
    }
}
