//! The use of a host's CPUs and memory between two readings, as `mirrorball top --json` prints it.
//!
//! Shares of time are in thousandths of one CPU (`_milli`). A figure that is unknown is `null`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::rates::{Rates, busy_milli, sum};
use super::reading::{CellReading, CpuQueue, CpuReading, Reading, Unknown, VcpuReading, VmReading};

/// A reading, and the rates since the one before.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Time of the reading, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Time since the reading before, in milliseconds; none for the first one, which has no rates.
    pub interval_ms: Option<u64>,
    /// The cells, by number.
    pub cells: Vec<CellReading>,
    /// The host's CPUs, by number.
    pub cpus: Vec<CpuUse>,
    /// The caller's VMs, by name.
    pub vms: Vec<VmUse>,
    /// Their vCPUs, by VM and number.
    pub vcpus: Vec<VcpuUse>,
    /// Sources that gave no figures, each with the reason.
    pub unknown: Vec<Unknown>,
}

/// A CPU of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CpuUse {
    /// The CPU's number.
    pub cpu: usize,
    /// The cells that have it.
    pub cells: Vec<u16>,
    /// Share of time that it worked, for VMs or anything else.
    pub busy_milli: Option<u64>,
    /// The caller's vCPUs that may run on no other CPU, and those that ran on this one last.
    pub vcpus: Vec<CpuVcpu>,
    /// Its run queue, as its cell reports it.
    pub queue: Option<CpuQueue>,
}

/// A vCPU in the list of a host CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CpuVcpu {
    /// The VM's name.
    pub vm: String,
    /// The vCPU's number.
    pub vcpu: u8,
    /// Whether it may run on no other CPU.
    pub is_bound: bool,
}

/// A VM, and the rates of its vCPUs together. Each rate is `null` if it is unknown of one vCPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmUse {
    /// The VM as it was read.
    #[serde(flatten)]
    pub reading: VmReading,
    /// Time that they ran on CPUs.
    pub run_milli: Option<u64>,
    /// Time that they were ready and waited for a CPU.
    pub wait_milli: Option<u64>,
    /// Time that they spun for locks of the guest.
    pub spin_milli: Option<u64>,
    /// Time that they were halted.
    pub halt_milli: Option<u64>,
    /// Number of their moves between CPUs since the sample before.
    pub migrated: Option<u64>,
}

/// A vCPU with its thread, and the rates since the sample before.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VcpuUse {
    /// The vCPU as it was read.
    #[serde(flatten)]
    pub reading: VcpuReading,
    /// Cell in which it ran at the sample before, if that was another one.
    pub moved_from: Option<u16>,
    /// Time that it ran on CPUs.
    pub run_milli: Option<u64>,
    /// Time that it was ready and waited for a CPU.
    pub wait_milli: Option<u64>,
    /// Time that it spun for a lock of the guest.
    pub spin_milli: Option<u64>,
    /// Time that it was halted.
    pub halt_milli: Option<u64>,
    /// Halts each second.
    pub halts_per_s: Option<u64>,
    /// Exits from the guest each second.
    pub exits_per_s: Option<u64>,
    /// Number of its moves between CPUs since the sample before.
    pub migrated: Option<u64>,
}

impl Sample {
    /// Makes the sample of a reading, with rates since the reading `before`.
    pub fn between(before: Option<&Reading>, after: &Reading) -> Self {
        let vcpus = vcpus(before, after);
        let vms = after.vms.iter().map(|vm| vm_use(vm, &vcpus)).collect();
        Self {
            unix_ms: after.unix_ms,
            interval_ms: before.map(|before| after.at_ms.saturating_sub(before.at_ms)),
            cells: after.cells.clone(),
            cpus: cpus(before, after),
            vms,
            vcpus,
            unknown: after.unknown.clone(),
        }
    }
}

fn vcpus(before: Option<&Reading>, after: &Reading) -> Vec<VcpuUse> {
    let former: BTreeMap<(&str, u8), &VcpuReading> = before
        .iter()
        .flat_map(|before| &before.vcpus)
        .map(|vcpu| ((&vcpu.vm[..], vcpu.vcpu), vcpu))
        .collect();
    let vcpu = |vcpu: &VcpuReading| vcpu_use(former.get(&(&vcpu.vm[..], vcpu.vcpu)).copied(), vcpu);
    after.vcpus.iter().map(vcpu).collect()
}

fn vcpu_use(before: Option<&VcpuReading>, after: &VcpuReading) -> VcpuUse {
    let rates = before.map_or_else(Rates::default, |before| Rates::between(before, after));
    let cell_before = before.and_then(|before| before.cell);
    VcpuUse {
        reading: after.clone(),
        moved_from: cell_before.filter(|cell| after.cell.is_some_and(|now| now != *cell)),
        run_milli: rates.run_milli,
        wait_milli: rates.wait_milli,
        spin_milli: rates.spin_milli,
        halt_milli: rates.halt_milli,
        halts_per_s: rates.halts_per_s,
        exits_per_s: rates.exits_per_s,
        migrated: rates.migrated,
    }
}

fn vm_use(vm: &VmReading, vcpus: &[VcpuUse]) -> VmUse {
    let own = vcpus.iter().filter(|vcpu| vcpu.reading.vm == vm.vm);
    let own: Vec<&VcpuUse> = own.collect();
    let all = |of: fn(&VcpuUse) -> Option<u64>| {
        let is_whole = own.len() == usize::from(vm.vcpus);
        sum(own.iter().map(|vcpu| of(vcpu))).filter(|_| is_whole)
    };
    VmUse {
        reading: vm.clone(),
        run_milli: all(|vcpu| vcpu.run_milli),
        wait_milli: all(|vcpu| vcpu.wait_milli),
        spin_milli: all(|vcpu| vcpu.spin_milli),
        halt_milli: all(|vcpu| vcpu.halt_milli),
        migrated: all(|vcpu| vcpu.migrated),
    }
}

fn cpus(before: Option<&Reading>, after: &Reading) -> Vec<CpuUse> {
    let former = |cpu: usize| {
        let mut all = before.iter().flat_map(|before| &before.cpus);
        all.find(|former| former.cpu == cpu)
    };
    // Cells of other hosts have CPUs of the same numbers.
    let is_elsewhere = |cell: u16| {
        let mut cells = after.cells.iter();
        cells.any(|known| known.cell == cell && !known.is_here)
    };
    let here = |cpu: usize| {
        let vcpus = after.vcpus.iter();
        let vcpus = vcpus.filter(move |vcpu| !vcpu.cell.is_some_and(is_elsewhere));
        vcpus.filter_map(move |vcpu| {
            let bound = match vcpu.cpus.as_deref() {
                Some([bound]) => Some(*bound),
                _ => None,
            };
            (bound.or(vcpu.last_cpu) == Some(cpu)).then(|| CpuVcpu {
                vm: vcpu.vm.clone(),
                vcpu: vcpu.vcpu,
                is_bound: bound.is_some(),
            })
        })
    };
    let own = |cell: &&CellReading| cell.is_here;
    let cells = |cpu: usize| {
        let having = after.cells.iter().filter(own);
        let having = having.filter(|cell| cell.cpus.contains(&cpu));
        having.map(|cell| cell.cell).collect()
    };
    let cpu = |reading: &CpuReading| CpuUse {
        cpu: reading.cpu,
        cells: cells(reading.cpu),
        busy_milli: former(reading.cpu).and_then(|former| busy_milli(former, reading)),
        vcpus: here(reading.cpu).collect(),
        queue: reading.queue.clone(),
    };
    after.cpus.iter().map(cpu).collect()
}
