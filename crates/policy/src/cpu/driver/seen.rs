//! View of a driver: its own state, then the words that it has received, then what others publish.

use super::super::entry::VcpuEntry;
use super::super::load_tree::Branch;
use super::super::run_queue::RunQueue;
use super::super::view::{Terms, View};
use super::super::word::Word;
use super::super::{CpuId, VcpuId, VmId};

/// Received words and departed vCPUs that a driver keeps at most.
const KEPT_MAX: usize = 64;

/// Words received in messages, which may be newer than the published ones that a stale view shows.
#[derive(Clone, Debug, Default)]
pub struct Heard(Vec<(CpuId, Word)>);

impl Heard {
    /// Keeps a received word.
    pub fn note(&mut self, from: CpuId, word: Word) {
        match self.0.iter_mut().find(|one| one.0 == from) {
            Some(one) if word.is_newer_than(&one.1) => one.1 = word,
            Some(_) => {}
            None => {
                if self.0.len() == KEPT_MAX {
                    self.0.remove(0);
                }
                self.0.push((from, word));
            }
        }
    }

    /// The newer of the received and the published word of a CPU.
    fn newest(&self, cpu: CpuId, published: Word) -> Word {
        let heard = self.0.iter().find(|one| one.0 == cpu).map(|one| one.1);
        heard
            .filter(|word| word.is_newer_than(&published))
            .unwrap_or(published)
    }

    /// Drops the words that are published by now.
    pub fn forget(&mut self, view: &impl View) {
        self.0.retain(|(cpu, word)| word.is_newer_than(&view.word(*cpu)));
    }
}

/// vCPUs that a driver has given away, newest last, and their receivers.
#[derive(Clone, Debug, Default)]
pub struct Given(Vec<(VcpuId, CpuId)>);

impl Given {
    /// Notes that a vCPU was sent to another CPU.
    pub fn note(&mut self, vcpu: VcpuId, to: CpuId) {
        self.forget(vcpu);
        if self.0.len() == KEPT_MAX {
            self.0.remove(0);
        }
        self.0.push((vcpu, to));
    }

    /// Drops a vCPU that has come back.
    pub fn forget(&mut self, vcpu: VcpuId) {
        self.0.retain(|one| one.0 != vcpu);
    }

    /// The receiver of a vCPU.
    pub fn to(&self, vcpu: VcpuId) -> Option<CpuId> {
        self.0.iter().find(|one| one.0 == vcpu).map(|one| one.1)
    }
}

/// Published state as one driver sees it: its own state and its messages are newer than the published ones.
pub struct Seen<'a, V> {
    /// Published state of the machine, up to three ticks old.
    pub view: &'a V,
    /// CPU of the driver.
    pub cpu: CpuId,
    /// The driver's own queue, which is newer than its published slots.
    pub queue: &'a RunQueue,
    /// Its present word.
    pub word: Word,
    /// Its copies of load tree nodes.
    pub branch: &'a Branch,
    /// Words that it received.
    pub heard: &'a Heard,
    /// vCPUs that it gave away.
    pub given: &'a Given,
}

impl<V: View> View for Seen<'_, V> {
    fn word(&self, cpu: CpuId) -> Word {
        if cpu == self.cpu {
            self.word
        } else {
            self.heard.newest(cpu, self.view.word(cpu))
        }
    }

    fn vcpu(&self, vcpu: VcpuId) -> VcpuEntry {
        if let Some(own) = self.queue.find(vcpu) {
            return own.entry;
        }
        let mut entry = self.view.vcpu(vcpu);
        if entry.cpu == self.cpu
            && let Some(to) = self.given.to(vcpu)
        {
            entry.cpu = to;
        }
        entry
    }

    fn queued(&self, cpu: CpuId, slot: usize) -> Option<VcpuId> {
        if cpu == self.cpu {
            self.queue.slots().get(slot).map(|one| one.vcpu)
        } else {
            self.view.queued(cpu, slot)
        }
    }

    fn load(&self, cpu: CpuId, level: usize) -> u32 {
        if cpu == self.cpu {
            self.branch.load(level)
        } else {
            self.view.load(cpu, level)
        }
    }

    fn terms(&self, vm: VmId) -> Terms {
        self.view.terms(vm)
    }

    fn may_run(&self, vcpu: VcpuId, cpu: CpuId) -> bool {
        self.view.may_run(vcpu, cpu)
    }

    fn depends_on(&self, vcpu: VcpuId, cell: u16) -> bool {
        self.view.depends_on(vcpu, cell)
    }
}
