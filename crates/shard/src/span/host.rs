//! Properties of a host that the shards of a VM on several hosts must agree on, as its monitor reads them
//! from KVM.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};
use shard_api::cpuid::Leaf;
use shard_api::platform::HostProcessor;
use shard_api::relation::Counter;

use crate::machine::{self, MachineError};

/// Fraction bits of the ratio by which processors scale the TSC: AMD (APM, volume 2, 15.30.5) and others
/// (Intel SDM, volume 3, 26.3).
const DIGITS_AMD: u32 = 32;
const DIGITS_INTEL: u32 = 48;

/// Reads the properties of this host's processor.
///
/// # Errors
/// Fails if KVM cannot run a shard here or refuses to report.
pub fn read() -> Result<HostProcessor, MachineError> {
    let kvm = Kvm::new().map_err(|source| MachineError::Kvm {
        what: "open /dev/kvm",
        source,
    })?;
    super::machine::check(&kvm)?;
    let supported = cpuid(&kvm, &[])?;
    let leaves: Vec<Leaf> = supported.as_slice().iter().map(leaf).collect();
    let is_amd = leaves
        .iter()
        .any(|leaf| leaf.function == 0 && leaf.registers[1] != u32::from_le_bytes(*b"Genu"));
    let digits = if is_amd { DIGITS_AMD } else { DIGITS_INTEL };
    Ok(HostProcessor {
        leaves,
        counter: Counter {
            khz: machine::tsc_khz(&kvm)?,
            digits: kvm.check_extension(Cap::TscControl).then_some(digits),
        },
        relies_on_counter: machine::host_relies_on_tsc(),
    })
}

/// Converts a CPUID entry of KVM to the form that monitors exchange.
fn leaf(entry: &kvm_cpuid_entry2) -> Leaf {
    Leaf {
        function: entry.function,
        index: entry.index,
        flags: entry.flags,
        registers: [entry.eax, entry.ebx, entry.ecx, entry.edx],
    }
}

/// Converts a CPUID leaf to the form of KVM.
fn entry(leaf: &Leaf) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = leaf.registers;
    kvm_cpuid_entry2 {
        function: leaf.function,
        index: leaf.index,
        flags: leaf.flags,
        eax,
        ebx,
        ecx,
        edx,
        ..kvm_cpuid_entry2::default()
    }
}

/// Returns the CPUID for KVM: `leaves`, or all that KVM supports when they are empty.
///
/// # Errors
/// Fails if KVM refuses to report, or if there are too many leaves.
pub fn cpuid(kvm: &Kvm, leaves: &[Leaf]) -> Result<CpuId, MachineError> {
    if leaves.is_empty() {
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        return supported.map_err(|source| MachineError::Kvm {
            what: "read the supported CPUID",
            source,
        });
    }
    let entries: Vec<kvm_cpuid_entry2> = leaves.iter().map(entry).collect();
    CpuId::from_entries(&entries).map_err(|_| MachineError::Lacking("short CPUID"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shard_api::cpuid::common;

    /// This needs KVM.
    #[test]
    fn common_cpuid_of_a_host_with_itself_is_its_own_and_kvm_accepts_it() {
        let kvm = match Kvm::new() {
            Ok(kvm) => kvm,
            Err(error) => return eprintln!("left out: /dev/kvm: {error}"),
        };
        let host = read().expect("a host");
        assert!(host.counter.khz > 100_000, "{:?}", host.counter);
        let text = serde_json::to_string(&host).expect("JSON");
        let again: HostProcessor = serde_json::from_str(&text).expect("the same");
        let both = common(&host.leaves, &again.leaves).expect("alike");
        let of = |leaves: &[Leaf], function| -> Vec<Leaf> {
            let leaves = leaves.iter().filter(|leaf| leaf.function == function);
            leaves.copied().collect()
        };
        for function in [0, 1, 6, 7, 0x8000_0001, 0x8000_0008] {
            assert_eq!(of(&both, function), of(&host.leaves, function), "{function:#x}");
        }
        let vm = kvm.create_vm().expect("a VM");
        let vcpu = vm.create_vcpu(0).expect("a vCPU");
        vcpu.set_cpuid2(&cpuid(&kvm, &both).expect("leaves"))
            .expect("KVM takes it");
    }
}
