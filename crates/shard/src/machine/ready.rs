//! A machine that has its vCPUs, and no more devices from now on: those for their threads, and what is left of it.

use std::sync::Arc;

use kvm_ioctls::{VcpuFd, VmFd};
use serde_json::Value;

use super::error::{MachineError, kvm};
use super::vcpus::{boot, prepare_vcpu, second};
use super::{Home, Load, Machine, Start};
use crate::arch::x86_64::layout::Layout;
use crate::bus::Bus;
use crate::ending::EndSignal;
use crate::generation::Generation;
use crate::interrupt::InKernel;
use crate::memory::GuestRam;
use crate::memory::replica::Coherence;
use crate::power::PowerButton;
use crate::serial::Console;
use crate::span::local::VcpuCoherence;
use crate::span::machine::travelling;
use crate::vcpu::{Vcpu, VcpuCounters, VcpuThread};

/// A machine whose vCPUs can be started.
pub struct Ready {
    /// The vCPUs, each for a thread.
    pub vcpus: Vec<VcpuThread>,
    /// The rest.
    pub running: Running,
    /// The state of the functions on the bus, if the VM goes on from one.
    pub functions: Option<Vec<Value>>,
    /// What makes it the home of a VM that spans cells, with its ports and its other addresses.
    pub home: Option<(Home, Arc<Bus>, Arc<Bus>)>,
}

/// What is left of a [`Machine`] beside its vCPUs.
pub struct Running {
    /// KVM's side.
    pub vm: Arc<VmFd>,
    /// Where everything is.
    pub layout: Layout,
    /// Guest memory.
    pub memory: GuestRam,
    /// COM1.
    pub console: Arc<Console>,
    /// The power button.
    pub button: PowerButton,
    /// Kept: its interrupt goes with it.
    _generation: Generation,
    /// How the VM ends.
    pub end: Arc<EndSignal>,
    /// The vCPUs, to read their state while they stand still.
    pub vcpus: Vec<VcpuFd>,
    /// The model-specific registers that KVM has.
    pub register_numbers: Vec<u32>,
}

impl Machine {
    /// Makes the vCPUs; no device can be added any more.
    pub fn into_vcpus(self, count: u8, coherence: Option<&Coherence>) -> Result<Ready, MachineError> {
        let (ports, mmio) = (Arc::new(self.ports), Arc::new(self.mmio));
        let (mut vcpus, mut seconds) = (Vec::new(), Vec::new());
        for id in 0..count {
            let mut fd = self.vm.create_vcpu(u64::from(id)).map_err(kvm("make a vCPU"))?;
            match &self.start {
                Start::Boot { cpuid, load } => {
                    if let Some(home) = &self.span {
                        home.parts.pace(&fd)?;
                    }
                    prepare_vcpu(&fd, cpuid, id, self.groups, self.span.is_some())?;
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
            vcpus.push(match &self.span {
                Some(home) => {
                    let mut local = home.parts.vcpu(
                        &travelling(&self.register_numbers),
                        &fd,
                        id,
                        &self.memory,
                        counters.clone(),
                    )?;
                    if let Some(coherence) = coherence {
                        local.follow(VcpuCoherence::of(&mut fd, id, coherence));
                    }
                    Vcpu {
                        fd,
                        ports,
                        mmio,
                        end,
                        counters,
                        local,
                    }
                    .into_thread()
                }
                None => {
                    seconds.push(second(&self.vm, &fd)?);
                    Vcpu {
                        fd,
                        ports,
                        mmio,
                        end,
                        counters,
                        local: InKernel,
                    }
                    .into_thread()
                }
            });
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
            console: self.console,
            button: self.button,
            _generation: self.generation,
            end: self.end,
            vcpus: seconds,
            register_numbers: self.register_numbers,
        };
        Ok(Ready {
            vcpus,
            running,
            functions,
            home: self.span.map(|home| (home, ports, mmio)),
        })
    }
}
