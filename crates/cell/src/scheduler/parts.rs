//! Parts of VMs that span cells, in the tables of the drivers of one cell.

use std::collections::BTreeMap;
use std::sync::Arc;

use policy::cpu::entry::VcpuEntry;
use policy::cpu::message::Event;
use policy::cpu::view::Terms;
use policy::cpu::windows::VmWindows;
use policy::cpu::word::LOAD_MAX;
use policy::cpu::{CpuId, VmId};
use registry::cluster::windows::SpanningVcpu;
use tracing::debug;
use urpc::published::Published;

use super::cpu_thread::Input;
use super::part_threads::PartThreads;
use super::published::VmFacts;
use super::vm_table::vcpus;
use super::{VcpuThreads, VmTable};

/// vCPUs of a VM that spans cells which are in this cell, and times at which they may run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) vcpus: Vec<SpanningVcpu>,
    pub(crate) windows: VmWindows,
}

/// Part that the drivers have.
pub(super) struct ScheduledPart {
    pub(super) number: VmId,
    pub(super) part: Part,
    pub(super) facts: Arc<VmFacts>,
}

impl VmTable {
    /// Replaces the parts that the drivers have, by the names of their VMs.
    pub(super) fn set_parts(&mut self, mut parts: BTreeMap<String, Part>) {
        let names: Vec<String> = self.parts.keys().cloned().collect();
        for name in names {
            let Some(known) = self.parts.get_mut(&name) else {
                continue;
            };
            match parts.remove(&name) {
                Some(next) if next.vcpus == known.part.vcpus => {
                    if next != known.part {
                        let facts = VmFacts {
                            windows: Some(next.windows),
                            ..VmFacts::clone(&known.facts)
                        };
                        (known.part, known.facts) = (next, Arc::new(facts));
                        let (number, facts) = (known.number, Arc::clone(&known.facts));
                        self.send_facts(number, Some(&facts));
                    }
                }
                next => {
                    let number = known.number;
                    self.parts.remove(&name);
                    self.send_facts(number, None);
                    parts.extend(next.map(|next| (name, next)));
                }
            }
        }
        for (name, part) in parts {
            match PartThreads::find(&part.vcpus) {
                Ok(threads) => self.add_part(name, part, Arc::new(threads)),
                // The VM has ended or rebooted since its home has reported it.
                Err(error) => debug!(%error, name, "a VM that spans cells has ended"),
            }
        }
    }

    /// Brings a part to the drivers of its vCPUs' CPUs.
    pub(super) fn add_part(&mut self, name: String, part: Part, threads: Arc<dyn VcpuThreads>) {
        let Some((number, cpus)) = self.number().ok().zip(self.cpus_of(&part.vcpus)) else {
            // The report may come again several times a second.
            debug!(
                name,
                "the part of a VM that spans cells is left to Linux: its CPUs are not the cell's"
            );
            return;
        };
        let entry = |cpu: &CpuId| {
            let entry = VcpuEntry {
                cpu: *cpu,
                ..VcpuEntry::default()
            };
            Published::new(entry.pack())
        };
        let facts = Arc::new(VmFacts {
            // Its windows are by its weight; each of its vCPUs runs in them whatever the others do.
            terms: Terms {
                vcpus: u16::try_from(cpus.len()).unwrap_or(u16::MAX),
                is_gang: false,
                ..Terms::default()
            },
            cpus: cpus.iter().map(|cpu| [*cpu].into_iter().collect()).collect(),
            entries: cpus.iter().map(entry).collect(),
            threads,
            windows: Some(part.windows),
        });
        self.last_number = number;
        self.send_facts(number, Some(&facts));
        let count = u8::try_from(cpus.len()).unwrap_or(u8::MAX);
        for (vcpu, cpu) in vcpus(number, count).zip(&cpus) {
            let is_awake = true;
            self.send(*cpu, Input::Event(Event::Add { vcpu, is_awake }));
        }
        let scheduled = ScheduledPart { number, part, facts };
        self.parts.insert(name, scheduled);
    }

    /// The drivers of the vCPUs' CPUs; none if one is no CPU of the cell, has another vCPU of the VM, or has
    /// a full queue.
    fn cpus_of(&self, vcpus: &[SpanningVcpu]) -> Option<Vec<CpuId>> {
        let loads = self.cpu_use().loads;
        let mut cpus = Vec::new();
        for vcpu in vcpus {
            let index = self.shared.host_cpus.iter().position(|own| *own == vcpu.cpu)?;
            let cpu = CpuId(u16::try_from(index).ok()?);
            if cpus.contains(&cpu) || loads.get(index).copied()? >= u32::from(LOAD_MAX) {
                return None;
            }
            cpus.push(cpu);
        }
        Some(cpus)
    }
}
