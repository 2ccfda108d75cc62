//! Load tree: the load of each CPU, and the sums of ever larger blocks of CPUs.
//!
//! A leaf is one CPU's load, in vCPUs that are not idle; an inner node is the sum of its two children
//! (Cellular Disco, section 4.2). Each driver recomputes its nodes at each tick as left + right, so that a
//! lost or stale value is repaired by the next tick, one level a tick at worst. Above level three the CPUs
//! that update a node are halved at each level, so that each node has at most eight updaters.
//!
//! Each updater has a copy of its own of the node, which it alone writes. A reader takes the copy of the
//! first updater that is online.

use super::CpuId;
use super::view::View;
use super::word::Mode;

/// Levels of the tree: 1,024 CPUs and their root.
pub const LEVELS: usize = 11;
/// Last level at which all CPUs below a node update it. Section 4.2: "every level above three".
pub const FULL_LEVEL: usize = 3;
/// CPUs of a region, which is balanced by itself: the leaves of a node of [`FULL_LEVEL`].
pub const REGION_CPUS: u16 = 1 << FULL_LEVEL;

/// Whether a CPU updates its node at a level.
pub fn is_updater(cpu: CpuId, level: usize) -> bool {
    let step = 1_u32 << level.saturating_sub(FULL_LEVEL);
    u32::from(cpu.0).is_multiple_of(step)
}

/// Number of levels of a machine of `cpus` CPUs; the last of them is the root.
pub fn levels(cpus: u16) -> usize {
    cpus.max(1).next_power_of_two().trailing_zeros() as usize + 1
}

/// The load of the node at `level` over `cpu`, by the copy of its first updater that is online; 0 if none is.
pub fn load(view: &impl View, cpu: CpuId, level: usize, cpus: u16) -> u32 {
    let first = u32::from(cpu.0) >> level << level;
    let step = 1_usize << level.saturating_sub(FULL_LEVEL);
    let updaters = (first..first + (1 << level)).step_by(step);
    updaters
        .take_while(|updater| *updater < u32::from(cpus))
        .map(|updater| CpuId(updater as u16))
        .find(|updater| view.word(*updater).mode != Mode::Offline)
        .map_or(0, |updater| view.load(updater, level))
}

/// A CPU's copies of its nodes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Branch([u32; LEVELS]);

impl Branch {
    /// The copy at a level.
    pub fn load(&self, level: usize) -> u32 {
        self.0.get(level).copied().unwrap_or(0)
    }

    /// Recomputes the nodes that `cpu` updates, from its own load upwards. Returns the levels that changed,
    /// as bits.
    pub fn update(&mut self, view: &impl View, cpu: CpuId, own: u32, cpus: u16) -> u16 {
        let mut changed = 0;
        let mut below = own;
        for level in 0..levels(cpus).min(LEVELS) {
            if !is_updater(cpu, level) {
                break;
            }
            if level > 0 {
                // The sibling's updater with the same number within its block updates that level as well.
                let sibling = CpuId(cpu.0 ^ 1 << (level - 1));
                let is_online = sibling.0 < cpus && view.word(sibling).mode != Mode::Offline;
                below += if is_online {
                    view.load(sibling, level - 1)
                } else {
                    load(view, sibling, level - 1, cpus)
                };
            }
            if self.0[level] != below {
                self.0[level] = below;
                changed |= 1 << level;
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::entry::VcpuEntry;
    use crate::cpu::view::Terms;
    use crate::cpu::word::Word;
    use crate::cpu::{VcpuId, VmId};

    struct Tree {
        branches: Vec<Branch>,
        offline: Vec<bool>,
    }

    impl View for Tree {
        fn word(&self, cpu: CpuId) -> Word {
            let mode = if self.offline[cpu.index()] {
                Mode::Offline
            } else {
                Mode::Idle
            };
            Word {
                mode,
                ..Word::default()
            }
        }
        fn load(&self, cpu: CpuId, level: usize) -> u32 {
            self.branches[cpu.index()].load(level)
        }
        fn vcpu(&self, _: VcpuId) -> VcpuEntry {
            VcpuEntry::default()
        }
        fn queued(&self, _: CpuId, _: usize) -> Option<VcpuId> {
            None
        }
        fn terms(&self, _: VmId) -> Terms {
            Terms::default()
        }
        fn may_run(&self, _: VcpuId, _: CpuId) -> bool {
            true
        }
        fn depends_on(&self, _: VcpuId, _: u16) -> bool {
            false
        }
    }

    fn tick(tree: &mut Tree, loads: &[u32]) {
        let cpus = loads.len() as u16;
        for cpu in 0..cpus {
            let mut branch = tree.branches[usize::from(cpu)];
            if !tree.offline[usize::from(cpu)] {
                branch.update(tree, CpuId(cpu), loads[usize::from(cpu)], cpus);
            }
            tree.branches[usize::from(cpu)] = branch;
        }
    }

    #[test]
    fn each_node_has_at_most_eight_updaters_and_a_cpu_four_levels_on_average() {
        for level in 0..LEVELS {
            let updaters = (0..1024).filter(|cpu| is_updater(CpuId(*cpu), level)).count();
            assert_eq!(updaters, (1024 >> level) * (1 << level.min(FULL_LEVEL)));
        }
        let updates: usize = (0..1024)
            .map(|cpu| {
                (1..LEVELS)
                    .take_while(|level| is_updater(CpuId(cpu), *level))
                    .count()
            })
            .sum();
        assert!(updates <= 4 * 1024, "{updates}");
    }

    proptest! {
        /// After one tick for each level every copy of the root is the sum of all loads, also with CPUs that
        /// are gone, whose loads count as none.
        #[test]
        fn root_is_the_sum_of_all_loads_after_a_tick_for_each_level(
            loads in proptest::collection::vec((0..9_u32, proptest::bool::weighted(0.2)), 1..70)
        ) {
            let offline: Vec<bool> = loads.iter().map(|load| load.1).collect();
            let loads: Vec<u32> = loads.iter().map(|load| load.0).collect();
            let cpus = loads.len() as u16;
            let mut tree = Tree { branches: vec![Branch::default(); loads.len()], offline };
            for _ in 0..levels(cpus) {
                tick(&mut tree, &loads);
            }
            let sum: u32 = loads.iter().zip(&tree.offline).filter(|one| !one.1).map(|one| one.0).sum();
            let online_updater = (0..cpus).any(|cpu| {
                is_updater(CpuId(cpu), levels(cpus) - 1) && !tree.offline[usize::from(cpu)]
            });
            let blocks_have_one = (0..levels(cpus)).all(|level| (0..cpus).step_by(1 << level).all(|first| {
                let mut block = (first..cpus.min(first.saturating_add(1 << level))).peekable();
                let online = block.clone().any(|cpu| !tree.offline[usize::from(cpu)]);
                !online || block.any(|cpu| is_updater(CpuId(cpu), level) && !tree.offline[usize::from(cpu)])
            }));
            if online_updater && blocks_have_one {
                prop_assert_eq!(load(&tree, CpuId(0), levels(cpus) - 1, cpus), sum);
            }
        }
    }
}
