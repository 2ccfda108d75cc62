//! A machine that has its vCPUs, and no more devices from now on: those for their threads, and what is left
//! of it.

use std::sync::Arc;

use kvm_ioctls::{VcpuFd, VmFd};
use serde_json::Value;

use super::error::{MachineError, kvm};
use super::vcpus::{boot, leaves_of_vcpu, prepare_vcpu, second};
use super::{Load, Machine, Start};
use crate::arch::x86_64::layout::Layout;
use crate::bus::Bus;
use crate::ending::EndSignal;
use crate::generation::Generation;
use crate::interrupt::InKernel;
use crate::kind::{ReadyKind, ServedKind, SpanKind, VmKind};
use crate::memory::GuestRam;
use crate::power::PowerButton;
use crate::serial::Console;
use crate::sharing::Sharing;
use crate::span::machine::migrated_msrs;
use crate::vcpu::{Vcpu, VcpuCounters, VcpuThread};

/// A machine whose vCPUs can be started.
pub struct Ready {
    /// The vCPUs, each for a thread.
    pub vcpus: Vec<VcpuThread>,
    /// The rest.
    pub running: Running,
    /// The state of the functions on the bus, if the VM goes on from one.
    pub functions: Option<Vec<Value>>,
    /// The kind of VM.
    pub kind: ReadyKind,
}

/// What a plain VM has while it runs.
pub struct PlainVm {
    /// What it shares with other VMs; none when its pages are too large for that.
    pub sharing: Option<Sharing>,
    /// The vCPUs, for others than their threads to use while they stand still.
    pub vcpus: Vec<VcpuFd>,
}

impl PlainVm {
    /// Tells the guest that its clocks stood still, so that its watchdogs bear it. A guest without
    /// paravirtual clocks can't be told.
    pub fn tell_of_pause(&self) {
        for vcpu in &self.vcpus {
            let _ = vcpu.kvmclock_ctrl();
        }
    }
}

/// What is left of a [`Machine`] beside its vCPUs.
pub struct Running {
    /// KVM's side.
    pub vm: Arc<VmFd>,
    /// Where everything is.
    pub layout: Layout,
    /// Guest memory.
    pub memory: GuestRam,
    /// I/O ports.
    pub ports: Arc<Bus>,
    /// Addresses outside RAM.
    pub mmio: Arc<Bus>,
    /// COM1.
    pub console: Arc<Console>,
    /// The power button.
    pub button: PowerButton,
    /// Kept: its interrupt goes with it.
    _generation: Generation,
    /// How the VM ends.
    pub end: Arc<EndSignal>,
    /// The model-specific registers that KVM has.
    pub register_numbers: Vec<u32>,
}

impl Machine {
    /// Makes the vCPUs; no device can be added any more.
    pub fn into_vcpus(self, count: u8, kind: ServedKind) -> Result<Ready, MachineError> {
        self.memory_mapping.finish()?;
        let (ports, mmio) = (Arc::new(self.ports), Arc::new(self.mmio));
        let migrated_msrs = migrated_msrs(&self.register_numbers);
        let (mut vcpus, mut seconds) = (Vec::new(), Vec::new());
        for id in 0..count {
            let mut fd = self.vm.create_vcpu(u64::from(id)).map_err(kvm("make a vCPU"))?;
            match &self.start {
                Start::Boot { cpuid, load } => {
                    match &kind {
                        VmKind::Plain(_) => prepare_vcpu(&fd, &leaves_of_vcpu(cpuid, id, self.groups)?)?,
                        VmKind::SharedSpan(home) | VmKind::CoherentSpan(home, _) => {
                            home.setup.prepare_vcpu(&fd, cpuid, id, self.groups)?;
                        }
                    }
                    if id == 0 {
                        let Load::Done(entry) = load else {
                            return Err(MachineError::Lacking("kernel in memory"));
                        };
                        boot(&fd, *entry)?;
                    }
                }
                Start::Resume(saved) => saved
                    .vcpus
                    .get(usize::from(id))
                    .ok_or(MachineError::Lacking("state for so many vCPUs"))?
                    .give(&fd)?,
            }
            let counters = Arc::new(VcpuCounters::default());
            let (ports, mmio, end) = (ports.clone(), mmio.clone(), self.end.clone());
            let (home, memory) = match &kind {
                VmKind::Plain(_) => {
                    seconds.push(second(&self.vm, &fd)?);
                    let local = InKernel;
                    let vcpu = Vcpu {
                        fd,
                        ports,
                        mmio,
                        end,
                        counters,
                        local,
                    };
                    vcpus.push(vcpu.into_thread());
                    continue;
                }
                VmKind::SharedSpan(home) => (home, SpanKind::SharedSpan(&self.memory)),
                VmKind::CoherentSpan(home, coherence) => {
                    (home, SpanKind::CoherentSpan(&self.memory, *coherence))
                }
            };
            let local = home
                .setup
                .vcpu(&migrated_msrs, &mut fd, id, memory, counters.clone())?;
            let vcpu = Vcpu {
                fd,
                ports,
                mmio,
                end,
                counters,
                local,
            };
            vcpus.push(vcpu.into_thread());
        }
        let functions = match self.start {
            Start::Resume(saved) => {
                saved.chips.give(&self.vm)?;
                self.generation.changed()?;
                Some(saved.functions)
            }
            Start::Boot { .. } => None,
        };
        let running = Running {
            vm: self.vm,
            layout: self.layout,
            memory: self.memory,
            ports,
            mmio,
            console: self.console,
            button: self.button,
            _generation: self.generation,
            end: self.end,
            register_numbers: self.register_numbers,
        };
        Ok(Ready {
            vcpus,
            running,
            functions,
            kind: kind.map_plain(|sharing| PlainVm {
                sharing,
                vcpus: seconds,
            }),
        })
    }
}
