//! The VMs of a cell that its drivers schedule: their numbers, terms and first CPUs. Pure.

use std::collections::BTreeMap;
use std::fmt;

use policy::cpu::affinity::admit;
use policy::cpu::assignment::{Reserved, assign};
use policy::cpu::entitlement::WEIGHT_DEFAULT;
use policy::cpu::reserved_time::share;
use policy::cpu::set::CpuSet;
use policy::cpu::topology::Topology;
use policy::cpu::view::Terms;
use policy::cpu::word::LOAD_MAX;
use policy::cpu::{CpuId, VcpuId, VmId};

/// Settings of a VM that concern its CPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct VmSettings {
    /// Number of its vCPUs.
    pub(super) vcpus: u8,
    /// Its weight, if it has one.
    pub(super) weight: Option<u16>,
    /// CPUs that it uses at most.
    pub(super) limit: Option<f64>,
    /// CPU time that it has before others, thousandths of a CPU.
    pub(super) reservation_permille: u32,
    /// Whether its vCPUs may run without one another.
    pub(super) is_loose: bool,
    /// CPUs of the host on which each vCPU may run, by number; any for one that is absent.
    pub(super) pins: BTreeMap<u8, Vec<usize>>,
    /// Whether a vCPU runs on a CPU of another cell. Linux has the VM then.
    pub(super) is_away: bool,
}

impl VmSettings {
    /// Its terms. They come from the VM's file and its owner, and from no report of a shard.
    pub(super) fn terms(&self) -> Terms {
        let permille = |cpus: f64| (cpus * 1000.0).clamp(1.0, f64::from(u32::MAX)) as u32;
        Terms {
            vcpus: self.vcpus.into(),
            weight: self.weight.map_or(WEIGHT_DEFAULT, u32::from),
            cap_permille: self.limit.map(permille),
            reservation_permille: self.reservation_permille,
            is_gang: !self.is_loose,
            ..Terms::default()
        }
    }

    /// The CPUs of the cell on which each vCPU may run.
    pub(super) fn cpus(&self, host_cpus: &[usize]) -> Vec<CpuSet> {
        let all: CpuSet = ids(host_cpus, |_| true);
        let of = |vcpu: u8| {
            self.pins
                .get(&vcpu)
                .map_or(all, |pin| ids(host_cpus, |cpu| pin.contains(&cpu)))
        };
        (0..self.vcpus).map(of).collect()
    }
}

fn ids(host_cpus: &[usize], is_wanted: impl Fn(usize) -> bool) -> CpuSet {
    let numbered = (0..).map(CpuId).zip(host_cpus);
    numbered
        .filter(|(_, cpu)| is_wanted(**cpu))
        .map(|(id, _)| id)
        .collect()
}

/// Checks pins of a VM for contradictions among themselves.
///
/// # Errors
/// The reason why they can't hold, with the host's numbers of the CPUs.
pub(super) fn check_pins(settings: &VmSettings, host_cpus: &[usize]) -> Result<(), String> {
    // vCPUs beyond the cell's CPUs share some in any case, and run without a gang.
    if settings.pins.is_empty() || usize::from(settings.vcpus) > host_cpus.len() {
        return Ok(());
    }
    let cpus = u16::try_from(host_cpus.len()).unwrap_or(u16::MAX);
    admit(&settings.cpus(host_cpus), cpus).map_err(|contradiction| contradiction.to_string())
}

/// Reason why a VM is not scheduled by the drivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unplaced {
    /// A vCPU may run on no CPU of the cell.
    NoCpu(u8),
    /// The queue of a CPU would be too long.
    FullQueue,
    /// All numbers are in use.
    NoNumber,
}

impl fmt::Display for Unplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCpu(vcpu) => write!(f, "its vCPU {vcpu} may run on no CPU of the cell"),
            Self::FullQueue => write!(f, "a CPU has {LOAD_MAX} vCPUs already"),
            Self::NoNumber => f.write_str("the cell has too many VMs"),
        }
    }
}

/// Use of the cell's CPUs by the VMs that its drivers have.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct CpuUse {
    /// Number of vCPUs on each CPU.
    pub(super) loads: Vec<u32>,
    /// Reserved time of each CPU, thousandths.
    pub(super) reserved: Vec<u32>,
}

impl CpuUse {
    /// No vCPU on so many CPUs.
    pub(super) fn none(cpus: usize) -> Self {
        Self {
            loads: vec![0; cpus],
            reserved: vec![0; cpus],
        }
    }

    /// Adds a vCPU on a CPU, with its share of its VM's reservation.
    pub(super) fn add(&mut self, cpu: CpuId, share_permille: u32) {
        if let (Some(load), Some(reserved)) = (
            self.loads.get_mut(cpu.index()),
            self.reserved.get_mut(cpu.index()),
        ) {
            *load = load.saturating_add(1);
            *reserved = reserved.saturating_add(share_permille);
        }
    }
}

/// CPUs for a new VM's vCPUs, one each if there are enough, while CPUs are in such use.
///
/// # Errors
/// The reason why there are none.
pub(super) fn place(
    settings: &VmSettings,
    host_cpus: &[usize],
    topology: &Topology,
    usage: &CpuUse,
) -> Result<Vec<CpuId>, Unplaced> {
    let sets = settings.cpus(host_cpus);
    if let Some(vcpu) = sets.iter().position(CpuSet::is_empty) {
        return Err(Unplaced::NoCpu(vcpu as u8));
    }
    let share_permille = share(&settings.terms());
    let reserved = Reserved {
        share_permille,
        cpus: &usage.reserved,
    };
    let cpus = assign(topology, &usage.loads, &sets, &reserved);
    let cpus = cpus.unwrap_or_else(|| doubled(&sets, usage, share_permille));
    let mut after = usage.clone();
    cpus.iter().for_each(|cpu| after.add(*cpu, share_permille));
    if after.loads.iter().any(|load| *load > u32::from(LOAD_MAX)) {
        return Err(Unplaced::FullQueue);
    }
    Ok(cpus)
}

/// The CPU of each set with the least excess of reserved time, then the least loaded one, though two vCPUs
/// may share one.
fn doubled(sets: &[CpuSet], usage: &CpuUse, share_permille: u32) -> Vec<CpuId> {
    let mut usage = usage.clone();
    let mut least = |set: &CpuSet| {
        let reserved = Reserved {
            share_permille,
            cpus: &usage.reserved,
        };
        let cost = |cpu: &CpuId| (reserved.excess(*cpu), usage.loads[cpu.index()], *cpu);
        let cpu = set.iter().min_by_key(cost).unwrap_or_default();
        usage.add(cpu, share_permille);
        cpu
    };
    sets.iter().map(&mut least).collect()
}

/// The next number for a VM that is not in use. A number is used again as late as possible: messages about
/// its former VM may be under way.
///
/// # Errors
/// If all are in use.
pub(super) fn next_number(last: VmId, is_used: impl Fn(VmId) -> bool) -> Result<VmId, Unplaced> {
    let mut candidates = (1..=u16::MAX).map(|step| VmId(last.0.wrapping_add(step)));
    candidates.find(|vm| !is_used(*vm)).ok_or(Unplaced::NoNumber)
}

/// vCPUs of a VM by number.
pub(super) fn vcpus(vm: VmId, count: u8) -> impl Iterator<Item = VcpuId> {
    (0..u16::from(count)).map(move |index| VcpuId { vm, index })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST_CPUS: [usize; 4] = [2, 3, 6, 7];

    fn settings(vcpus: u8, pins: &[(u8, &[usize])]) -> VmSettings {
        VmSettings {
            vcpus,
            pins: pins.iter().map(|(vcpu, cpus)| (*vcpu, cpus.to_vec())).collect(),
            ..VmSettings::default()
        }
    }

    fn placed(settings: &VmSettings, loads: [u32; 4]) -> Result<Vec<u16>, Unplaced> {
        placed_beside(settings, loads, [0; 4])
    }

    fn placed_beside(
        settings: &VmSettings,
        loads: [u32; 4],
        reserved: [u32; 4],
    ) -> Result<Vec<u16>, Unplaced> {
        let usage = CpuUse {
            loads: loads.to_vec(),
            reserved: reserved.to_vec(),
        };
        let cpus = place(settings, &HOST_CPUS, &Topology::regular(1, 1, 4), &usage);
        cpus.map(|cpus| cpus.into_iter().map(|cpu| cpu.0).collect())
    }

    #[test]
    fn keys_of_a_vm_are_its_terms() {
        let vm = VmSettings {
            weight: Some(300),
            limit: Some(1.5),
            reservation_permille: 700,
            is_loose: true,
            ..settings(2, &[])
        };
        let terms = vm.terms();
        let expected = Terms {
            vcpus: 2,
            weight: 300,
            cap_permille: Some(1_500),
            reservation_permille: 700,
            is_gang: false,
            ..Terms::default()
        };
        assert_eq!(terms, expected);
        assert_eq!(
            settings(2, &[]).terms(),
            Terms {
                vcpus: 2,
                ..Terms::default()
            }
        );
    }

    #[test]
    fn vcpus_start_on_cpus_of_their_own_within_their_pins() {
        assert_eq!(placed(&settings(2, &[]), [1, 1, 0, 0]), Ok(vec![2, 3]));
        assert_eq!(
            placed(&settings(2, &[(0, &[7]), (1, &[2, 7])]), [0; 4]),
            Ok(vec![3, 0])
        );
        assert_eq!(
            placed(&settings(2, &[(1, &[5])]), [0; 4]),
            Err(Unplaced::NoCpu(1))
        );
    }

    #[test]
    fn vcpus_beyond_the_cpus_share_the_least_loaded_ones_up_to_the_length_of_a_queue() {
        assert_eq!(placed(&settings(5, &[]), [1, 0, 0, 0]), Ok(vec![1, 2, 3, 0, 1]));
        assert_eq!(placed(&settings(1, &[]), [63; 4]), Err(Unplaced::FullQueue));
    }

    #[test]
    fn vcpus_with_a_reservation_start_where_those_of_others_leave_room() {
        let reserving = |vcpus, reservation_permille| VmSettings {
            reservation_permille,
            ..settings(vcpus, &[])
        };
        let placed = |vm: &VmSettings| placed_beside(vm, [1, 1, 2, 2], [600, 600, 0, 300]);
        assert_eq!(placed(&reserving(1, 600)), Ok(vec![2]));
        assert_eq!(placed(&reserving(2, 1_200)), Ok(vec![2, 3]), "600 each");
        assert_eq!(placed(&reserving(1, 300)), Ok(vec![0]), "all have room for it");
        assert_eq!(placed(&reserving(1, 0)), Ok(vec![0]));
        // Five vCPUs of 300 each: two share a CPU that has room for both.
        assert_eq!(placed(&reserving(5, 1_500)), Ok(vec![0, 1, 2, 3, 2]));
    }

    #[test]
    fn contradictory_pins_are_refused_with_the_reason() {
        let check = |vm: &VmSettings| check_pins(vm, &HOST_CPUS);
        assert_eq!(check(&settings(2, &[])), Ok(()));
        assert_eq!(check(&settings(2, &[(0, &[2]), (1, &[3])])), Ok(()));
        let why = check(&settings(2, &[(0, &[2]), (1, &[2])])).unwrap_err();
        assert_eq!(
            why,
            "vCPUs [0, 1] may use 1 CPUs only, and no two of a VM share one; help: name 2 CPUs"
        );
        let why = check(&settings(2, &[(1, &[9])])).unwrap_err();
        assert!(why.contains("vCPU 1 may run on no CPU"), "{why}");
        assert_eq!(
            check(&settings(5, &[(0, &[2])])),
            Ok(()),
            "they share CPUs anyway"
        );
    }

    #[test]
    fn number_of_a_vm_is_used_again_as_late_as_possible() {
        let used = [VmId(0), VmId(u16::MAX)];
        assert_eq!(
            next_number(VmId(u16::MAX - 1), |vm| used.contains(&vm)),
            Ok(VmId(1))
        );
        assert_eq!(next_number(VmId(3), |_| true), Err(Unplaced::NoNumber));
        assert_eq!(
            vcpus(VmId(3), 2).map(|vcpu| vcpu.index).collect::<Vec<_>>(),
            [0, 1]
        );
    }
}
