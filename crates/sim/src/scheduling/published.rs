//! Published state of the drivers, now and at the last ticks.

use std::collections::VecDeque;

use policy::cpu::entry::VcpuEntry;
use policy::cpu::load_tree::LEVELS;
use policy::cpu::message::Effect;
use policy::cpu::set::CpuSet;
use policy::cpu::view::{Terms, View};
use policy::cpu::word::Word;
use policy::cpu::{CpuId, VcpuId, VmId};

use policy::cpu::dependency::Dependencies;

/// Facts of a VM that its cell sets.
#[derive(Clone, Debug)]
pub struct VmFacts {
    /// Weight, reservation and cap.
    pub terms: Terms,
    /// CPUs on which it may run.
    pub cpus: CpuSet,
    /// Cells on which it depends.
    pub dependencies: Dependencies,
}

/// State that drivers publish.
#[derive(Clone, Debug, Default)]
pub struct Published {
    /// Word of each CPU.
    pub words: Vec<Word>,
    /// Entries of each VM's vCPUs.
    pub entries: Vec<Vec<VcpuEntry>>,
    /// Slots of each CPU's queue.
    pub slots: Vec<Vec<Option<VcpuId>>>,
    /// Copies of load tree nodes of each CPU.
    pub loads: Vec<[u32; LEVELS]>,
}

impl Published {
    fn new(cpus: usize) -> Self {
        Self {
            words: vec![Word::default(); cpus],
            entries: Vec::new(),
            slots: vec![Vec::new(); cpus],
            loads: vec![[0; LEVELS]; cpus],
        }
    }

    /// Applies what a driver publishes. Words and entries pass through their packed form, as in the product.
    pub fn apply(&mut self, cpu: CpuId, effect: &Effect) {
        match effect {
            Effect::Word(word) => self.words[cpu.index()] = Word::unpack(word.pack()),
            Effect::Entry(vcpu, entry) => {
                self.entries[usize::from(vcpu.vm.0)][usize::from(vcpu.index)] =
                    VcpuEntry::unpack(entry.pack());
            }
            Effect::Slot(slot, vcpu) => {
                let slots = &mut self.slots[cpu.index()];
                let slot = usize::from(*slot);
                if slots.len() <= slot {
                    slots.resize(slot + 1, None);
                }
                slots[slot] = *vcpu;
            }
            Effect::Load { level, load } => self.loads[cpu.index()][usize::from(*level)] = *load,
            Effect::Run(_) | Effect::Send { .. } | Effect::Refused(..) | Effect::Timer(_) => {}
        }
    }
}

/// Published state with its past.
#[derive(Clone, Debug)]
pub struct History {
    /// The state now.
    pub now: Published,
    /// The states at the last ticks, newest first.
    past: VecDeque<Published>,
    lag_max: usize,
    /// Facts of each VM, by its number.
    pub vms: Vec<VmFacts>,
}

impl History {
    /// An empty state of a machine, whose past is kept for `lag_max` ticks.
    pub fn new(cpus: usize, lag_max: usize) -> Self {
        Self {
            now: Published::new(cpus),
            past: VecDeque::new(),
            lag_max,
            vms: Vec::new(),
        }
    }

    /// Adds a VM whose vCPUs are idle.
    pub fn add(&mut self, facts: VmFacts) {
        self.now
            .entries
            .push(vec![VcpuEntry::default(); usize::from(facts.terms.vcpus)]);
        self.vms.push(facts);
    }

    /// Keeps the state of this tick.
    pub fn tick(&mut self) {
        if self.lag_max > 0 {
            self.past.truncate(self.lag_max - 1);
            self.past.push_front(self.now.clone());
        }
    }

    /// The state as a reader sees it that lags by so many ticks.
    pub fn lagging(&self, ticks: usize) -> Lagging<'_> {
        let published = match ticks.checked_sub(1) {
            Some(past) => self.past.get(past).unwrap_or(&self.now),
            None => &self.now,
        };
        Lagging {
            published,
            vms: &self.vms,
        }
    }
}

/// View of a driver.
#[derive(Clone, Copy, Debug)]
pub struct Lagging<'a> {
    published: &'a Published,
    vms: &'a [VmFacts],
}

impl View for Lagging<'_> {
    fn word(&self, cpu: CpuId) -> Word {
        self.published.words[cpu.index()]
    }

    fn vcpu(&self, vcpu: VcpuId) -> VcpuEntry {
        let entries = self.published.entries.get(usize::from(vcpu.vm.0));
        let entry = entries.and_then(|entries| entries.get(usize::from(vcpu.index)));
        entry.copied().unwrap_or_default()
    }

    fn queued(&self, cpu: CpuId, slot: usize) -> Option<VcpuId> {
        self.published.slots[cpu.index()].get(slot).copied().flatten()
    }

    fn load(&self, cpu: CpuId, level: usize) -> u32 {
        self.published.loads[cpu.index()][level]
    }

    fn terms(&self, vm: VmId) -> Terms {
        self.vms[usize::from(vm.0)].terms
    }

    fn may_run(&self, vcpu: VcpuId, cpu: CpuId) -> bool {
        self.vms[usize::from(vcpu.vm.0)].cpus.contains(cpu)
    }

    fn depends_on(&self, vcpu: VcpuId, cell: u16) -> bool {
        self.vms[usize::from(vcpu.vm.0)].dependencies.has(cell)
    }
}
