//! Affinity and anti-affinity of VMs, and the contradictions that admission refuses.
//!
//! The rules are ours; the paper has none. A rule set is checked whole when a VM or a rule is added, so that
//! a contradiction is refused then, with its reason, and not met by a balancer later.

use std::collections::BTreeSet;
use std::fmt;

use super::set::CpuSet;
use super::topology::Topology;
use super::{CpuId, VcpuId, VmId};

/// Part of the machine to which a rule applies.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Scope {
    /// Each CPU by itself.
    Cpu,
    /// All CPUs of a NUMA node together.
    Node,
    /// All CPUs of a cell together.
    Cell,
}

impl Scope {
    fn domain(self, topology: &Topology, cpu: CpuId) -> u16 {
        match self {
            Self::Cpu => cpu.0,
            Self::Node => topology.place(cpu).node,
            Self::Cell => topology.place(cpu).cell,
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "CPU",
            Self::Node => "node",
            Self::Cell => "cell",
        })
    }
}

/// Rule for the places of vCPUs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Rule {
    /// One vCPU of a VM, or all, run on these CPUs only.
    Within {
        /// VM whose vCPUs the rule confines.
        vm: VmId,
        /// The vCPU; all when none.
        index: Option<u16>,
        /// CPUs of the machine that the vCPUs may use.
        cpus: CpuSet,
    },
    /// Two VMs run in one node, or in one cell.
    Together {
        /// First VM of the pair; the order has no effect.
        one: VmId,
        /// Second VM of the pair.
        other: VmId,
        /// Node or cell. A CPU counts as its node.
        scope: Scope,
    },
    /// Two VMs never have vCPUs in the same CPU, node or cell.
    Apart {
        /// First VM of the pair; the order has no effect.
        one: VmId,
        /// Second VM of the pair.
        other: VmId,
        /// CPU, node or cell.
        scope: Scope,
    },
}

/// Reason why rules can't hold at once.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Contradiction {
    /// The rules leave a vCPU no CPU of the machine.
    NoCpu(VcpuId),
    /// Some vCPUs of a VM have fewer CPUs than they are, so two of them would share one.
    TooFewCpus {
        /// VM to which the rules apply.
        vm: VmId,
        /// Numbers of the vCPUs that share too few CPUs.
        vcpus: Vec<u16>,
        /// Number of the CPUs that they may use.
        cpus: usize,
    },
    /// Two VMs shall be together and apart.
    TogetherAndApart {
        /// First VM of the rules.
        one: VmId,
        /// Second VM of the rules.
        other: VmId,
        /// Scope of the rule that keeps them apart.
        scope: Scope,
    },
    /// VMs that shall be together have no node or cell in which each has CPUs.
    NoCommonPlace {
        /// VMs that shall be together, directly or by way of others.
        vms: Vec<VmId>,
        /// Node or cell.
        scope: Scope,
    },
    /// VMs that shall be apart may only run in the same node or cell, or the same CPUs.
    NoSeparatePlace {
        /// First VM of the rule.
        one: VmId,
        /// Second VM of the rule.
        other: VmId,
        /// Scope of the rule that keeps them apart.
        scope: Scope,
    },
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCpu(vcpu) => write!(
                f,
                "vCPU {} of VM {} may run on no CPU of this machine; help: add a CPU to its rules",
                vcpu.index, vcpu.vm.0
            ),
            Self::TooFewCpus { vm, vcpus, cpus } => write!(
                f,
                "vCPUs {vcpus:?} of VM {} may use {cpus} CPUs only, and no two of a VM share one; help: name \
                 {} CPUs",
                vm.0,
                vcpus.len()
            ),
            Self::TogetherAndApart { one, other, scope } => write!(
                f,
                "VMs {} and {} shall not share a {scope}, and other rules keep them together; help: remove \
                 one of the rules",
                one.0, other.0
            ),
            Self::NoCommonPlace { vms, scope } => {
                let vms: Vec<String> = vms.iter().map(|vm| vm.0.to_string()).collect();
                write!(
                    f,
                    "VMs {} shall share a {scope}, and their CPUs are in no common one; help: change their \
                     CPUs",
                    vms.join(", ")
                )
            }
            Self::NoSeparatePlace { one, other, scope } => write!(
                f,
                "VMs {} and {} shall not share a {scope}, and may run in the same one only; help: change \
                 their CPUs",
                one.0, other.0
            ),
        }
    }
}

impl std::error::Error for Contradiction {}

/// The rules in force.
#[derive(Clone, Debug, Default)]
pub struct Affinity {
    rules: Vec<Rule>,
}

impl Affinity {
    /// Rules that can hold at once for VMs with these numbers of vCPUs.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn admit(rules: Vec<Rule>, topology: &Topology, vms: &[(VmId, u16)]) -> Result<Self, Contradiction> {
        let affinity = Self { rules };
        let machine: CpuSet = (0..topology.cpus()).map(CpuId).collect();
        for (vm, vcpus) in vms {
            affinity.check_vm(*vm, *vcpus, &machine)?;
        }
        affinity.check_pairs(topology, vms)?;
        Ok(affinity)
    }

    /// The CPUs on which the rules of one VM let its vCPU run.
    pub fn cpus(&self, vcpu: VcpuId) -> CpuSet {
        let mut all = CpuSet::ALL;
        for rule in &self.rules {
            if let Rule::Within { vm, index, cpus } = rule
                && *vm == vcpu.vm
                && index.is_none_or(|index| index == vcpu.index)
            {
                all = all.intersection(cpus);
            }
        }
        all
    }

    /// Whether a vCPU may run on a CPU while other VMs, and the rest of its own, are on the CPUs of
    /// `cpus_of`.
    pub fn may_run(
        &self,
        topology: &Topology,
        vcpu: VcpuId,
        cpu: CpuId,
        cpus_of: impl Fn(VmId) -> CpuSet,
    ) -> bool {
        let other_of = |one: VmId, other: VmId| {
            if one == vcpu.vm {
                Some(other)
            } else {
                (other == vcpu.vm).then_some(one)
            }
        };
        self.cpus(vcpu).contains(cpu)
            && self.rules.iter().all(|rule| match rule {
                Rule::Within { .. } => true,
                Rule::Together { one, other, scope } => other_of(*one, *other).is_none_or(|other| {
                    let scope = (*scope).max(Scope::Node);
                    let domain = scope.domain(topology, cpu);
                    cpus_of(other)
                        .iter()
                        .all(|cpu| scope.domain(topology, cpu) == domain)
                }),
                Rule::Apart { one, other, scope } => other_of(*one, *other).is_none_or(|other| {
                    let domain = scope.domain(topology, cpu);
                    cpus_of(other)
                        .iter()
                        .all(|cpu| scope.domain(topology, cpu) != domain)
                }),
            })
    }

    fn check_vm(&self, vm: VmId, vcpus: u16, within: &CpuSet) -> Result<(), Contradiction> {
        let sets: Vec<CpuSet> = (0..vcpus)
            .map(|index| self.cpus(VcpuId { vm, index }).intersection(within))
            .collect();
        if let Some(index) = sets.iter().position(CpuSet::is_empty) {
            let index = index as u16;
            return Err(Contradiction::NoCpu(VcpuId { vm, index }));
        }
        let order: Vec<CpuId> = within.iter().collect();
        distinct(&sets, &order).map(|_| ()).map_err(|vcpus| {
            let cpus: BTreeSet<CpuId> = vcpus
                .iter()
                .flat_map(|index| sets[usize::from(*index)].iter())
                .collect();
            let cpus = cpus.len();
            Contradiction::TooFewCpus { vm, vcpus, cpus }
        })
    }

    /// The domains in which a VM can have all its vCPUs.
    fn domains(&self, topology: &Topology, vm: VmId, vcpus: u16, scope: Scope) -> BTreeSet<u16> {
        let all: BTreeSet<u16> = (0..topology.cpus())
            .map(|cpu| scope.domain(topology, CpuId(cpu)))
            .collect();
        let fits = |domain: &u16| {
            let cpus = (0..topology.cpus()).map(CpuId);
            let within = cpus
                .filter(|cpu| scope.domain(topology, *cpu) == *domain)
                .collect();
            self.check_vm(vm, vcpus, &within).is_ok()
        };
        all.into_iter().filter(fits).collect()
    }

    /// The VMs that rules keep in one place with `vm`, and `vm`.
    fn group(&self, vm: VmId, scope: Scope) -> BTreeSet<VmId> {
        let mut group = BTreeSet::from([vm]);
        loop {
            let before = group.len();
            for rule in &self.rules {
                if let Rule::Together {
                    one,
                    other,
                    scope: of,
                } = rule
                    && (*of).max(Scope::Node) <= scope
                    && (group.contains(one) || group.contains(other))
                {
                    group.extend([*one, *other]);
                }
            }
            if group.len() == before {
                return group;
            }
        }
    }

    fn check_pairs(&self, topology: &Topology, vms: &[(VmId, u16)]) -> Result<(), Contradiction> {
        let vcpus_of = |vm: VmId| vms.iter().find(|one| one.0 == vm).map(|one| one.1);
        for rule in &self.rules {
            match rule {
                Rule::Within { .. } => {}
                Rule::Together { one, scope, .. } => {
                    let scope = (*scope).max(Scope::Node);
                    let group = self.group(*one, scope);
                    let mut places = group
                        .iter()
                        .filter_map(|vm| Some(self.domains(topology, *vm, vcpus_of(*vm)?, scope)));
                    let first = places.next().unwrap_or_default();
                    let common = places.fold(first, |common, places| &common & &places);
                    if common.is_empty() && group.iter().any(|vm| vcpus_of(*vm).is_some()) {
                        let vms = group.into_iter().collect();
                        return Err(Contradiction::NoCommonPlace { vms, scope });
                    }
                }
                Rule::Apart { one, other, scope } => {
                    let (one, other, scope) = (*one, *other, *scope);
                    let is_together = scope > Scope::Cpu && self.group(one, scope).contains(&other);
                    if one == other || is_together {
                        return Err(Contradiction::TogetherAndApart { one, other, scope });
                    }
                    if let (Some(own), Some(others)) = (vcpus_of(one), vcpus_of(other)) {
                        self.check_separate(topology, (one, own), (other, others), scope)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether two VMs have vCPUs whose CPUs are all of the same one domain.
    fn check_separate(
        &self,
        topology: &Topology,
        one: (VmId, u16),
        other: (VmId, u16),
        scope: Scope,
    ) -> Result<(), Contradiction> {
        let machine: CpuSet = (0..topology.cpus()).map(CpuId).collect();
        let forced = |(vm, vcpus): (VmId, u16)| -> BTreeSet<u16> {
            let domains = |index| -> BTreeSet<u16> {
                let cpus = self.cpus(VcpuId { vm, index }).intersection(&machine);
                cpus.iter().map(|cpu| scope.domain(topology, cpu)).collect()
            };
            (0..vcpus)
                .map(domains)
                .filter(|domains| domains.len() == 1)
                .flatten()
                .collect()
        };
        if forced(one).is_disjoint(&forced(other)) {
            Ok(())
        } else {
            let (one, other) = (one.0, other.0);
            Err(Contradiction::NoSeparatePlace { one, other, scope })
        }
    }
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
    use super::*;

    fn set(cpus: &[u16]) -> CpuSet {
        cpus.iter().copied().map(CpuId).collect()
    }

    fn within(vm: u16, index: Option<u16>, cpus: &[u16]) -> Rule {
        let (vm, cpus) = (VmId(vm), set(cpus));
        Rule::Within { vm, index, cpus }
    }

    fn together(one: u16, other: u16, scope: Scope) -> Rule {
        let (one, other) = (VmId(one), VmId(other));
        Rule::Together { one, other, scope }
    }

    fn apart(one: u16, other: u16, scope: Scope) -> Rule {
        let (one, other) = (VmId(one), VmId(other));
        Rule::Apart { one, other, scope }
    }

    /// Two cells of two nodes of two CPUs; VMs 0 to 3 of two vCPUs.
    fn admit(rules: Vec<Rule>) -> Result<Affinity, Contradiction> {
        let vms = [0, 1, 2, 3].map(|vm| (VmId(vm), 2));
        Affinity::admit(rules, &Topology::regular(2, 2, 2), &vms)
    }

    #[test]
    fn contradictory_rules_are_refused_with_their_reason() {
        let (one, other) = (VmId(0), VmId(1));
        let no_cpu = admit(vec![within(0, None, &[0, 1]), within(0, Some(1), &[2])]).unwrap_err();
        assert_eq!(no_cpu, Contradiction::NoCpu(VcpuId { vm: one, index: 1 }));
        let few = admit(vec![within(0, None, &[3])]).unwrap_err();
        let (vcpus, cpus) = (vec![0, 1], 1);
        assert_eq!(few, Contradiction::TooFewCpus { vm: one, vcpus, cpus });
        assert!(few.to_string().contains("help: name 2 CPUs"), "{few}");
        let both = admit(vec![
            together(0, 2, Scope::Node),
            together(2, 1, Scope::Cell),
            apart(0, 1, Scope::Cell),
        ]);
        let scope = Scope::Cell;
        assert_eq!(
            both.unwrap_err(),
            Contradiction::TogetherAndApart { one, other, scope }
        );
        let far = admit(vec![
            together(0, 1, Scope::Cell),
            within(0, None, &[0, 1]),
            within(1, None, &[4, 5]),
        ]);
        let vms = vec![one, other];
        assert_eq!(far.unwrap_err(), Contradiction::NoCommonPlace { vms, scope });
        let near = admit(vec![
            apart(0, 1, Scope::Node),
            within(0, Some(0), &[0, 1]),
            within(1, Some(1), &[1]),
        ]);
        let scope = Scope::Node;
        assert_eq!(
            near.unwrap_err(),
            Contradiction::NoSeparatePlace { one, other, scope }
        );
    }

    #[test]
    fn rules_that_can_hold_are_admitted_and_bound_where_each_vcpu_runs() {
        let rules = vec![
            within(0, None, &[0, 1, 2]),
            together(1, 2, Scope::Cell),
            apart(2, 3, Scope::Cpu),
            apart(0, 1, Scope::Node),
        ];
        let affinity = admit(rules).expect("no contradiction");
        let machine = Topology::regular(2, 2, 2);
        let may = |vm, cpu| {
            let vcpu = VcpuId {
                vm: VmId(vm),
                index: 0,
            };
            let places = |vm: VmId| set([[0, 1], [4, 5], [4, 6], [6, 7]][usize::from(vm.0)].as_slice());
            affinity.may_run(&machine, vcpu, CpuId(cpu), places)
        };
        assert!(may(0, 2) && !may(0, 3));
        assert!(may(1, 6) && !may(1, 2) && !may(1, 0));
        assert!(may(2, 5) && !may(2, 7) && !may(2, 3));
        assert!(may(3, 5) && !may(3, 4));
    }

    #[test]
    fn vcpus_get_cpus_of_their_own_whenever_there_is_a_choice() {
        let order: Vec<CpuId> = (0..4).map(CpuId).collect();
        let sets = [set(&[0, 1]), set(&[0]), set(&[1, 3])];
        assert_eq!(distinct(&sets, &order), Ok([1, 0, 3].map(CpuId).to_vec()));
        let sets = [set(&[0, 1]), set(&[2, 3]), set(&[0, 1]), set(&[0, 1])];
        assert_eq!(distinct(&sets, &order), Err(vec![0, 2, 3]));
    }
}
