//! A machine with its vCPUs, which accepts no further devices: the vCPUs for their threads, and the rest of
//! the machine.

use std::sync::Arc;

use kvm_ioctls::{VcpuFd, VmFd};
use serde_json::Value;

use super::error::{MachineError, kvm};
use super::vcpus::{boot, leaves_of_vcpu, prepare_vcpu, second};
use super::{KernelLoad, Machine, Start};
use crate::arch::x86_64::layout::Layout;
use crate::bus::Bus;
use crate::ending::EndSignal;
use crate::generation::Generation;
use crate::interrupt::InKernel;
use crate::kind::{PlainMemory, ReadyKind, ServedKind, SpanKind, VmKind};
use crate::memory::GuestRam;
use crate::power::PowerButton;
use crate::serial::Console;
use crate::span::machine::migrated_msrs;
use crate::vcpu::{Vcpu, VcpuCounters, VcpuThread};

/// A machine whose vCPUs can be started.
pub struct Ready {
    /// The vCPUs, each for a thread.
    pub vcpus: Vec<VcpuThread>,
    /// The machine without its vCPUs.
    pub running: Running,
    /// Saved state of the functions on the bus, if the VM resumes from one.
    pub functions: Option<Vec<Value>>,
    /// The kind of VM.
    pub kind: ReadyKind,
}

/// Data of a plain VM while it runs.
pub struct PlainVm {
    /// Service of the pages of its memory.
    pub memory: PlainMemory,
    /// The vCPUs, for other threads to use while they are paused.
    pub vcpus: Vec<VcpuFd>,
}

impl PlainVm {
    /// Returns whether each page of its memory can still be read.
    pub fn memory_is_whole(&self) -> bool {
        self.memory.paging().is_none_or(|paging| paging.is_whole())
    }

    /// Reports the pause to the guest, so that its watchdogs accept it. A guest without paravirtual clocks
    /// receives no report.
    pub fn report_pause(&self) {
        for vcpu in &self.vcpus {
            let _ = vcpu.kvmclock_ctrl();
        }
    }
}

/// The rest of a [`Machine`] without its vCPUs.
pub struct Running {
    /// Descriptor of the VM in KVM.
    pub vm: Arc<VmFd>,
    /// Address map of the guest.
    pub layout: Layout,
    /// Guest memory.
    pub memory: GuestRam,
    /// I/O ports.
    pub ports: Arc<Bus>,
    /// Addresses outside RAM.
    pub mmio: Arc<Bus>,
    /// The serial port COM1.
    pub console: Arc<Console>,
    /// The power button.
    pub button: PowerButton,
    /// Kept because its interrupt ends with it.
    _generation: Generation,
    /// Signal of the VM's end.
    pub end: Arc<EndSignal>,
    /// Model-specific registers of KVM.
    pub register_numbers: Vec<u32>,
}

impl Machine {
    /// Creates the vCPUs; no device can be added afterwards.
    pub fn into_vcpus(self, count: u8, kind: ServedKind) -> Result<Ready, MachineError> {
        self.memory_mapping.finish()?;
        let (ports, mmio) = (Arc::new(self.ports), Arc::new(self.mmio));
        let migrated_msrs = migrated_msrs(&self.register_numbers);
        let (mut vcpus, mut seconds) = (Vec::new(), Vec::<VcpuFd>::new());
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
                        let KernelLoad::Loaded(entry) = load else {
                            return Err(MachineError::Lacking("kernel in memory"));
                        };
                        boot(&fd, *entry)?;
                    }
                }
                Start::Resume(saved) => saved
                    .vcpus
                    .get(usize::from(id))
                    .ok_or(MachineError::Lacking("state for so many vCPUs"))?
                    .restore(&fd)?,
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
                saved.chips.restore(&self.vm)?;
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
            kind: kind.map_plain(|memory| PlainVm {
                memory,
                vcpus: seconds,
            }),
        })
    }
}
