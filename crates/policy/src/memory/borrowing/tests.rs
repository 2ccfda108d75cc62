//! Each threshold at its value and one byte beside it, and properties of all inputs.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Chunk 4, low water 16, floor 32, high water 32.
const LIMITS: Limits = Limits::of_chunk(4);

fn own(free_bytes: u64) -> OwnMemory {
    OwnMemory {
        free_bytes,
        is_cordoned: false,
    }
}

fn home(cell: u16, free_bytes: u64, available_bytes: u64) -> Home {
    Home {
        cell,
        free_bytes,
        available_bytes,
        returnable_bytes: available_bytes,
        lends: true,
    }
}

fn borrow(from: u16, bytes: u64) -> Step {
    Step::Borrow { from, bytes }
}

#[test]
fn limits_are_in_the_papers_ratios_and_reproduce_its_amounts() {
    // 732 KB for each CPU in 10 ms, 8 CPUs.
    let paper = Limits::measured(732 * 1024 * 100, 8, 1 << 30);
    assert_eq!(paper.chunk_bytes, 4 << 20);
    assert_eq!((paper.low_water_bytes, paper.floor_bytes), (16 << 20, 32 << 20));
    let fast = Limits::measured(2 << 30, 8, 1 << 36);
    // 20.48 MiB for each CPU in a period, 8 CPUs, 0.7.
    assert_eq!(fast.chunk_bytes, 114 << 20);
    let small = Limits::measured(2 << 30, 8, 1 << 30);
    assert_eq!((small.chunk_bytes, small.floor_bytes), (16 << 20, 128 << 20));
    assert_eq!(Limits::measured(0, 0, 0).chunk_bytes, CHUNK_MIN_BYTES);
    Limits::measured(u64::MAX, usize::MAX, u64::MAX);
}

#[test]
fn cell_borrows_below_the_low_water_from_each_home_that_has_less_than_a_chunk_available() {
    let homes = [home(1, 100, 3), home(2, 100, 4), home(3, 100, 0)];
    let steps = |free| pass(own(free), &[3, 2, 1], &homes, &[], LIMITS);
    assert_eq!(steps(15), [borrow(3, 4), borrow(1, 4)]);
    assert_eq!(steps(16), []);
    // Ten chunks of home 2 don't replace one of home 1.
    let homes = [home(1, 100, 3), home(2, 100, 40)];
    let steps = pass(own(0), &[1, 2], &homes, &[], LIMITS);
    assert_eq!(steps[0], borrow(1, 4));
}

#[test]
fn lender_keeps_its_floor_and_is_not_asked_below_it() {
    assert!(agrees(36, 4, false, LIMITS) && !agrees(35, 4, false, LIMITS));
    assert!(!agrees(99, 4, true, LIMITS), "it is cordoned");
    let steps = |free| pass(own(0), &[1], &[home(1, free, 0)], &[], LIMITS);
    assert_eq!(steps(36), [borrow(1, 4)]);
    assert_eq!(steps(35), []);
}

#[test]
fn cordoned_cell_borrows_nothing_in_advance_and_asks_no_lender_that_refused() {
    let cordoned = OwnMemory {
        free_bytes: 0,
        is_cordoned: true,
    };
    assert_eq!(pass(cordoned, &[1], &[home(1, 99, 0)], &[], LIMITS), []);
    let refused = Home {
        lends: false,
        ..home(1, 99, 0)
    };
    assert_eq!(pass(own(0), &[1], &[refused], &[], LIMITS), []);
    assert_eq!(pass(own(0), &[], &[home(1, 99, 0)], &[], LIMITS), []);
}

#[test]
fn lender_that_runs_short_recalls_before_it_borrows() {
    let holders = [
        Holder {
            cell: 1,
            unused_bytes: 2,
        },
        Holder {
            cell: 2,
            unused_bytes: 9,
        },
    ];
    let recall = |from, bytes| Step::Recall { from, bytes };
    let steps = |free| pass(own(free), &[3], &[home(3, 99, 0)], &holders, LIMITS);
    assert_eq!(steps(16), []);
    assert_eq!(steps(10), [recall(2, 6)]);
    assert_eq!(steps(5), [recall(2, 9), recall(1, 2)]);
    assert_eq!(steps(4), [recall(2, 9), recall(1, 2), borrow(3, 4)]);
}

#[test]
fn unused_loans_are_returned_with_hysteresis_and_loans_by_command_are_not() {
    let returned = |to, bytes| Step::Return { to, bytes };
    let steps = |free, available| pass(own(free), &[], &[home(1, 0, available)], &[], LIMITS);
    assert_eq!(steps(32, 7), [returned(1, 7)]);
    assert_eq!(steps(31, 8), []);
    assert_eq!(steps(31, 9), [returned(1, 5)]);
    let by_command = Home {
        returnable_bytes: 0,
        ..home(1, 0, 50)
    };
    assert_eq!(pass(own(99), &[], &[by_command], &[], LIMITS), []);
    let in_part = Home {
        returnable_bytes: 3,
        ..home(1, 0, 50)
    };
    assert_eq!(pass(own(99), &[], &[in_part], &[], LIMITS), [returned(1, 3)]);
}

#[test]
fn homes_are_preferred_that_supply_vms_then_that_most_vms_allow_then_by_the_lists() {
    let vm = |cells: &[u16], suppliers: &[u16]| VmPreference {
        cells: cells.to_vec(),
        suppliers: suppliers.to_vec(),
    };
    assert_eq!(combined(&[], &[2, 1]), [1, 2]);
    assert_eq!(combined(&[vm(&[0, 3, 2], &[])], &[1, 2, 3]), [3, 2]);
    let vms = [vm(&[0, 3, 2], &[]), vm(&[], &[1]), vm(&[0, 2], &[])];
    assert_eq!(combined(&vms, &[1, 2, 3, 4]), [1, 2, 3, 4]);
    assert_eq!(combined(&[vm(&[0], &[])], &[1, 2]), []);
}

#[test]
fn vm_that_does_not_fit_recalls_first_then_borrows_from_few() {
    let holder = Holder {
        cell: 5,
        unused_bytes: 3,
    };
    let homes = [home(2, 50, 0), home(1, 40, 0)];
    let steps = |short| for_admission(short, &homes, &[holder], LIMITS);
    let recall = Step::Recall { from: 5, bytes: 3 };
    assert_eq!(steps(3), Some(vec![recall]));
    assert_eq!(steps(10), Some(vec![recall, borrow(2, 7)]));
    assert_eq!(steps(29), Some(vec![recall, borrow(2, 18), borrow(1, 8)]));
    assert_eq!(steps(30), None);
    assert_eq!(for_admission(0, &homes, &[], LIMITS), None);
}

#[test]
fn large_vm_spills_and_small_one_stays_local() {
    assert!(!is_large(100, 100, 0) && is_large(51, 100, 1) && !is_large(50, 100, 1));
    let lenders = [(1, 10), (2, 10)];
    let divided = |bytes, large| divide(bytes, (0, 30), &lenders, large, 16);
    assert_eq!(divided(20, false), Some(vec![(0, 20)]));
    assert_eq!(divided(20, true), Some(vec![(0, 14), (1, 6)]));
    assert_eq!(divided(14, true), Some(vec![(0, 14)]));
    assert_eq!(divided(35, true), Some(vec![(0, 15), (1, 10), (2, 10)]));
    assert_eq!(divided(35, false), Some(vec![(0, 30), (1, 5)]));
    assert_eq!(divided(51, true), None);
}

#[test]
fn lenders_of_a_vm_are_in_the_order_of_its_list_or_by_free_memory() {
    let lenders = vec![(1, 5), (2, 9), (3, 5)];
    assert_eq!(in_order(&[], lenders.clone()), [(2, 9), (1, 5), (3, 5)]);
    assert_eq!(in_order(&[0, 3, 2], lenders), [(3, 5), (2, 9)]);
}

/// Cells that carry out one another's steps at once.
#[derive(Clone, Debug)]
struct Cells {
    memory: Vec<u64>,
    used: Vec<u64>,
    /// By home and holder.
    lent: BTreeMap<(usize, usize), u64>,
    /// The part of each loan that VMs of the holder use.
    in_use: BTreeMap<(usize, usize), u64>,
}

impl Cells {
    fn free(&self, cell: usize) -> u64 {
        let lent: u64 = self
            .lent
            .iter()
            .filter(|((home, _), _)| *home == cell)
            .map(|(_, bytes)| bytes)
            .sum();
        self.memory[cell] - self.used[cell] - lent
    }

    fn unused(&self, home: usize, holder: usize) -> u64 {
        let of = |amounts: &BTreeMap<_, u64>| amounts.get(&(home, holder)).copied().unwrap_or(0);
        of(&self.lent) - of(&self.in_use)
    }

    fn steps(&self, cell: usize) -> Vec<Step> {
        let others = || (0..self.memory.len()).filter(move |other| *other != cell);
        let homes: Vec<Home> = others()
            .map(|other| home(other as u16, self.free(other), self.unused(other, cell)))
            .collect();
        let holders: Vec<Holder> = others()
            .map(|other| Holder {
                cell: other as u16,
                unused_bytes: self.unused(cell, other),
            })
            .collect();
        let preferred: Vec<u16> = others().map(|other| other as u16).collect();
        pass(own(self.free(cell)), &preferred, &homes, &holders, LIMITS)
    }

    /// Carries a step out, as its receiver decides. Returns whether it changed anything.
    fn carry_out(&mut self, cell: usize, step: Step) -> bool {
        match step {
            Step::Borrow { from, bytes } => {
                let from = usize::from(from);
                let agreed = agrees(self.free(from), bytes, false, LIMITS);
                if agreed {
                    *self.lent.entry((from, cell)).or_default() += bytes;
                    assert!(self.free(from) >= LIMITS.floor_bytes, "below its floor");
                }
                agreed
            }
            Step::Return { to: home, bytes } => self.give_back(usize::from(home), cell, bytes),
            Step::Recall { from: holder, bytes } => self.give_back(cell, usize::from(holder), bytes),
        }
    }

    fn give_back(&mut self, home: usize, holder: usize, bytes: u64) -> bool {
        let bytes = bytes.min(self.unused(home, holder));
        *self.lent.entry((home, holder)).or_default() -= bytes;
        bytes > 0
    }
}

proptest! {
    /// The passes of cells with any memory, loans and use end within a few rounds. At the end no cell sends a
    /// request that another one grants.
    #[test]
    fn passes_end_and_keep_every_lender_above_its_floor(
        cells in prop::collection::vec((1..200_u64, 0..=100_u64), 2..5),
        loans in prop::collection::vec((0..5_usize, 0..5_usize, 0..60_u64, 0..=100_u64), 0..6),
    ) {
        let mut world = Cells {
            memory: cells.iter().map(|(memory, _)| *memory).collect(),
            used: cells.iter().map(|(memory, percent)| memory * percent / 100).collect(),
            lent: BTreeMap::new(),
            in_use: BTreeMap::new(),
        };
        for (home, holder, bytes, percent) in loans {
            let (home, holder) = (home % cells.len(), holder % cells.len());
            let bytes = bytes.min(world.free(home));
            if home != holder && !world.lent.contains_key(&(home, holder)) {
                world.lent.insert((home, holder), bytes);
                world.in_use.insert((home, holder), bytes * percent / 100);
            }
        }
        let mut rounds = 0;
        loop {
            let mut changed = false;
            for cell in 0..cells.len() {
                for step in world.steps(cell) {
                    changed |= world.carry_out(cell, step);
                }
            }
            if !changed {
                break;
            }
            rounds += 1;
            prop_assert!(rounds < 20, "no end: {:?}", world);
        }
    }

    /// A VM's parts sum to its memory, and no part is more than its home has.
    #[test]
    fn division_takes_of_no_home_more_than_it_has(
        bytes in 1..100_u64, own in 0..60_u64, lenders in prop::collection::vec(0..40_u64, 0..4),
        large in any::<bool>(), low in 0..40_u64,
    ) {
        let lenders: Vec<(u16, u64)> = (1..).zip(lenders).collect();
        let free: u64 = own + lenders.iter().map(|(_, free)| free).sum::<u64>();
        let Some(parts) = divide(bytes, (0, own), &lenders, large, low) else {
            prop_assert!(free < bytes);
            return Ok(());
        };
        prop_assert_eq!(parts.iter().map(|(_, part)| part).sum::<u64>(), bytes);
        for (home, part) in parts {
            let had = if home == 0 { own } else { lenders[usize::from(home) - 1].1 };
            prop_assert!(part <= had);
        }
    }
}
