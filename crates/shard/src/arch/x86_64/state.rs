//! KVM's state of a paused machine: each vCPU, the interrupt chips and the clock. It is saved from one VM and
//! restored in another, which continues from there.
//!
//! The order matters where registers depend on one another: CPUID is first; the local interrupt controller
//! precedes the model-specific registers, of which the deadline timer's is the last; pending events come at
//! the end.

use kvm_bindings::{
    CpuId, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, Msrs, kvm_clock_data,
    kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs,
    kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::msr::{MSR_TSC, MSR_TSC_DEADLINE};

/// Registers read by one call. KVM stops at the first register that it refuses.
const MSRS_AT_ONCE: usize = 64;

/// Reason why a state can't be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// KVM refused to read or write a part of the state.
    #[error("KVM: cannot {what}")]
    Kvm {
        /// The refused operation.
        what: &'static str,
        /// Error of KVM.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// This host's KVM does not have the register's saved value.
    #[error("this host's KVM does not take the model-specific register {0:#x} of the saved vCPU")]
    Register(u32),
    /// The state of an interrupt controller is impossible.
    #[error("a vCPU came with an interrupt controller in an impossible state")]
    Insane,
    /// The saved state exceeds KVM's tables.
    #[error("the saved vCPU has more CPUID leaves or registers than KVM takes")]
    TooMany,
}

fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Kvm { what, source }
}

/// State of one vCPU.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    cpuid: Vec<kvm_cpuid_entry2>,
    #[serde(flatten)]
    processor: Processor,
    local_apic: kvm_lapic_state,
    running: kvm_mp_state,
    tsc_khz: u32,
}

/// Registers of a vCPU and its pending events.
#[derive(Serialize, Deserialize)]
pub struct Processor {
    registers: kvm_regs,
    special: kvm_sregs,
    floating: kvm_xsave,
    extended: kvm_xcrs,
    debug: kvm_debugregs,
    model_specific: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
}

impl Processor {
    /// Reads the registers. The vCPU is paused and has completed its last access.
    pub fn save(fd: &VcpuFd, register_numbers: &[u32]) -> Result<Self, StateError> {
        Ok(Self {
            registers: fd.get_regs().map_err(kvm("read registers"))?,
            special: fd.get_sregs().map_err(kvm("read special registers"))?,
            floating: fd.get_xsave().map_err(kvm("read floating-point registers"))?,
            extended: fd.get_xcrs().map_err(kvm("read extended control registers"))?,
            debug: fd.get_debug_regs().map_err(kvm("read debug registers"))?,
            model_specific: model_specific(fd, register_numbers)?,
            events: fd.get_vcpu_events().map_err(kvm("read pending events"))?,
        })
    }

    /// Restores the registers in another vCPU, which has the same CPUID. `controller` sets the local
    /// interrupt controller, which depends on some registers and on which others depend.
    pub fn restore(
        &self,
        fd: &VcpuFd,
        controller: impl FnOnce() -> Result<(), StateError>,
    ) -> Result<(), StateError> {
        fd.set_regs(&self.registers).map_err(kvm("set registers"))?;
        fd.set_sregs(&self.special)
            .map_err(kvm("set special registers"))?;
        // SAFETY: the structure is the whole area of a vCPU without dynamically enabled features, which no VM
        // here has.
        unsafe { fd.set_xsave(&self.floating) }.map_err(kvm("set floating-point registers"))?;
        fd.set_xcrs(&self.extended)
            .map_err(kvm("set extended control registers"))?;
        fd.set_debug_regs(&self.debug)
            .map_err(kvm("set debug registers"))?;
        controller()?;
        for chunk in self.model_specific.chunks(MSRS_AT_ONCE) {
            let entries = Msrs::from_entries(chunk).map_err(|_| StateError::TooMany)?;
            let set = fd
                .set_msrs(&entries)
                .map_err(kvm("set model-specific registers"))?;
            if let Some(refused) = chunk.get(set) {
                return Err(StateError::Register(refused.index));
            }
        }
        fd.set_vcpu_events(&self.events)
            .map_err(kvm("set pending events"))
    }
}

/// Returns the registers that [`VcpuState::save`] reads, as this host's KVM lists them.
pub fn register_numbers(kvm_fd: &Kvm) -> Result<Vec<u32>, StateError> {
    let list = kvm_fd
        .get_msr_index_list()
        .map_err(kvm("list the model-specific registers"))?;
    let mut numbers: Vec<u32> = list
        .as_slice()
        .iter()
        .copied()
        .filter(|number| *number != MSR_TSC_DEADLINE)
        .collect();
    numbers.push(MSR_TSC_DEADLINE);
    Ok(numbers)
}

impl VcpuState {
    /// Reads the state of the vCPU, which is paused and has completed its last access.
    pub fn save(fd: &VcpuFd, register_numbers: &[u32]) -> Result<Self, StateError> {
        let cpuid = fd
            .get_cpuid2(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(kvm("read CPUID"))?
            .as_slice()
            .to_vec();
        Ok(Self {
            cpuid,
            // First: reading it lets KVM process what is pending for the local interrupt controller.
            running: fd.get_mp_state().map_err(kvm("read whether the vCPU runs"))?,
            processor: Processor::save(fd, register_numbers)?,
            local_apic: fd
                .get_lapic()
                .map_err(kvm("read the local interrupt controller"))?,
            tsc_khz: fd.get_tsc_khz().map_err(kvm("read the frequency of the TSC"))?,
        })
    }

    /// Restores this state in a new vCPU.
    pub fn restore(&self, fd: &VcpuFd) -> Result<(), StateError> {
        let cpuid = CpuId::from_entries(&self.cpuid).map_err(|_| StateError::TooMany)?;
        fd.set_cpuid2(&cpuid).map_err(kvm("set CPUID"))?;
        if fd.get_tsc_khz().ok() != Some(self.tsc_khz) {
            fd.set_tsc_khz(self.tsc_khz)
                .map_err(kvm("set the frequency of the TSC"))?;
        }
        fd.set_mp_state(self.running)
            .map_err(kvm("set whether the vCPU runs"))?;
        self.processor.restore(fd, || {
            fd.set_lapic(&self.local_apic)
                .map_err(kvm("set the local interrupt controller"))
        })?;
        // A guest without KVM's clock has no such flag.
        let _ = fd.kvmclock_ctrl();
        Ok(())
    }
}

/// Returns those of `numbers` that this vCPU has.
pub fn present(fd: &VcpuFd, numbers: &[u32]) -> Result<Vec<u32>, StateError> {
    let entries = model_specific(fd, numbers)?;
    Ok(entries.iter().map(|entry| entry.index).collect())
}

/// Returns those of KVM's registers that this vCPU has, the deadline timer's last.
fn model_specific(fd: &VcpuFd, numbers: &[u32]) -> Result<Vec<kvm_msr_entry>, StateError> {
    let mut found: Vec<kvm_msr_entry> = Vec::with_capacity(numbers.len());
    let mut rest = numbers;
    while !rest.is_empty() {
        let asked: Vec<_> = rest
            .iter()
            .take(MSRS_AT_ONCE)
            .map(|&index| kvm_msr_entry {
                index,
                ..Default::default()
            })
            .collect();
        let mut entries = Msrs::from_entries(&asked).map_err(|_| StateError::TooMany)?;
        let got = fd
            .get_msrs(&mut entries)
            .map_err(kvm("read model-specific registers"))?;
        found.extend_from_slice(&entries.as_slice()[..got]);
        // The register at which KVM stopped is not available.
        let refused = usize::from(got < asked.len());
        rest = &rest[got + refused..];
    }
    let tsc = found
        .iter()
        .find(|entry| entry.index == MSR_TSC)
        .map_or(0, |entry| entry.data);
    for entry in &mut found {
        // Zero also means that the timer has expired and its interrupt is pending, which no register shows.
        // Such a timer expires again, at once.
        if entry.index == MSR_TSC_DEADLINE && entry.data == 0 {
            entry.data = tsc;
        }
    }
    Ok(found)
}

/// State of the interrupt chips and the clock of a VM.
#[derive(Clone, Serialize, Deserialize)]
pub struct ChipState {
    chips: Vec<kvm_irqchip>,
    clock: kvm_clock_data,
}

impl ChipState {
    /// Reads the state.
    pub fn save(vm: &VmFd) -> Result<Self, StateError> {
        let chips = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC]
            .into_iter()
            .map(|chip_id| {
                let mut chip = kvm_irqchip {
                    chip_id,
                    ..Default::default()
                };
                vm.get_irqchip(&mut chip)
                    .map_err(kvm("read an interrupt controller"))?;
                Ok(chip)
            })
            .collect::<Result<_, StateError>>()?;
        Ok(Self {
            chips,
            clock: vm.get_clock().map_err(kvm("read the clock"))?,
        })
    }

    /// Restores the state in a new VM, whose vCPUs exist.
    pub fn restore(&self, vm: &VmFd) -> Result<(), StateError> {
        for chip in &self.chips {
            vm.set_irqchip(chip).map_err(kvm("set an interrupt controller"))?;
        }
        let clock = kvm_clock_data {
            clock: self.clock.clock,
            ..Default::default()
        };
        vm.set_clock(&clock).map_err(kvm("set the clock"))
    }
}
