//! Work of a vCPU's thread between two entries into the guest when the interrupt controllers are this
//! crate's: it serves the vCPU's pending events, injects interrupts, and blocks while the vCPU is halted or
//! in another shard.
//!
//! `KVM_INTERRUPT` injects an interrupt when the guest can accept one; otherwise `request_interrupt_window`
//! makes KVM exit as soon as it can. The local APIC's registers are model-specific ones (x2APIC mode), so
//! each access is an exit.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use apic::{LocalApic, Written};
use dsm::Latency;
use kvm_bindings::{KVM_VCPUEVENT_VALID_NMI_PENDING, kvm_debugregs, kvm_regs, kvm_sregs, kvm_vcpu_events};
use kvm_ioctls::VcpuFd;

use super::clock::GuestTsc;
use super::cr3_reporter::Cr3Reporter;
use super::event_slot::EventSlot;
use super::ioctls;
use super::packet::Packet;
use super::pv_eoi::{MSR_KVM_PV_EOI_EN, PvEoi};
use super::residency::{Dispatch, Effect, VcpuResidency};
use super::router::Router;
use super::startup::Startup;
use super::timer::Alarm;
use super::timer_throttle::TimerThrottle;
use super::tsc_step_barrier::TscStepBarrier;
use super::vcpu_migration::{ActivityState, MoveOrder};
use crate::arch::x86_64::msr::{MSR_TSC, MSR_TSC_ADJUST, MSR_TSC_DEADLINE};
use crate::arch::x86_64::state::StateError;
use crate::interrupt::{LocalController, Next};
use crate::kind::SpanKind;
use crate::memory::GuestRam;
use crate::memory::replica::Coherence;
use crate::sandbox::ThreadKind;
use crate::vcpu::VcpuCounters;
use fault_point::fault_point;

/// Divisor from the TSC to the APIC timer's clock: about the frequency of a bus clock.
pub const TSC_PER_TICK: u32 = 16;
const X2APIC_EOI: u32 = 0x80B;
const X2APIC_ICR: u32 = 0x830;

/// Registers of a vCPU after reset, as KVM initialised them.
#[derive(Clone)]
pub struct Reset {
    /// General registers.
    pub registers: kvm_regs,
    /// Special registers, with the local APIC in x2APIC mode.
    pub special: kvm_sregs,
}

/// One vCPU of a spanning VM in one shard, whether it is resident there or not.
pub struct SpanVcpu {
    vcpu: u8,
    router: Arc<Router>,
    tsc: GuestTsc,
    /// Register TSC_ADJUST: ticks that the guest has added to the TSC of this vCPU.
    tsc_adjustment: u64,
    /// TSC offset that KVM has.
    kvm_tsc_offset: u64,
    /// APIC base register that KVM has, from which it derives a bit of CPUID.
    kvm_apic_base: Option<u64>,
    /// TSC step barrier, if the VM spans several hosts.
    barrier: Option<Arc<TscStepBarrier>>,
    /// Whether the vCPU has entered that barrier.
    is_past_barrier: bool,
    reset: Reset,
    register_numbers: Arc<Vec<u32>>,
    counters: Arc<VcpuCounters>,
    apic: LocalApic,
    activity: ActivityState,
    residency: VcpuResidency,
    pv_eoi: PvEoi,
    alarm: Option<Alarm>,
    throttle: TimerThrottle,
    memory: SpanKind<GuestRam, VcpuCoherence>,
}

/// Per-vCPU data of a VM with coherent memory.
pub struct VcpuCoherence {
    /// Latency of fetching pages from other shards.
    latency: Arc<Latency>,
    /// Reports the root of its page tables, if the guest's page tables are merged.
    cr3_reporter: Option<Cr3Reporter>,
}

impl VcpuCoherence {
    /// Returns the data of a new vCPU.
    pub fn of(fd: &mut VcpuFd, vcpu: u8, coherence: &Coherence) -> Self {
        Self {
            latency: coherence.latency(),
            cr3_reporter: coherence.causal().map(|causal| Cr3Reporter::of(fd, vcpu, causal)),
        }
    }
}

impl SpanVcpu {
    /// Returns the vCPU at the start of the VM.
    pub fn new(
        vcpu: u8,
        router: Arc<Router>,
        tsc: GuestTsc,
        reset: Reset,
        register_numbers: Arc<Vec<u32>>,
        memory: SpanKind<GuestRam, VcpuCoherence>,
        counters: Arc<VcpuCounters>,
    ) -> Self {
        let is_here = router.owner(vcpu).is_some_and(|owner| owner.shard == router.me());
        Self {
            vcpu,
            tsc_adjustment: 0,
            kvm_tsc_offset: tsc.offset,
            kvm_apic_base: Some(reset.special.apic_base),
            barrier: router.tsc_step_barrier().cloned(),
            is_past_barrier: false,
            tsc,
            reset,
            register_numbers,
            counters,
            apic: LocalApic::new(u32::from(vcpu), TSC_PER_TICK),
            activity: if vcpu == 0 {
                ActivityState::Active
            } else {
                ActivityState::WaitForSipi
            },
            residency: VcpuResidency::new(vcpu, router.me(), is_here),
            pv_eoi: PvEoi::new(memory.span().clone()),
            alarm: None,
            throttle: TimerThrottle::default(),
            memory,
            router,
        }
    }
}

impl LocalController for SpanVcpu {
    const THREAD: ThreadKind = ThreadKind::SpanVcpu;
    type MoveOrder = MoveOrder;

    fn open(&mut self) -> io::Result<()> {
        self.alarm = Some(Alarm::new()?);
        self.event_slot().attach();
        Ok(())
    }

    fn close(&self) {
        self.event_slot().detach();
    }

    fn prepare_entry(&mut self, fd: &mut VcpuFd) -> Result<Next<MoveOrder>, StateError> {
        self.refresh_tsc_offset();
        let mut events = self.event_slot().take();
        if let Some(migrating) = events.arrival.take() {
            self.arrive(fd, *migrating)?;
        }
        let Some(owner) = self.router.owner(self.vcpu) else {
            return Ok(Next::Retry);
        };
        let apic = &mut self.apic;
        let accept = |vector, level| apic.accept(vector, level);
        match self.residency.dispatch(events, owner, accept) {
            Dispatch::Idle => {
                self.event_slot().wait(None);
                return Ok(Next::Retry);
            }
            Dispatch::Forward(effects) => {
                self.apply(effects);
                return Ok(Next::Retry);
            }
            Dispatch::Migrate(order) => {
                fault_point!(move_ordered);
                return Ok(Next::Leave(order));
            }
            Dispatch::Resident => {}
        }
        self.serve_startups(fd)?;
        self.sync_apic_base(fd)?;
        self.expire_timer();
        if self.is_blocked() {
            self.block();
            return Ok(Next::Retry);
        }
        self.activity = ActivityState::Active;
        self.inject(fd)?;
        self.arm_alarm();
        if !self.event_slot().enter_guest() || !self.pass_barrier(fd)? {
            return Ok(Next::Retry);
        }
        self.pv_eoi.set_pending(&self.apic);
        Ok(Next::Enter)
    }

    fn note_exit(&mut self) {
        if let Some(reporter) = self.cr3_reporter() {
            reporter.report();
        }
        // Senders need not kick the thread until it enters again.
        self.event_slot().leave_guest();
        if let (Some(barrier), true) = (&self.barrier, std::mem::take(&mut self.is_past_barrier)) {
            barrier.leave();
        }
    }

    fn sync_after_exit(&mut self, fd: &mut VcpuFd) {
        self.sync_from_guest(fd);
    }

    fn halt(&mut self, fd: &mut VcpuFd) {
        let interruptible = fd.get_kvm_run().if_flag != 0;
        self.activity = ActivityState::Halted { interruptible };
    }

    fn read(&mut self, fd: &mut VcpuFd, index: u32) -> Option<u64> {
        VcpuCounters::count(&self.counters.msr);
        match index {
            MSR_TSC_ADJUST => return Some(self.tsc_adjustment),
            MSR_KVM_PV_EOI_EN => return Some(self.pv_eoi.register()),
            _ => {}
        }
        self.sync_from_guest(fd);
        self.apic.read(index, self.now()).ok()
    }

    fn write(&mut self, fd: &mut VcpuFd, index: u32, value: u64) -> bool {
        VcpuCounters::count(match index {
            X2APIC_EOI => &self.counters.end_of_interrupt,
            X2APIC_ICR => &self.counters.ipi,
            MSR_TSC_DEADLINE => &self.counters.timer,
            _ => &self.counters.msr,
        });
        match index {
            MSR_TSC => {
                self.adjust(value.wrapping_sub(self.now()));
                return true;
            }
            MSR_TSC_ADJUST => {
                self.adjust(value.wrapping_sub(self.tsc_adjustment));
                return true;
            }
            MSR_KVM_PV_EOI_EN => return self.pv_eoi.set_register(value, &mut self.apic),
            _ => {}
        }
        self.sync_from_guest(fd);
        let written = self.apic.write(index, value, self.now());
        self.sync_task_priority(fd);
        match written {
            Ok(Written::Nothing) => {}
            Ok(Written::Send(ipi)) => {
                self.router
                    .interrupt(&ipi.interrupt, ipi.shorthand, Some(self.vcpu));
            }
            Ok(Written::EndOfInterrupt { vector }) => self.router.end_of_interrupt(vector),
            Ok(Written::Enabled(is_enabled)) => self.report_enabled(is_enabled),
            Err(_) => return false,
        }
        true
    }

    fn is_resident(&self) -> bool {
        self.residency.is_resident()
    }

    fn depart(&mut self, fd: &VcpuFd, order: MoveOrder) {
        if let Some(reporter) = self.cr3_reporter() {
            reporter.withdraw();
        }
        self.leave(fd, order);
    }
}

impl SpanVcpu {
    /// Copies the APIC base register to KVM. If the guest has disabled its local APIC, CPUID reports none
    /// (SDM vol. 3, 11.4.3).
    fn sync_apic_base(&mut self, fd: &VcpuFd) -> Result<(), StateError> {
        let base = self.apic.base();
        if self.kvm_apic_base != Some(base) {
            let mut special = fd.get_sregs().map_err(refused("read special registers"))?;
            special.apic_base = base;
            fd.set_sregs(&special)
                .map_err(refused("set the base of the interrupt controller"))?;
            self.kvm_apic_base = Some(base);
        }
        Ok(())
    }

    /// Returns the TSC that the guest reads now.
    fn now(&self) -> u64 {
        self.tsc.now().wrapping_add(self.tsc_adjustment)
    }

    /// Moves the TSC of this vCPU by `ticks`, modulo 2^64, at the guest's request.
    fn adjust(&mut self, ticks: u64) {
        self.apic.expire(self.now());
        self.apic.counter_moved(ticks);
        self.tsc_adjustment = self.tsc_adjustment.wrapping_add(ticks);
    }

    /// Passes the TSC step barrier and sets the TSC offset in KVM. Returns false when a step has just changed
    /// the offset.
    fn pass_barrier(&mut self, fd: &VcpuFd) -> Result<bool, StateError> {
        if let Some(barrier) = &self.barrier {
            let Some(offset) = barrier.enter() else {
                self.event_slot().leave_guest();
                return Ok(false);
            };
            self.is_past_barrier = true;
            self.tsc.offset = offset;
        }
        let offset = self.tsc.offset.wrapping_add(self.tsc_adjustment);
        if offset != self.kvm_tsc_offset {
            ioctls::set_tsc_offset(fd, offset).map_err(refused("set the offset of the TSC"))?;
            self.kvm_tsc_offset = offset;
        }
        Ok(true)
    }

    /// Reads the TSC offset that is in force on the next entry.
    fn refresh_tsc_offset(&mut self) {
        if let Some(barrier) = &self.barrier {
            self.tsc.offset = barrier.offset();
        }
    }

    /// Applies what the guest did to its local APIC without an exit: ends of interrupts and CR8. A second
    /// call changes nothing, since [`SpanVcpu::sync_task_priority`] follows each change of the task priority
    /// here.
    fn sync_from_guest(&mut self, fd: &mut VcpuFd) {
        self.pv_eoi.test_and_clear_pending(&mut self.apic);
        let cr8 = fd.get_kvm_run().cr8 as u8;
        if self.apic.task_priority() >> 4 != cr8 {
            self.apic.set_task_priority(cr8 << 4);
        }
    }

    /// Makes KVM set CR8 to the task priority on the next entry.
    fn sync_task_priority(&self, fd: &mut VcpuFd) {
        fd.get_kvm_run().cr8 = u64::from(self.apic.task_priority() >> 4);
    }

    fn apply(&self, effects: impl IntoIterator<Item = Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { to, packet } => {
                    self.router.send(to, &packet);
                    if matches!(packet, Packet::Arrive { .. }) {
                        fault_point!(move_sent);
                    }
                }
                Effect::Departed(owner) => self.router.departed(self.vcpu, owner),
                Effect::Arrived(outcome) => self.router.arrived(self.vcpu, outcome),
            }
        }
    }

    fn serve_startups(&mut self, fd: &VcpuFd) -> Result<(), StateError> {
        while let Some(startup) = self.residency.take_startup() {
            match (startup, self.activity) {
                (Startup::Init { from }, _) => {
                    self.reset(fd)?;
                    if let Some(from) = from {
                        self.router
                            .report_init_done(self.vcpu, self.residency.version(), from);
                    }
                }
                (Startup::Start { page }, ActivityState::WaitForSipi) => self.start(fd, page)?,
                // Other states ignore a start-up interrupt (SDM vol. 3, 9.4.2).
                (Startup::Start { .. }, _) => {}
            }
        }
        Ok(())
    }

    /// Performs INIT (SDM vol. 3, 10.1): the registers are those after power-up, except the ones that INIT
    /// preserves, which KVM keeps elsewhere.
    fn reset(&mut self, fd: &VcpuFd) -> Result<(), StateError> {
        // Without this flag KVM keeps NMIs that it has not delivered.
        let none = kvm_vcpu_events {
            flags: KVM_VCPUEVENT_VALID_NMI_PENDING,
            ..Default::default()
        };
        fd.set_vcpu_events(&none)
            .map_err(refused("reset pending events"))?;
        fd.set_debug_regs(&kvm_debugregs {
            dr6: 0xFFFF_0FF0,
            dr7: 0x400,
            ..Default::default()
        })
        .map_err(refused("reset debug registers"))?;
        fd.set_sregs(&self.reset.special)
            .map_err(refused("reset special registers"))?;
        fd.set_regs(&self.reset.registers)
            .map_err(refused("reset registers"))?;
        self.kvm_apic_base = Some(self.reset.special.apic_base);
        let was_enabled = self.apic.is_enabled();
        self.apic.init();
        self.pv_eoi.set_register(0, &mut self.apic);
        self.residency.take_nmis();
        if was_enabled {
            self.report_enabled(false);
        }
        // vCPU 0 continues at the reset vector; the others wait for a start-up interrupt.
        self.activity = if self.vcpu == 0 {
            ActivityState::Active
        } else {
            ActivityState::WaitForSipi
        };
        Ok(())
    }

    fn report_enabled(&self, is_enabled: bool) {
        self.router
            .report_enabled(self.vcpu, self.residency.version(), is_enabled);
    }

    fn start(&mut self, fd: &VcpuFd, page: u8) -> Result<(), StateError> {
        let mut special = self.reset.special;
        special.cs.selector = u16::from(page) << 8;
        special.cs.base = u64::from(page) << 12;
        fd.set_sregs(&special).map_err(refused("set the start address"))?;
        let registers = kvm_regs {
            rip: 0,
            ..self.reset.registers
        };
        fd.set_regs(&registers)
            .map_err(refused("set the start address"))?;
        self.activity = ActivityState::Active;
        Ok(())
    }

    fn is_blocked(&self) -> bool {
        match self.activity {
            ActivityState::Active => false,
            ActivityState::WaitForSipi => true,
            ActivityState::Halted { interruptible } => {
                !(self.residency.has_nmi() || interruptible && self.apic.next().is_some())
            }
        }
    }

    /// Returns the time until the APIC timer interrupts; none if it is not armed.
    fn timer_left(&self) -> Option<Duration> {
        let now = self.now();
        let left = self.tsc.left(now, self.apic.timer_due()?).unwrap_or_default();
        let throttled_ns = self.coherence().map_or(0, |coherence| {
            let is_halted = matches!(self.activity, ActivityState::Halted { .. });
            self.throttle
                .delay_ns(self.tsc.nanoseconds(), coherence.latency.ns(), is_halted)
        });
        Some(left.max(Duration::from_nanos(throttled_ns)))
    }

    /// Raises the timer interrupt if the timer has expired.
    fn expire_timer(&mut self) {
        match self.timer_left() {
            Some(Duration::ZERO) => self.throttle.record_interrupt(self.tsc.nanoseconds()),
            Some(_) => return,
            // A masked timer continues to count.
            None => {}
        }
        self.apic.expire(self.now());
    }

    /// Blocks until an event is pending or the APIC timer expires.
    fn block(&mut self) {
        let limit = match self.activity {
            ActivityState::Halted { .. } => self.timer_left(),
            _ => None,
        };
        if limit != Some(Duration::ZERO) {
            self.event_slot().wait(limit);
        }
    }

    fn inject(&mut self, fd: &mut VcpuFd) -> Result<(), StateError> {
        for _ in 0..self.residency.take_nmis() {
            fd.nmi().map_err(refused("inject an NMI"))?;
        }
        self.sync_task_priority(fd);
        let run = fd.get_kvm_run();
        let ready = run.ready_for_interrupt_injection != 0 && run.if_flag != 0;
        if ready && let Some(vector) = self.apic.take() {
            ioctls::interrupt(fd, vector).map_err(refused("inject an interrupt"))?;
            fd.get_kvm_run().ready_for_interrupt_injection = 0;
        }
        fd.get_kvm_run().request_interrupt_window = u8::from(self.apic.next().is_some());
        Ok(())
    }

    fn arm_alarm(&mut self) {
        let left = self.timer_left();
        let Some(alarm) = &mut self.alarm else { return };
        if let Some(left) = left {
            alarm.set(left);
        }
    }

    fn coherence(&self) -> Option<&VcpuCoherence> {
        match &self.memory {
            SpanKind::CoherentSpan(_, coherence) => Some(coherence),
            SpanKind::SharedSpan(_) => None,
            SpanKind::Plain(never) => match *never {},
        }
    }

    fn cr3_reporter(&self) -> Option<&Cr3Reporter> {
        self.coherence()?.cr3_reporter.as_ref()
    }

    fn event_slot(&self) -> &EventSlot {
        self.router
            .event_slot(self.vcpu)
            .expect("a vCPU has an event slot in every shard of its VM")
    }
}

fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Kvm { what, source }
}

mod migration;
#[cfg(test)]
mod tests;
