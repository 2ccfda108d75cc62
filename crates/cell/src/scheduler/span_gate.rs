//! Stops of the vCPUs of VMs that span cells, by the process of their home.
//!
//! The home's process has the control sockets of the VM's shards in all cells. It stops the vCPUs while their
//! window is closed, by leases as for any VM ([`super::gate`]), and lets all go on when it opens. When this
//! process dies, the leases run out, and Linux runs the vCPUs.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use policy::cpu::entry::{VcpuEntry, VcpuState};
use policy::cpu::run_queue::Queued;
use policy::cpu::windows::{VmWindows, WindowState};
use policy::cpu::{MILLISECOND, Nanos, VcpuId, VmId};
use shard_api::launch::Order;
use tracing::debug;

use super::cpu_thread::shorten_slice;
use super::gate::{Gate, GateOrder, LEASE_MS};
use super::host_clock::monotonic;
use super::vm_table::next_number;
use crate::affinity;
use crate::handle::VmHandle;

/// Time limit for the thread to take over the VMs that it is given.
const TAKE_LIMIT: Duration = Duration::from_secs(1);
/// Interval at which an idle thread looks at the clock, which a suspended machine may have stopped.
const IDLE_INTERVAL: Nanos = 500 * MILLISECOND;

/// Time until an order that was not sent is given again, and the longest such time: it doubles while orders
/// are not sent. Ours: a vCPU that is not let go on stands still for the rest of its lease, which may be its
/// whole window, and its VM's other vCPUs wait for it; a shard that takes no orders costs little.
const RESEND_MIN: Nanos = MILLISECOND;
const RESEND_MAX: Nanos = 64 * MILLISECOND;

/// vCPUs of a VM, and times at which they may run.
#[derive(Clone, Debug)]
pub(crate) struct GatedVm {
    pub(crate) handle: VmHandle,
    /// Number of the boot.
    pub(crate) starts: u64,
    /// vCPUs by number.
    pub(crate) vcpus: Vec<GatedVcpu>,
    pub(crate) windows: VmWindows,
}

/// vCPU of a VM that spans cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GatedVcpu {
    /// Number of the shard among the VM's.
    pub(crate) shard: usize,
    pub(crate) shard_pid: i32,
    pub(crate) cell: u16,
    /// The host's number of its CPU.
    pub(crate) cpu: usize,
}

/// Message to the thread, which reports when it has followed it.
enum Input {
    /// The VMs with windows, by name.
    Vms(BTreeMap<String, GatedVm>, Sender<()>),
    /// The thread is to leave all VMs to Linux, and to end.
    End(Sender<()>),
}

/// Handle of the thread. Cheap to clone; all clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct SpanGate(Sender<Input>);

impl SpanGate {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(super) fn start() -> io::Result<Self> {
        let (send, receive) = mpsc::channel();
        let thread = GateThread::default();
        std::thread::Builder::new()
            .name("windows".into())
            .spawn(move || thread.run(&receive))?;
        Ok(Self(send))
    }

    /// Replaces the VMs. When it returns, no vCPU of another VM gets an order any more, and those of a former
    /// one go on.
    pub(crate) fn set(&self, vms: BTreeMap<String, GatedVm>) {
        self.send(|tell| Input::Vms(vms, tell));
    }

    /// Leaves all VMs to Linux permanently.
    pub(super) fn end(&self) {
        self.send(Input::End);
    }

    fn send(&self, input: impl FnOnce(Sender<()>) -> Input) {
        let (tell, told) = mpsc::channel();
        if self.0.send(input(tell)).is_ok() {
            // A thread that is late gives its last orders late; each stop is over after its lease.
            let _ = told.recv_timeout(TAKE_LIMIT);
        }
    }
}

#[derive(Debug, Default)]
struct GateThread {
    /// VMs with windows by name, each with the number that the gate knows.
    vms: BTreeMap<String, (VmId, GatedVm)>,
    last_number: VmId,
    gate: Gate,
    /// Time after which orders that were not sent are given again.
    resend_after: Option<Nanos>,
}

impl GateThread {
    fn run(mut self, inputs: &Receiver<Input>) {
        shorten_slice();
        loop {
            let received = match self.wake_after() {
                None => inputs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(after) => inputs.recv_timeout(Duration::from_nanos(after)),
            };
            match received {
                Ok(Input::End(tell)) => {
                    self.end();
                    let _ = tell.send(());
                    return;
                }
                Ok(Input::Vms(vms, tell)) => {
                    self.replace(vms);
                    // A sender that has gone needs no answer.
                    let _ = tell.send(());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.apply();
        }
    }

    /// Time until the next order; none without VMs.
    fn wake_after(&self) -> Option<Nanos> {
        if self.vms.is_empty() {
            return None;
        }
        let now = monotonic();
        let changes = self
            .vms
            .values()
            .filter_map(|(_, vm)| vm.windows.next_change(now));
        let resend = self.resend_after.map(|after| now.saturating_add(after));
        let next = changes
            .chain(self.gate.deadline())
            .chain(resend)
            .fold(now + IDLE_INTERVAL, Nanos::min);
        Some(next.saturating_sub(now))
    }

    fn end(&mut self) {
        let vms: Vec<VmHandle> = self.vms.values().map(|(_, vm)| vm.handle.clone()).collect();
        self.replace(BTreeMap::new());
        for handle in vms {
            handle.restore_affinity();
        }
    }

    fn replace(&mut self, vms: BTreeMap<String, GatedVm>) {
        let former = std::mem::take(&mut self.vms);
        for (name, vm) in vms {
            let known = former
                .get(&name)
                .filter(|(_, former)| former.starts == vm.starts && former.vcpus == vm.vcpus);
            let number = match known {
                Some((number, _)) => *number,
                None => self.new_number(&former),
            };
            self.vms.insert(name, (number, vm));
        }
        let is_kept = |number: VmId| self.vms.values().any(|(kept, _)| *kept == number);
        for (number, vm) in former.values().filter(|(number, _)| !is_kept(*number)) {
            for index in 0..vm.vcpus.len() {
                vm.order(index, GateOrder::Continue);
            }
            self.gate.forget(*number);
        }
    }

    /// A number that neither a former VM nor one of the present ones has. There are fewer VMs than numbers.
    fn new_number(&mut self, former: &BTreeMap<String, (VmId, GatedVm)>) -> VmId {
        let is_used = |number: VmId| {
            former
                .values()
                .chain(self.vms.values())
                .any(|(used, _)| *used == number)
        };
        self.last_number = next_number(self.last_number, is_used).unwrap_or_default();
        self.last_number
    }

    /// Gives the orders that are due.
    fn apply(&mut self) {
        let now = monotonic();
        let mut queue = Vec::new();
        for (number, vm) in self.vms.values() {
            queue.extend(queue_of(*number, vm, now));
        }
        let mut orders = Vec::new();
        self.gate.apply(now, &queue, &mut orders);
        let mut is_unsent = false;
        for (vcpu, order) in orders {
            if let Some((_, vm)) = self.vms.values().find(|(number, _)| *number == vcpu.vm)
                && !vm.order(vcpu.index.into(), order)
            {
                self.gate.note_unsent(vcpu);
                is_unsent = true;
            }
        }
        self.resend_after = is_unsent.then(|| match self.resend_after {
            None => RESEND_MIN,
            Some(after) => (2 * after).min(RESEND_MAX),
        });
    }
}

/// The vCPUs of a VM as the gate takes them: they wait while the window is closed.
fn queue_of(vm: VmId, gated: &GatedVm, now: Nanos) -> impl Iterator<Item = Queued> {
    let state = match gated.windows.state(now) {
        WindowState::Closed => VcpuState::Waiting,
        WindowState::Open | WindowState::Absent => VcpuState::Running,
    };
    let count = u16::try_from(gated.vcpus.len()).unwrap_or(u16::MAX);
    (0..count).map(move |index| {
        let entry = VcpuEntry {
            state,
            ..VcpuEntry::default()
        };
        Queued::new(VcpuId { vm, index }, entry)
    })
}

impl GatedVm {
    /// Gives a vCPU an order. Returns whether it was sent, if it is one for the shard.
    fn order(&self, index: usize, order: GateOrder) -> bool {
        let (Some(vcpu), Ok(number)) = (self.vcpus.get(index), u8::try_from(index)) else {
            return true;
        };
        let order = match order {
            GateOrder::Pin => {
                let pinned = affinity::pin(vcpu.shard_pid, number, &[vcpu.cpu], Some(vcpu.cell));
                if let Err(error) = pinned {
                    // The shard has ended; or the CPU is gone, and the vCPU runs on another one.
                    debug!(%error, vcpu = number, "the thread of a vCPU is not on its CPU");
                }
                return true;
            }
            // Halts of these vCPUs are not counted, so none leaves its CPU.
            GateOrder::Spread => return true,
            GateOrder::Stop => Order::StopVcpu {
                vcpu: number,
                for_ms: LEASE_MS,
            },
            GateOrder::Continue => Order::ContinueVcpu { vcpu: number },
        };
        self.handle.gate_in(self.starts, vcpu.shard, &order)
    }
}

#[cfg(test)]
mod tests;
