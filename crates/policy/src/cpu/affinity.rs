//! Affinity of a VM's vCPUs, and the contradictions that are refused.
//!
//! The rules are ours; the paper has none. The pins of a VM are checked whole when one of them changes, so
//! that a contradiction is refused then, with its reason, and not met by a balancer later.

use std::collections::BTreeSet;
use std::fmt;

use super::CpuId;
use super::set::CpuSet;

/// Reason why the vCPUs of a VM can't all run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Contradiction {
    /// A vCPU may run on no CPU.
    NoCpu(u16),
    /// Some vCPUs have fewer CPUs than they are, so two of them would share one.
    TooFewCpus {
        /// Numbers of the vCPUs that share too few CPUs.
        vcpus: Vec<u16>,
        /// Number of the CPUs that they may use.
        cpus: usize,
    },
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCpu(vcpu) => write!(
                f,
                "vCPU {vcpu} may run on no CPU of this machine; help: add a CPU to its pin"
            ),
            Self::TooFewCpus { vcpus, cpus } => write!(
                f,
                "vCPUs {vcpus:?} may use {cpus} CPUs only, and no two of a VM share one; help: name {} CPUs",
                vcpus.len()
            ),
        }
    }
}

impl std::error::Error for Contradiction {}

/// Checks that each vCPU of a VM can have a CPU of its own: vCPU `n` may run on `sets[n]`, of `cpus` CPUs.
///
/// # Errors
/// The first contradiction.
pub fn admit(sets: &[CpuSet], cpus: u16) -> Result<(), Contradiction> {
    let all: CpuSet = (0..cpus).map(CpuId).collect();
    let sets: Vec<CpuSet> = sets.iter().map(|set| set.intersection(&all)).collect();
    if let Some(vcpu) = sets.iter().position(CpuSet::is_empty) {
        return Err(Contradiction::NoCpu(vcpu as u16));
    }
    let order: Vec<CpuId> = all.iter().collect();
    distinct(&sets, &order).map(|_| ()).map_err(|vcpus| {
        let cpus: BTreeSet<CpuId> = vcpus
            .iter()
            .flat_map(|vcpu| sets[usize::from(*vcpu)].iter())
            .collect();
        let cpus = cpus.len();
        Contradiction::TooFewCpus { vcpus, cpus }
    })
}

/// Gives each of the sets a CPU of its own, the first ones of `order` if they may be chosen. The vCPUs that
/// have too few CPUs between them if there is no such choice.
pub fn distinct(sets: &[CpuSet], order: &[CpuId]) -> Result<Vec<CpuId>, Vec<u16>> {
    let mut owner: Vec<Option<usize>> = vec![None; order.len()];
    for vcpu in 0..sets.len() {
        let mut seen = vec![false; order.len()];
        if !augment(vcpu, sets, order, &mut owner, &mut seen) {
            // The vCPUs that own what was reached, and this one, have only these CPUs.
            let mut vcpus = vec![vcpu as u16];
            let reached = owner.iter().zip(&seen).filter(|one| *one.1);
            vcpus.extend(reached.filter_map(|one| one.0.map(|vcpu| vcpu as u16)));
            vcpus.sort_unstable();
            return Err(vcpus);
        }
    }
    let mut cpus = vec![CpuId::default(); sets.len()];
    for (cpu, owner) in order.iter().zip(owner) {
        if let Some(vcpu) = owner {
            cpus[vcpu] = *cpu;
        }
    }
    Ok(cpus)
}

/// Finds a CPU for a vCPU, moving others to other ones of their CPUs (a step of bipartite matching).
fn augment(
    vcpu: usize,
    sets: &[CpuSet],
    order: &[CpuId],
    owner: &mut [Option<usize>],
    seen: &mut [bool],
) -> bool {
    let is_own = |one: &usize| sets[vcpu].contains(order[*one]);
    let own: Vec<usize> = (0..order.len()).filter(is_own).collect();
    if let Some(free) = own.iter().copied().find(|one| owner[*one].is_none()) {
        owner[free] = Some(vcpu);
        return true;
    }
    for one in own {
        if !std::mem::replace(&mut seen[one], true)
            && let Some(other) = owner[one]
            && augment(other, sets, order, owner, seen)
        {
            owner[one] = Some(vcpu);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(cpus: &[u16]) -> CpuSet {
        cpus.iter().copied().map(CpuId).collect()
    }

    #[test]
    fn contradictory_sets_are_refused_with_their_reason() {
        assert_eq!(admit(&[], 4), Ok(()));
        assert_eq!(admit(&[CpuSet::ALL, set(&[2])], 4), Ok(()));
        let none = admit(&[CpuSet::ALL, set(&[4, 9])], 4).unwrap_err();
        assert_eq!(none, Contradiction::NoCpu(1));
        let few = admit(&[set(&[3]), CpuSet::ALL, set(&[3])], 4).unwrap_err();
        let (vcpus, cpus) = (vec![0, 2], 1);
        assert_eq!(few, Contradiction::TooFewCpus { vcpus, cpus });
        assert!(few.to_string().contains("help: name 2 CPUs"), "{few}");
    }

    #[test]
    fn vcpus_get_cpus_of_their_own_whenever_there_is_a_choice() {
        let order: Vec<CpuId> = (0..4).map(CpuId).collect();
        let sets = [set(&[0, 1]), set(&[0]), set(&[1, 3])];
        assert_eq!(distinct(&sets, &order), Ok([1, 0, 3].map(CpuId).to_vec()));
        let sets = [set(&[0, 1]), set(&[2, 3]), set(&[0, 1]), set(&[0, 1])];
        assert_eq!(distinct(&sets, &order), Err(vec![0, 2, 3]));
    }

    /// Whether there is a choice, by all of them.
    fn has_choice(sets: &[CpuSet], taken: &mut Vec<CpuId>) -> bool {
        let Some((first, others)) = sets.split_first() else {
            return true;
        };
        first.iter().filter(|cpu| cpu.0 < 5).any(|cpu| {
            if taken.contains(&cpu) {
                return false;
            }
            taken.push(cpu);
            let is_found = has_choice(others, taken);
            taken.pop();
            is_found
        })
    }

    proptest! {
        #[test]
        fn sets_are_admitted_exactly_if_there_is_a_choice(
            sets in prop::collection::vec(prop::collection::vec(0..6_u16, 0..4), 0..5)
        ) {
            let sets: Vec<CpuSet> = sets.iter().map(|cpus| set(cpus)).collect();
            prop_assert_eq!(admit(&sets, 5).is_ok(), has_choice(&sets, &mut Vec::new()));
        }
    }
}
