//! Runs one vCPU: enters the guest, serves its exits, tells why the VM ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dsm::Causal;
use kvm_bindings::kvm_run;
use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};

use crate::bus::Bus;
use crate::chain::chain;
use crate::ending::EndSignal;
use crate::gate::Gate;
use crate::kick::{self, Kickable};
use crate::launch::Ending;
use crate::span::local::{Local, Next};

/// Exits by kind.
#[derive(Debug, Default)]
pub struct VcpuCounters {
    /// Port reads and writes.
    pub port: AtomicU64,
    /// Memory-mapped reads and writes.
    pub mmio: AtomicU64,
    /// Accesses that no device claimed (of both kinds).
    pub unclaimed: AtomicU64,
    /// Signals: kicks.
    pub interrupted: AtomicU64,
    /// Anything else.
    pub other: AtomicU64,
    /// Of a spanning VM: HLT.
    pub halt: AtomicU64,
    /// Of a spanning VM: the guest can take an interrupt now.
    pub window: AtomicU64,
    /// Of a spanning VM: ends of interrupts.
    pub end_of_interrupt: AtomicU64,
    /// Of a spanning VM: interrupts to other vCPUs.
    pub ipi: AtomicU64,
    /// Of a spanning VM: settings of the deadline timer.
    pub timer: AtomicU64,
    /// Of a spanning VM: other accesses to model-specific registers.
    pub msr: AtomicU64,
}

impl VcpuCounters {
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// One vCPU, before its thread runs it.
pub struct Vcpu {
    /// KVM's side.
    pub fd: VcpuFd,
    /// I/O ports.
    pub ports: Arc<Bus>,
    /// Addresses outside RAM.
    pub mmio: Arc<Bus>,
    /// Where to leave the cause of an end.
    pub end: Arc<EndSignal>,
    /// What it counts.
    pub counters: Arc<VcpuCounters>,
    /// Its interrupt controller, when that is ours.
    pub local: Option<Local>,
    /// Who is to know its CR3, where the guest's page tables are merged.
    pub root: Option<Root>,
}

/// Where a vCPU's CR3 is told.
pub struct Root {
    causal: Arc<Causal>,
    vcpu: u8,
    /// In the page that KVM shares.
    cr3: *const u64,
}

// SAFETY: the page is the vCPU's, which is used by one thread at a time; the pointer is used by that one only.
unsafe impl Send for Root {}

impl Root {
    /// Has KVM show the CR3 of this vCPU at every exit.
    pub fn of(fd: &mut VcpuFd, vcpu: u8, causal: Arc<Causal>) -> Self {
        fd.set_sync_valid_reg(SyncReg::SystemRegister);
        // SAFETY: the member of a union that KVM fills, as it was just told.
        let cr3 = unsafe { &raw const fd.get_kvm_run().s.regs.sregs.cr3 };
        Self { causal, vcpu, cr3 }
    }

    /// The vCPU has left the guest.
    fn seen(&self) {
        // SAFETY: in the page that KVM shares, mapped as long as the vCPU, whose thread this is; it is out of the guest.
        let cr3 = unsafe { self.cr3.read_volatile() };
        self.causal.root(usize::from(self.vcpu), Some(cr3));
    }

    /// It goes to another shard.
    fn gone(&self) {
        self.causal.root(usize::from(self.vcpu), None);
    }
}

/// What one entry into the guest came to.
enum Step {
    /// An exit, which was served.
    Served,
    /// A signal, or the wish for one.
    Interrupted,
    /// The VM is over.
    Ended(Ending),
}

impl Vcpu {
    /// Runs until the VM ends; stands still when `gate` says so.
    pub fn run(mut self, gate: &Gate) {
        let flag = &raw mut self.fd.get_kvm_run().immediate_exit;
        // SAFETY: in the page that KVM shares, mapped as long as `self.fd`, which is dropped after this. The kernel reads it;
        // this thread writes it only through this, its handler, and `finish`, a byte at once.
        let kickable = unsafe { Kickable::new(flag) };
        let participant = gate.join(kick::signal());
        if let Err(error) = self.local.as_mut().map_or(Ok(()), Local::open) {
            let detail = format!("a vCPU's thread cannot start: {error}");
            self.end.end(Ending::ShardFailed { detail });
        }
        loop {
            // Before everything that a kick may be about: one that comes after it keeps the vCPU out of the guest.
            kickable.clear();
            if self.end.stopping() {
                break;
            }
            if participant.wanted() {
                if let Step::Ended(ending) = self.finish() {
                    self.end.end(ending);
                    break;
                }
                participant.check();
                continue;
            }
            match self.prepare() {
                Step::Served => {}
                Step::Interrupted => continue,
                Step::Ended(ending) => {
                    self.end.end(ending);
                    break;
                }
            }
            if let Step::Ended(ending) = self.step() {
                self.end.end(ending);
                break;
            }
        }
        if let Some(local) = &self.local {
            local.close();
        }
    }

    /// What a vCPU with a controller of ours needs before it enters the guest; interrupted when it is not to enter now.
    fn prepare(&mut self) -> Step {
        let Some(local) = &mut self.local else {
            return Step::Served;
        };
        match local.before(&mut self.fd) {
            Ok(Next::Enter) => Step::Served,
            Ok(Next::Again) => Step::Interrupted,
            Ok(Next::Leave(order)) => match self.finish() {
                Step::Ended(ending) => Step::Ended(ending),
                _ => {
                    if let Some(root) = &self.root {
                        root.gone();
                    }
                    if let Some(local) = &mut self.local {
                        local.depart(&self.fd, order);
                    }
                    Step::Interrupted
                }
            },
            Err(error) => Step::Ended(Ending::KvmInternalError {
                detail: chain(&error),
            }),
        }
    }

    /// Lets KVM complete the access that was served last, and what of the same instruction follows, without running the
    /// guest: only then are its registers whole. It does not enter the guest again before [`Kickable::clear`].
    fn finish(&mut self) -> Step {
        self.fd.set_kvm_immediate_exit(1);
        loop {
            match self.step() {
                Step::Served => (),
                other => return other,
            }
        }
    }

    /// Runs to the next exit and serves it.
    fn step(&mut self) -> Step {
        let step = self.serve_exit();
        if let Some(local) = &mut self.local {
            local.after(&mut self.fd);
        }
        step
    }

    fn serve_exit(&mut self) -> Step {
        let exit = self.fd.run();
        if let Some(root) = &self.root {
            root.seen();
        }
        if let Some(local) = &mut self.local {
            local.left();
        }
        match exit {
            Ok(VcpuExit::IoIn(port, data)) => {
                VcpuCounters::count(&self.counters.port);
                let (data, bytes) = (data.as_mut_ptr(), data.len());
                let size = self.port_access_bytes();
                // SAFETY: `data` is KVM's buffer in the shared page of this vCPU, mapped as long as `self.fd`;
                // nobody else uses it until the next KVM_RUN.
                let data = unsafe { std::slice::from_raw_parts_mut(data, bytes) };
                for access in data.chunks_mut(size) {
                    let claimed = self.ports.read(u64::from(port), access);
                    self.note(claimed);
                }
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                VcpuCounters::count(&self.counters.port);
                let (data, bytes) = (data.as_ptr(), data.len());
                let size = self.port_access_bytes();
                // SAFETY: as above.
                let data = unsafe { std::slice::from_raw_parts(data, bytes) };
                for access in data.chunks(size) {
                    let claimed = self.ports.write(u64::from(port), access);
                    self.note(claimed);
                }
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                VcpuCounters::count(&self.counters.mmio);
                let claimed = self.mmio.read(address, data);
                self.note(claimed);
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                VcpuCounters::count(&self.counters.mmio);
                let claimed = self.mmio.write(address, data);
                self.note(claimed);
            }
            Ok(VcpuExit::Shutdown) => return Step::Ended(Ending::TripleFault),
            Ok(VcpuExit::InternalError) => return Step::Ended(self.internal_error()),
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                let detail =
                    format!("the processor refused to enter the guest: reason {reason:#x} on CPU {cpu}");
                return Step::Ended(Ending::KvmInternalError { detail });
            }
            Ok(VcpuExit::Intr) => {
                VcpuCounters::count(&self.counters.interrupted);
                return Step::Interrupted;
            }
            Ok(VcpuExit::SystemEvent(kind, _)) => return Step::Ended(system_event(kind)),
            Ok(VcpuExit::X86Rdmsr(exit)) => {
                let index = exit.index;
                let local = self.local.as_mut();
                let value = local.and_then(|local| local.read(&mut self.fd, index));
                self.complete_msr(value);
            }
            Ok(VcpuExit::X86Wrmsr(exit)) => {
                let (index, value) = (exit.index, exit.data);
                let local = self.local.as_mut();
                let is_taken = local.is_some_and(|local| local.write(&mut self.fd, index, value));
                self.complete_msr(is_taken.then_some(value));
            }
            Ok(VcpuExit::Hlt) => {
                VcpuCounters::count(&self.counters.halt);
                if let Some(local) = &mut self.local {
                    local.halt(&mut self.fd);
                }
            }
            Ok(VcpuExit::IrqWindowOpen) => VcpuCounters::count(&self.counters.window),
            Ok(VcpuExit::SetTpr | VcpuExit::Hypercall(_) | VcpuExit::IoapicEoi(_)) => {
                VcpuCounters::count(&self.counters.other);
            }
            Ok(exit) => {
                let detail = format!("unexpected exit from the guest: {exit:?}");
                return Step::Ended(Ending::KvmInternalError { detail });
            }
            Err(error) => match error.errno() {
                libc::EINTR | libc::EAGAIN => {
                    VcpuCounters::count(&self.counters.interrupted);
                    return Step::Interrupted;
                }
                _ => {
                    let detail = format!("KVM_RUN failed: {error}{}", self.place());
                    return Step::Ended(Ending::KvmInternalError { detail });
                }
            },
        }
        Step::Served
    }

    fn note(&self, claimed: bool) {
        if !claimed {
            VcpuCounters::count(&self.counters.unclaimed);
        }
    }

    /// Completes the access to a model-specific register just taken, with what is in the register; none faults.
    fn complete_msr(&mut self, value: Option<u64>) {
        let run = self.fd.get_kvm_run();
        run.__bindgen_anon_1.msr.error = u8::from(value.is_none());
        if let Some(value) = value {
            run.__bindgen_anon_1.msr.data = value;
        }
    }

    /// Size of one access of the port exit just taken; string instructions bring several at once.
    fn port_access_bytes(&mut self) -> usize {
        let run: &kvm_run = self.fd.get_kvm_run();
        // SAFETY: the exit was KVM_EXIT_IO, so KVM filled this member.
        let io = unsafe { run.__bindgen_anon_1.io };
        usize::from(io.size).max(1)
    }

    fn internal_error(&mut self) -> Ending {
        // SAFETY: the exit was KVM_EXIT_INTERNAL_ERROR, so KVM filled this member.
        let internal = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal };
        let what = match internal.suberror {
            1 => "could not emulate an instruction",
            2 => "an exception while another was delivered",
            3 => "an exit while an event was delivered",
            4 => "an exit KVM does not know",
            _ => "unknown",
        };
        let count = (internal.ndata as usize).min(internal.data.len());
        let mut detail = format!("suberror {}: {what}", internal.suberror);
        for word in &internal.data[..count] {
            detail.push_str(&format!(" {word:#x}"));
        }
        detail.push_str(&self.place());
        Ending::KvmInternalError { detail }
    }

    fn place(&self) -> String {
        self.fd
            .get_regs()
            .map_or_else(|_| String::new(), |regs| format!(" at RIP {:#x}", regs.rip))
    }
}

/// Only paravirtual guests of other kinds raise these, but their meaning is clear.
fn system_event(kind: u32) -> Ending {
    match kind {
        kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN => Ending::PowerOff,
        kvm_bindings::KVM_SYSTEM_EVENT_RESET => Ending::Reboot,
        kvm_bindings::KVM_SYSTEM_EVENT_CRASH => Ending::Panic,
        _ => Ending::KvmInternalError {
            detail: format!("unexpected system event {kind}"),
        },
    }
}
