//! Loop of one vCPU: enters the guest, serves its exits, and reports why the VM ended.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::kvm_run;
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::bus::Bus;
use crate::chain::chain;
use crate::ending::EndSignal;
use crate::interrupt::{LocalController, Next};
use crate::kick::{self, Kickable};
use crate::launch::Ending;
use crate::machine::statistics;
use crate::quiescer::Quiescer;
use crate::sandbox::ThreadKind;
use crate::vcpu_stop::VcpuStop;

/// Number of exits by kind.
#[derive(Debug, Default)]
pub struct VcpuCounters {
    /// Reads and writes of I/O ports.
    pub port: AtomicU64,
    /// Memory-mapped reads and writes.
    pub mmio: AtomicU64,
    /// Accesses that no device claimed (of both kinds).
    pub unclaimed: AtomicU64,
    /// Exits by a signal: kicks.
    pub interrupted: AtomicU64,
    /// All other exits.
    pub other: AtomicU64,
    /// In a spanning VM: HLT.
    pub halt: AtomicU64,
    /// In a spanning VM: the guest can accept an interrupt.
    pub window: AtomicU64,
    /// In a spanning VM: ends of interrupts.
    pub end_of_interrupt: AtomicU64,
    /// In a spanning VM: interrupts to other vCPUs.
    pub ipi: AtomicU64,
    /// In a spanning VM: writes of the deadline timer.
    pub timer: AtomicU64,
    /// In a spanning VM: other accesses to model-specific registers.
    pub msr: AtomicU64,
}

impl VcpuCounters {
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// One vCPU with its local interrupt controller, before its thread runs it.
pub struct Vcpu<L> {
    /// KVM's file of the vCPU.
    pub fd: VcpuFd,
    /// Bus of I/O ports.
    pub ports: Arc<Bus>,
    /// Bus of physical addresses outside RAM.
    pub mmio: Arc<Bus>,
    /// Receives the cause of the end.
    pub end: Arc<EndSignal>,
    /// Counters of exits.
    pub counters: Arc<VcpuCounters>,
    /// Local interrupt controller.
    pub local: L,
}

/// Start parameters of a vCPU's thread, for either interrupt controller.
pub struct VcpuThread {
    /// Kind of the thread, which determines its system calls.
    pub kind: ThreadKind,
    /// Counters of exits.
    pub counters: Arc<VcpuCounters>,
    /// Stop of the vCPU by an order.
    pub stop: Arc<VcpuStop>,
    /// File of KVM's statistics of the vCPU; an error where the host's KVM has none.
    pub statistics: io::Result<OwnedFd>,
    /// Runs the vCPU until the VM ends; pauses when the quiescer requests it.
    pub run: Box<dyn FnOnce(&Quiescer) + Send>,
}

/// Result of one entry into the guest.
enum Step {
    /// An exit that was served.
    Served,
    /// A signal, or a reason not to enter.
    Interrupted,
    /// The VM has ended.
    Ended(Ending),
}

impl<L: LocalController> Vcpu<L> {
    /// Returns the start parameters of the vCPU's thread. Called before the first thread is sealed.
    pub fn into_thread(self) -> VcpuThread {
        let stop = Arc::new(VcpuStop::default());
        VcpuThread {
            kind: L::THREAD,
            counters: self.counters.clone(),
            stop: stop.clone(),
            statistics: statistics(&self.fd),
            run: Box::new(move |quiescer| self.run(quiescer, &stop)),
        }
    }

    /// Runs until the VM ends; pauses when `quiescer` requests it, and parks while `stop` does.
    pub fn run(mut self, quiescer: &Quiescer, stop: &Arc<VcpuStop>) {
        let flag = &raw mut self.fd.get_kvm_run().immediate_exit;
        // SAFETY: in the page that KVM shares, mapped as long as `self.fd`, which is dropped after this. The
        // kernel reads it; this thread writes it only through this, its handler, and `finish`, a byte at
        // once.
        let kickable = unsafe { Kickable::new(flag) };
        let participant = quiescer.join(kick::signal(), stop.clone());
        if let Err(error) = self.local.open() {
            let detail = format!("a vCPU's thread cannot start: {error}");
            self.end.end(Ending::ShardFailed { detail });
        }
        loop {
            // Cleared before the checks of all reasons for a kick: a later kick keeps the vCPU out of the
            // guest.
            kickable.clear();
            if self.end.stopping() {
                break;
            }
            if participant.wanted() {
                if self.local.is_resident()
                    && let Step::Ended(ending) = self.finish()
                {
                    self.end.end(ending);
                    break;
                }
                participant.check();
                continue;
            }
            if stop.is_wanted() {
                stop.serve(self.local.is_resident(), || {
                    participant.wanted() || self.end.stopping()
                });
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
        self.local.close();
    }

    /// Prepares the entry into the guest; returns `Interrupted` if the vCPU must not enter now.
    fn prepare(&mut self) -> Step {
        match self.local.prepare_entry(&mut self.fd) {
            Ok(Next::Enter) => Step::Served,
            Ok(Next::Retry) => Step::Interrupted,
            Ok(Next::Leave(order)) => match self.finish() {
                Step::Ended(ending) => Step::Ended(ending),
                _ => {
                    self.local.depart(&self.fd, order);
                    Step::Interrupted
                }
            },
            Err(error) => Step::Ended(Ending::KvmInternalError {
                detail: chain(&error),
            }),
        }
    }

    /// Makes KVM complete the access that was served last, with the rest of its instruction, without running
    /// the guest. Only then are the registers consistent. The vCPU does not enter the guest again before
    /// [`Kickable::clear`].
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
        self.local.sync_after_exit(&mut self.fd);
        step
    }

    fn serve_exit(&mut self) -> Step {
        let exit = self.fd.run();
        self.local.note_exit();
        match exit {
            Ok(VcpuExit::IoIn(port, data)) => {
                VcpuCounters::count(&self.counters.port);
                let (data, bytes) = (data.as_mut_ptr(), data.len());
                let size = self.port_access_bytes();
                // SAFETY: `data` is KVM's buffer in the shared page of this vCPU, mapped as long as
                // `self.fd`; no other code uses it until the next KVM_RUN.
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
                let value = self.local.read(&mut self.fd, index);
                self.complete_msr(value);
            }
            Ok(VcpuExit::X86Wrmsr(exit)) => {
                let (index, value) = (exit.index, exit.data);
                let is_taken = self.local.write(&mut self.fd, index, value);
                self.complete_msr(is_taken.then_some(value));
            }
            Ok(VcpuExit::Hlt) => {
                VcpuCounters::count(&self.counters.halt);
                self.local.halt(&mut self.fd);
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

    /// Completes the current access to a model-specific register with its value; none makes it fault.
    fn complete_msr(&mut self, value: Option<u64>) {
        let run = self.fd.get_kvm_run();
        run.__bindgen_anon_1.msr.error = u8::from(value.is_none());
        if let Some(value) = value {
            run.__bindgen_anon_1.msr.data = value;
        }
    }

    /// Returns the size of one access of the current port exit; string instructions make several at once.
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
