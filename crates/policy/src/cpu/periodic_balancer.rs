//! Periodic balancer: moves vCPUs from loaded to less loaded parts of the machine.
//!
//! A pass goes depth first over the load tree and compares the children of each node. If their loads differ
//! by more than one vCPU, it looks for a vCPU on the loaded side that may go to a CPU of the other side
//! without another vCPU of its VM; between cells it prefers one whose VM depends on the other cell already
//! (Cellular Disco, section 4.2: every 20 ms in each region of eight CPUs, every 80 ms over all).
//!
//! Ours: a node moves one vCPU a pass; children are balanced before their parent, so that near moves come
//! first; loads are compared for each CPU, so that a part with fewer CPUs gets less; CPUs take turns to run
//! the passes. Each pass visits each node once, so it ends, and counts the candidates that it refused.

use super::entry::VcpuState;
use super::load_tree::{self, REGION_CPUS};
use super::message::{REFUSALS, Refusal};
use super::reserved_time::{may_move, of_queue, share, sum};
use super::topology::Topology;
use super::tunables::Tunables;
use super::view::View;
use super::word::Mode;
use super::{CpuId, Nanos, VcpuId};

/// Move that a pass suggests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Suggestion {
    /// vCPU to move.
    pub vcpu: VcpuId,
    /// CPU that has it.
    pub owner: CpuId,
    /// CPU that shall take it.
    pub to: CpuId,
}

/// State of a pass. It is kept between passes only for its memory.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// Loads that the pass holds, a heap whose root has index 1.
    loads: Vec<u32>,
    /// CPUs that are online below each node.
    cpus: Vec<u32>,
    /// First CPU of the span.
    first: u16,
    /// CPUs of each leaf: 1 in a region, 8 over the machine.
    leaf_cpus: u16,
    /// Moves that it suggests.
    pub suggestions: Vec<Suggestion>,
    /// Candidates that it refused, by [`Refusal`].
    pub refused: [u32; REFUSALS],
    /// Nodes at which it found no candidate for a disparity.
    pub unresolved: u32,
}

/// Whether CPU `cpu` runs the pass number `number` over `span` CPUs from `first` on. CPUs take turns, so that
/// the cost of a pass over `n` CPUs, which grows with `n`, falls on each CPU every `n`th time.
pub fn is_runner(cpu: CpuId, first: u16, span: u16, number: u64) -> bool {
    u64::from(cpu.0.wrapping_sub(first)) == number % u64::from(span.max(1))
}

impl Pass {
    /// Balances the region of eight CPUs that has `cpu`.
    pub fn region(&mut self, view: &impl View, topology: &Topology, cpu: CpuId, tunables: &Tunables) {
        self.begin(cpu.0 / REGION_CPUS * REGION_CPUS, 1, usize::from(REGION_CPUS));
        for leaf in 0..usize::from(REGION_CPUS) {
            let cpu = CpuId(self.first + leaf as u16);
            if cpu.0 < topology.cpus() {
                let word = view.word(cpu);
                self.set(leaf, u32::from(word.load), u32::from(word.mode != Mode::Offline));
            }
        }
        self.run(view, topology, tunables);
    }

    /// Balances the regions of the whole machine.
    pub fn machine(&mut self, view: &impl View, topology: &Topology, tunables: &Tunables) {
        let cpus = topology.cpus();
        let regions = usize::from(cpus.div_ceil(REGION_CPUS));
        self.begin(0, REGION_CPUS, regions.next_power_of_two());
        for leaf in 0..regions {
            let first = leaf as u16 * REGION_CPUS;
            let online = (first..cpus.min(first + REGION_CPUS))
                .filter(|cpu| view.word(CpuId(*cpu)).mode != Mode::Offline)
                .count();
            let load = load_tree::load(view, CpuId(first), load_tree::FULL_LEVEL, cpus);
            self.set(leaf, load, online as u32);
        }
        self.run(view, topology, tunables);
    }

    fn begin(&mut self, first: u16, leaf_cpus: u16, leaves: usize) {
        self.first = first;
        self.leaf_cpus = leaf_cpus;
        for tree in [&mut self.loads, &mut self.cpus] {
            tree.clear();
            tree.resize(2 * leaves, 0);
        }
        self.suggestions.clear();
        self.refused = [0; REFUSALS];
        self.unresolved = 0;
    }

    fn set(&mut self, leaf: usize, load: u32, cpus: u32) {
        let mut node = leaf + self.loads.len() / 2;
        while node > 0 {
            self.loads[node] += load;
            self.cpus[node] += cpus;
            node /= 2;
        }
    }

    fn run(&mut self, view: &impl View, topology: &Topology, tunables: &Tunables) {
        let leaves = self.loads.len() / 2;
        // From the last inner node to the root: each node after its children.
        for node in (1..leaves).rev() {
            let (left, right) = (2 * node, 2 * node + 1);
            let pairs = [(left, right), (right, left)];
            let uneven = pairs
                .into_iter()
                .find(|(heavy, light)| self.is_uneven(*heavy, *light, tunables));
            let Some((heavy, light)) = uneven else {
                continue;
            };
            match self.candidate(view, topology, heavy, light, tunables) {
                Some((suggestion, from, to)) => {
                    self.suggestions.push(suggestion);
                    self.shift(from, to);
                }
                None => self.unresolved += 1,
            }
        }
    }

    /// Whether a move from one node to the other one leaves the loads of their CPUs nearer.
    fn is_uneven(&self, heavy: usize, light: usize, tunables: &Tunables) -> bool {
        let [heavy_cpus, light_cpus] = [heavy, light].map(|node| self.cpus[node]);
        if light_cpus == 0 || self.loads[heavy] <= tunables.disparity {
            return false;
        }
        // With equal CPUs: a difference of more than `disparity`, which is one.
        let after_heavy = u64::from(self.loads[heavy] - tunables.disparity) * u64::from(light_cpus);
        let after_light = u64::from(self.loads[light] + 1) * u64::from(heavy_cpus);
        after_heavy >= after_light.max(1)
    }

    /// Moves one vCPU's load in the loads that the pass holds.
    fn shift(&mut self, from: usize, to: usize) {
        let (mut from, mut to) = (from, to);
        while from > 0 {
            self.loads[from] = self.loads[from].saturating_sub(1);
            from /= 2;
        }
        while to > 0 {
            self.loads[to] += 1;
            to /= 2;
        }
    }

    /// The leaf below a node with the greatest load, or the least one, for each CPU.
    fn leaf(&self, mut node: usize, is_heaviest: bool) -> usize {
        while node < self.loads.len() / 2 {
            let (left, right) = (2 * node, 2 * node + 1);
            let by_cpu = |one: usize, other: usize| u64::from(self.loads[one]) * u64::from(self.cpus[other]);
            let left_is_heavier = by_cpu(left, right) >= by_cpu(right, left);
            node = match (self.cpus[left], self.cpus[right]) {
                (_, 0) => left,
                (0, _) => right,
                _ if left_is_heavier == is_heaviest => left,
                _ => right,
            };
        }
        node
    }

    /// Online CPUs of a leaf, with the loads that the pass holds for them.
    fn cpus_of<'a>(&'a self, view: &'a impl View, topology: &Topology, leaf: usize) -> Loads {
        let first = self.first + (leaf - self.loads.len() / 2) as u16 * self.leaf_cpus;
        let mut loads = Loads::default();
        for cpu in first..topology.cpus().min(first + self.leaf_cpus) {
            let (cpu, word) = (CpuId(cpu), view.word(CpuId(cpu)));
            if word.mode != Mode::Offline {
                let gone = self.suggestions.iter().filter(|one| one.owner == cpu).count() as u32;
                let come = self.suggestions.iter().filter(|one| one.to == cpu).count() as u32;
                loads.push(
                    cpu,
                    (u32::from(word.load) + come).saturating_sub(gone),
                    word.queued,
                );
            }
        }
        loads
    }

    /// The best vCPU to move from below `heavy` to below `light`, and the leaves of the move.
    fn candidate(
        &mut self,
        view: &impl View,
        topology: &Topology,
        heavy: usize,
        light: usize,
        tunables: &Tunables,
    ) -> Option<(Suggestion, usize, usize)> {
        let (from, to) = (self.leaf(heavy, true), self.leaf(light, false));
        let mut owners = self.cpus_of(view, topology, from);
        let mut takers = self.cpus_of(view, topology, to);
        owners.all[..owners.count].sort_unstable_by_key(|one| (u32::MAX - one.load, one.cpu));
        takers.all[..takers.count].sort_unstable_by_key(|one| (one.load, one.cpu));
        let mut second_best = None;
        for owner in &owners.all[..owners.count] {
            for slot in 0..usize::from(owner.queued) {
                let Some(vcpu) = view.queued(owner.cpu, slot) else {
                    continue;
                };
                let refusal = match self.taker(view, vcpu, owner, &takers, tunables) {
                    Ok(taker) => {
                        let suggestion = Suggestion {
                            vcpu,
                            owner: owner.cpu,
                            to: taker,
                        };
                        let [own, other] = [owner.cpu, taker].map(|cpu| topology.place(cpu).cell);
                        if own == other || view.depends_on(vcpu, other) {
                            return Some((suggestion, from, to));
                        }
                        second_best.get_or_insert((suggestion, from, to));
                        continue;
                    }
                    Err(refusal) => refusal,
                };
                self.refused[refusal as usize] += 1;
            }
        }
        second_best
    }

    /// The CPU to which a vCPU may go.
    fn taker(
        &self,
        view: &impl View,
        vcpu: VcpuId,
        owner: &Load,
        takers: &Loads,
        tunables: &Tunables,
    ) -> Result<CpuId, Refusal> {
        let entry = view.vcpu(vcpu);
        if entry.cpu != owner.cpu || self.suggestions.iter().any(|one| one.vcpu == vcpu) {
            return Err(Refusal::NotHere);
        }
        match entry.state {
            VcpuState::Running => return Err(Refusal::Running),
            VcpuState::Idle => return Err(Refusal::Balanced),
            VcpuState::Waiting | VcpuState::Ungated => {}
        }
        let mut refusal = Refusal::Balanced;
        for taker in &takers.all[..takers.count] {
            if owner.load <= taker.load + tunables.disparity {
                break;
            }
            if !view.may_run(vcpu, taker.cpu) {
                refusal = Refusal::NotAllowed;
                continue;
            }
            let has_vm = (0..usize::from(taker.queued))
                .filter_map(|slot| view.queued(taker.cpu, slot))
                .chain(
                    self.suggestions
                        .iter()
                        .filter(|one| one.to == taker.cpu)
                        .map(|one| one.vcpu),
                )
                .any(|other| other.vm == vcpu.vm);
            if has_vm {
                refusal = Refusal::SameVm;
                continue;
            }
            let share = share(&view.terms(vcpu.vm));
            let may = || {
                let [from, to] = [owner.cpu, taker.cpu].map(|cpu| self.reserved(view, cpu));
                may_move(share, from, to)
            };
            if share > 0 && !may() {
                refusal = Refusal::Reserved;
                continue;
            }
            return Ok(taker.cpu);
        }
        Err(refusal)
    }

    /// Reserved time of a CPU with the moves of this pass.
    fn reserved(&self, view: &impl View, cpu: CpuId) -> u32 {
        let moved = |place: fn(&Suggestion) -> CpuId| {
            let moves = self.suggestions.iter().filter(move |one| place(one) == cpu);
            sum(view, moves.map(|one| one.vcpu))
        };
        let (gone, come) = (moved(|one| one.owner), moved(|one| one.to));
        of_queue(view, cpu).saturating_add(come).saturating_sub(gone)
    }
}

/// A CPU in a pass.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    cpu: CpuId,
    load: u32,
    queued: u8,
}

/// CPUs of one leaf.
#[derive(Clone, Copy, Debug, Default)]
struct Loads {
    all: [Load; REGION_CPUS as usize],
    count: usize,
}

impl Loads {
    fn push(&mut self, cpu: CpuId, load: u32, queued: u8) {
        if let Some(free) = self.all.get_mut(self.count) {
            *free = Load { cpu, load, queued };
            self.count += 1;
        }
    }
}

/// Number of the pass that is due at a time.
pub fn pass_number(now: Nanos, period: Nanos) -> u64 {
    now / period.max(1)
}
