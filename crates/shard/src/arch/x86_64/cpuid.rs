//! CPUID of the vCPUs: KVM's supported leaves with this VM's topology. Each node is a package, with one
//! thread per core. Nodes whose memory software keeps coherent form one package.
//!
//! The APIC id of a vCPU is its number. KVM's own leaves (0x4000_0000) stay: clock, steal time, remote flush.
//! Nested virtualization is hidden: no guest here needs it, and it is a large part of KVM's attack surface.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

const LEAF1_ECX_VMX: u32 = 1 << 5;
const LEAF1_ECX_X2APIC: u32 = 1 << 21;
const LEAF1_ECX_TSC_DEADLINE: u32 = 1 << 24;
const LEAF1_ECX_HYPERVISOR: u32 = 1 << 31;
const LEAF1_EDX_HTT: u32 = 1 << 28;
const LEAF6_EAX_ARAT: u32 = 1 << 2;
const LEAF80000001_ECX_CMP_LEGACY: u32 = 1 << 1;
const LEAF80000001_ECX_SVM: u32 = 1 << 2;
const LEAF80000001_ECX_TOPOEXT: u32 = 1 << 22;
const LEVEL_SMT: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Sizes of the groups of vCPUs in CPUID: packages and shared caches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Groups {
    /// Number of vCPUs in a package.
    pub package: u8,
    /// Number of vCPUs that share a third-level cache.
    pub cache: u8,
}

impl Groups {
    /// Returns the groups of a VM whose vCPU v is in node `nodes[v]`. Each node is a package with a cache, if
    /// CPUID can express that: it numbers groups of a power of two only. Otherwise all vCPUs are one package,
    /// each with a cache of its own: Linux would report one cache over two nodes as an error.
    pub fn of(nodes: &[u8]) -> Self {
        let size = nodes.chunk_by(|a, b| a == b).map(<[u8]>::len).max().unwrap_or(1);
        let mut first: Vec<u8> = nodes.chunks(size).map(|chunk| chunk[0]).collect();
        let together = nodes
            .chunks(size)
            .all(|chunk| chunk.iter().all(|node| *node == chunk[0]));
        first.sort_unstable();
        let distinct = first.windows(2).all(|pair| pair[0] != pair[1]);
        if size == nodes.len() || (size.is_power_of_two() && together && distinct) {
            return Self {
                package: size as u8,
                cache: size as u8,
            };
        }
        Self {
            package: nodes.len() as u8,
            cache: 1,
        }
    }

    /// Returns the groups of nodes whose memory software keeps coherent: one package. A CPU of Linux measures
    /// its delay loop unless another CPU of its package has (`calibrate_delay_is_known` in its
    /// `arch/x86/kernel/tsc.c`). The measurement waits for about thirty ticks, whose updates come from
    /// another node.
    pub fn of_coherent(nodes: &[u8]) -> Self {
        let package = nodes.len() as u8;
        Self {
            package,
            ..Self::of(nodes)
        }
    }
}

/// Returns the CPUID leaves of vCPU `id`.
pub fn of_vcpu(supported: &CpuId, id: u8, groups: Groups) -> Result<CpuId, vmm_sys_util::fam::Error> {
    let mut leaves = Vec::with_capacity(supported.as_slice().len() + 4);
    let mut has_extended_topology = false;
    let mut has_caches = false;
    for leaf in supported.as_slice() {
        match leaf.function {
            0xB => has_extended_topology = true,
            0x1F => (),
            _ => leaves.push(with_topology(*leaf, id, groups)),
        }
        has_caches |= leaf.function == 0x8000_001D && leaf.eax & 0x1F != 0;
    }
    if has_caches && groups.cache < groups.package {
        // Without it the guest does not read that leaf, and all CPUs of a package have one cache. Some KVMs
        // have the leaf alone.
        let features = leaves.iter_mut().filter(|leaf| leaf.function == 0x8000_0001);
        features.for_each(|leaf| leaf.ecx |= LEAF80000001_ECX_TOPOEXT);
    }
    let leaf_max = leaves
        .iter()
        .find(|leaf| leaf.function == 0)
        .map_or(0, |leaf| leaf.eax);
    if has_extended_topology || leaf_max >= 0xB {
        leaves.extend(extended_topology(0xB, id, groups.package));
    }
    if leaf_max >= 0x1F {
        leaves.extend(extended_topology(0x1F, id, groups.package));
    }
    CpuId::from_entries(&leaves)
}

/// Number of APIC id bits that number `vcpus` vCPUs.
fn id_bits(vcpus: u8) -> u32 {
    u32::from(vcpus).next_power_of_two().trailing_zeros()
}

fn with_topology(mut leaf: kvm_cpuid_entry2, id: u8, groups: Groups) -> kvm_cpuid_entry2 {
    let (id32, package) = (u32::from(id), groups.package);
    let others = u32::from(package) - 1;
    let sharers = |eax| sharers(eax, u32::from(groups.cache) - 1);
    match leaf.function {
        0x1 => {
            leaf.ebx = (leaf.ebx & 0x0000_FFFF) | (id32 << 24) | (u32::from(package) << 16);
            leaf.ecx &= !LEAF1_ECX_VMX;
            leaf.ecx |= LEAF1_ECX_X2APIC | LEAF1_ECX_TSC_DEADLINE | LEAF1_ECX_HYPERVISOR;
            leaf.edx = (leaf.edx & !LEAF1_EDX_HTT) | if others > 0 { LEAF1_EDX_HTT } else { 0 };
        }
        // Intel's caches: bits 14 to 25 sharers less one, bits 26 to 31 cores less one.
        0x4 if leaf.eax & 0x1F != 0 => {
            leaf.eax = (leaf.eax & 0x3FFF) | (sharers(leaf.eax) << 14) | (others.min(63) << 26);
        }
        0x6 => leaf.eax |= LEAF6_EAX_ARAT,
        0x8000_0001 => {
            leaf.ecx &= !(LEAF80000001_ECX_SVM | LEAF80000001_ECX_CMP_LEGACY);
            if others > 0 {
                leaf.ecx |= LEAF80000001_ECX_CMP_LEGACY;
            }
        }
        0x8000_0008 => leaf.ecx = (leaf.ecx & !0xF0FF) | others | (id_bits(package) << 12),
        // AMD's caches: as leaf 4, without the cores.
        0x8000_001D if leaf.eax & 0x1F != 0 => {
            leaf.eax = (leaf.eax & !(0xFFF << 14)) | (sharers(leaf.eax) << 14);
        }
        0x8000_001E => (leaf.eax, leaf.ebx, leaf.ecx) = (id32, id32 & 0xFF, id32 / (others + 1)),
        _ => (),
    }
    leaf
}

/// Returns the number of other vCPUs that share the cache described by `eax`: `others` for the third level,
/// else none.
fn sharers(eax: u32, others: u32) -> u32 {
    if (eax >> 5) & 7 == 3 { others } else { 0 }
}

fn extended_topology(function: u32, id: u8, vcpus: u8) -> [kvm_cpuid_entry2; 3] {
    let level = |index, shift, count, kind: u32| kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: index | (kind << 8),
        edx: u32::from(id),
        ..Default::default()
    };
    [
        level(0, 0, 1, LEVEL_SMT),
        level(1, id_bits(vcpus), u32::from(vcpus), LEVEL_CORE),
        level(2, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_packages_if_cpuid_can_express_it() {
        for (nodes, package, cache) in [
            (vec![0], 1, 1),
            (vec![0; 6], 6, 6),
            (vec![0, 1], 1, 1),
            (vec![0, 0, 1, 1], 2, 2),
            (vec![0, 0, 0, 1, 1, 1], 6, 1),
            (vec![0, 0, 1], 2, 2),
            (vec![0, 1, 1], 3, 1),
            (vec![0, 1, 0, 1], 4, 1),
            (vec![0, 0, 1, 1, 0, 0], 6, 1),
        ] {
            assert_eq!(Groups::of(&nodes), Groups { package, cache }, "{nodes:?}");
            let package = nodes.len() as u8;
            assert_eq!(
                Groups::of_coherent(&nodes),
                Groups { package, cache },
                "{nodes:?}"
            );
        }
    }

    #[test]
    fn cpuid_reports_several_caches_of_a_package_on_amd() {
        let leaf = |function, eax| kvm_cpuid_entry2 {
            function,
            eax,
            ..Default::default()
        };
        let amd = [leaf(0, 0xD), leaf(0x8000_0001, 0), leaf(0x8000_001D, 0x8163)];
        let told = |supported: &[kvm_cpuid_entry2], groups| {
            let leaves =
                of_vcpu(&CpuId::from_entries(supported).expect("leaves"), 1, groups).expect("leaves");
            let features = leaves.as_slice().iter().find(|leaf| leaf.function == 0x8000_0001);
            features.expect("they are there").ecx & LEAF80000001_ECX_TOPOEXT != 0
        };
        let two = [0, 1];
        assert!(told(&amd, Groups::of_coherent(&two)));
        assert!(!told(&amd, Groups::of(&two)));
        assert!(!told(&amd[..2], Groups::of_coherent(&two)));
    }
}
