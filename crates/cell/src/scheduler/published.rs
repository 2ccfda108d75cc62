//! State that the drivers of a cell publish, and the view of one driver.
//!
//! Each word has one writer, the driver of its CPU. An entry has one writer at a time, the driver of the CPU
//! whose queue has the vCPU; the vCPU changes its driver by a message, which orders their writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use policy::cpu::entry::VcpuEntry;
use policy::cpu::load_tree::LEVELS;
use policy::cpu::message::Effect;
use policy::cpu::set::CpuSet;
use policy::cpu::view::{Terms, View};
use policy::cpu::windows::{VmWindows, WindowState};
use policy::cpu::word::{LOAD_MAX, Word};
use policy::cpu::{CpuId, Nanos, VcpuId, VmId};
use urpc::published::Published;

use super::vcpu_threads::VcpuThreads;

/// Slots of a queue that are published.
const SLOTS: usize = LOAD_MAX as usize + 1;

/// State that one driver publishes.
#[derive(Debug)]
pub(super) struct CpuState {
    word: Published<2>,
    slots: [AtomicU64; SLOTS],
    loads: [AtomicU32; LEVELS],
    counts: Published<6>,
}

/// Counts of a driver, for reports.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Counts {
    /// vCPUs of the queue that wait.
    pub(super) waiting: u64,
    /// vCPUs of the queue that Linux runs, as they halt often.
    pub(super) ungated: u64,
    /// vCPUs that came by the idle balancer, by the periodic one, and by an order.
    pub(super) moved: [u64; 3],
    /// Moves that the driver refused, or that were refused to it.
    pub(super) refused: u64,
}

impl CpuState {
    /// Publishes the counts of the CPU's driver.
    pub(super) fn set_counts(&self, counts: Counts) {
        let [idle, periodic, ordered] = counts.moved;
        self.counts.write([
            counts.waiting,
            counts.ungated,
            idle,
            periodic,
            ordered,
            counts.refused,
        ]);
    }

    /// The published word.
    pub(super) fn word(&self) -> Word {
        Word::unpack(self.word.read_or_torn())
    }

    /// The published counts.
    pub(super) fn counts(&self) -> Counts {
        let [waiting, ungated, idle, periodic, ordered, refused] = self.counts.read_or_torn();
        Counts {
            waiting,
            ungated,
            moved: [idle, periodic, ordered],
            refused,
        }
    }
}

impl Default for CpuState {
    fn default() -> Self {
        Self {
            word: Published::new(Word::default().pack()),
            slots: std::array::from_fn(|_| AtomicU64::new(0)),
            loads: std::array::from_fn(|_| AtomicU32::new(0)),
            counts: Published::default(),
        }
    }
}

/// Entries of a VM's vCPUs, by number.
pub(super) type Entries = Arc<[Published<4>]>;

/// Facts of a VM. The cell replaces them whole; drivers learn of it by a message.
#[derive(Clone)]
pub(super) struct VmFacts {
    pub(super) terms: Terms,
    /// CPUs on which each vCPU may run.
    pub(super) cpus: Vec<CpuSet>,
    /// The published entries of its vCPUs.
    pub(super) entries: Entries,
    pub(super) threads: Arc<dyn VcpuThreads>,
    /// Windows of a part of a VM that spans cells; none for a VM in this cell alone.
    pub(super) windows: Option<VmWindows>,
}

impl VmFacts {
    /// The host's numbers of the CPUs that a vCPU may use.
    pub(super) fn host_cpus_of(&self, vcpu: u16, host_cpus: &[usize]) -> Vec<usize> {
        let numbered = (0..).map(CpuId).zip(host_cpus);
        let set = self.cpus.get(usize::from(vcpu)).copied().unwrap_or_default();
        let own = numbered.filter(|(id, _)| set.contains(*id));
        own.map(|(_, cpu)| *cpu).collect()
    }

    /// Whether a part may run, at a time of the host's clock. One without windows by then is left to Linux:
    /// drivers do not choose it.
    pub(super) fn window(&self, host_now: Nanos) -> WindowState {
        match self.windows.map(|windows| windows.state(host_now)) {
            None => WindowState::Absent,
            Some(WindowState::Open) => WindowState::Open,
            Some(WindowState::Absent | WindowState::Closed) => WindowState::Closed,
        }
    }
}

/// VMs of which a driver has records.
pub(super) type Vms = BTreeMap<VmId, Arc<VmFacts>>;

/// Slot of a queue in an integer; 0 is an empty one.
fn pack_slot(vcpu: Option<VcpuId>) -> u64 {
    vcpu.map_or(0, |vcpu| {
        1 << 32 | u64::from(vcpu.vm.0) << 16 | u64::from(vcpu.index)
    })
}

fn unpack_slot(slot: u64) -> Option<VcpuId> {
    (slot >> 32 == 1).then_some(VcpuId {
        vm: VmId((slot >> 16) as u16),
        index: slot as u16,
    })
}

/// View of one driver, and the state that it publishes.
#[derive(Clone, Copy)]
pub(super) struct CellView<'a> {
    /// State that the drivers of the cell's CPUs publish.
    pub(super) cpus: &'a [CpuState],
    /// The VMs of which the driver has records.
    pub(super) vms: &'a Vms,
    /// Time of the host's clock.
    pub(super) host_now: Nanos,
}

impl CellView<'_> {
    /// Applies an effect of the driver of `cpu`, if it publishes anything.
    pub(super) fn publish(&self, cpu: CpuId, effect: &Effect) {
        let Some(own) = self.cpus.get(cpu.index()) else {
            return;
        };
        match effect {
            Effect::Word(word) => own.word.write(word.pack()),
            Effect::Entry(vcpu, entry) => {
                // The facts of a VM that has ended are gone before its vCPUs.
                if let Some(shared) = self.entry(*vcpu) {
                    shared.write(entry.pack());
                }
            }
            Effect::Slot(slot, vcpu) => {
                if let Some(shared) = own.slots.get(usize::from(*slot)) {
                    shared.store(pack_slot(*vcpu), Ordering::Release);
                }
            }
            Effect::Load { level, load } => {
                if let Some(shared) = own.loads.get(usize::from(*level)) {
                    shared.store(*load, Ordering::Release);
                }
            }
            Effect::Run(_) | Effect::Send { .. } | Effect::Refused(..) | Effect::Timer(_) => {}
        }
    }

    /// Whether a CPU has more than one vCPU that is not idle, so that vCPUs compete for it.
    pub(super) fn is_contended(&self) -> bool {
        (0..self.cpus.len()).any(|cpu| self.word(CpuId(cpu as u16)).load > 1)
    }

    fn entry(&self, vcpu: VcpuId) -> Option<&Published<4>> {
        self.vms.get(&vcpu.vm)?.entries.get(usize::from(vcpu.index))
    }
}

impl View for CellView<'_> {
    fn word(&self, cpu: CpuId) -> Word {
        let shared = self.cpus.get(cpu.index());
        shared.map_or_else(Word::default, CpuState::word)
    }

    fn vcpu(&self, vcpu: VcpuId) -> VcpuEntry {
        let shared = self.entry(vcpu);
        shared.map_or_else(VcpuEntry::default, |shared| {
            VcpuEntry::unpack(shared.read_or_torn())
        })
    }

    fn queued(&self, cpu: CpuId, slot: usize) -> Option<VcpuId> {
        let shared = self.cpus.get(cpu.index())?.slots.get(slot)?;
        unpack_slot(shared.load(Ordering::Acquire))
    }

    fn load(&self, cpu: CpuId, level: usize) -> u32 {
        let shared = self.cpus.get(cpu.index()).and_then(|cpu| cpu.loads.get(level));
        shared.map_or(0, |shared| shared.load(Ordering::Acquire))
    }

    fn terms(&self, vm: VmId) -> Terms {
        let terms = |facts: &Arc<VmFacts>| Terms {
            window: facts.window(self.host_now),
            ..facts.terms
        };
        self.vms.get(&vm).map_or_else(Terms::default, terms)
    }

    fn may_run(&self, vcpu: VcpuId, cpu: CpuId) -> bool {
        let vm = self.vms.get(&vcpu.vm);
        let cpus = vm.and_then(|vm| vm.cpus.get(usize::from(vcpu.index)));
        cpus.is_some_and(|cpus| cpus.contains(cpu))
    }

    fn depends_on(&self, _: VcpuId, _: u16) -> bool {
        // All CPUs are of one cell.
        true
    }
}

#[cfg(test)]
mod tests {
    use policy::cpu::entry::VcpuState;
    use policy::cpu::word::Mode;

    use super::super::vcpu_threads::tests::NoThreads;
    use super::*;

    #[test]
    fn published_state_is_read_back_and_that_of_an_unknown_vm_is_idle() {
        let cpus = [CpuState::default(), CpuState::default()];
        let mut vms = Vms::new();
        let vcpu = |vm| VcpuId {
            vm: VmId(vm),
            index: 1,
        };
        let facts = VmFacts {
            terms: Terms {
                vcpus: 2,
                ..Terms::default()
            },
            cpus: vec![CpuSet::ALL, [CpuId(1)].into_iter().collect()],
            entries: (0..2).map(|_| Published::default()).collect(),
            threads: Arc::new(NoThreads),
            windows: None,
        };
        vms.insert(VmId(7), Arc::new(facts));
        let view = CellView {
            cpus: &cpus,
            vms: &vms,
            host_now: 0,
        };
        let entry = VcpuEntry {
            cpu: CpuId(1),
            state: VcpuState::Running,
            vtime: 9,
            ..VcpuEntry::default()
        };
        let word = Word {
            vm: VmId(7),
            mode: Mode::Entitled,
            load: 2,
            ..Word::default()
        };
        assert!(!view.is_contended());
        for effect in [
            Effect::Word(word),
            Effect::Entry(vcpu(7), entry),
            Effect::Entry(vcpu(8), entry),
            Effect::Slot(3, Some(vcpu(7))),
            Effect::Slot(64, Some(vcpu(7))),
            Effect::Load { level: 1, load: 5 },
        ] {
            view.publish(CpuId(1), &effect);
        }
        assert!(view.is_contended());
        assert_eq!(
            (view.word(CpuId(1)), view.word(CpuId(0))),
            (word, Word::default())
        );
        assert_eq!(
            (view.vcpu(vcpu(7)), view.vcpu(vcpu(8))),
            (entry, VcpuEntry::default())
        );
        assert_eq!(view.queued(CpuId(1), 3), Some(vcpu(7)));
        assert_eq!(
            (view.queued(CpuId(1), 2), view.queued(CpuId(1), 64)),
            (None, None)
        );
        assert_eq!((view.load(CpuId(1), 1), view.load(CpuId(0), 1)), (5, 0));
        assert_eq!((view.terms(VmId(7)).vcpus, view.terms(VmId(8)).vcpus), (2, 1));
        assert!(view.may_run(vcpu(7), CpuId(1)) && !view.may_run(vcpu(7), CpuId(0)));
        assert!(!view.may_run(vcpu(8), CpuId(1)));
        view.publish(CpuId(1), &Effect::Slot(3, None));
        assert_eq!(view.queued(CpuId(1), 3), None);
    }
}
