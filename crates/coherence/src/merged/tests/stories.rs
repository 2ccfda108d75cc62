//! Random runs of the same guests on more nodes. Any node manages their pages, which are merged from the
//! start or later.

use model_checker::Model;
use protocol::rng::Rng;

use super::guest::Op;
use super::machine::{Plan, World};
use super::plans::*;
use crate::merged::{Accessed, Entry};

const STORIES: u64 = 4000;
/// More steps than any run takes.
const STEPS_MAX: usize = 20_000;

impl Plan {
    /// Renumbers the pages.
    fn renumbered(mut self, numbers: &[u32]) -> Self {
        let page = |old: u32| numbers[old as usize];
        let value = |old: u64| {
            let entry = Entry(old);
            let is_table = entry.is_present() && entry.frame() < numbers.len() as u64;
            if is_table {
                old & 0xfff | u64::from(numbers[entry.frame() as usize]) << 12
            } else {
                old
            }
        };
        for (at, word) in &mut self.memory {
            *at = (page(at.0), at.1);
            *word = value(*word);
        }
        self.merged.iter_mut().for_each(|(at, _)| *at = page(*at));
        self.proposals.iter_mut().for_each(|at| *at = page(*at));
        self.shared.iter_mut().for_each(|at| *at = page(*at));
        if !self.pinned.is_empty() {
            let root = page(self.pinned.start);
            self.pinned = root..root + 1;
        }
        for cpu in &mut self.cpus {
            cpu.1 = cpu.1.map(page);
        }
        for op in self.programs.iter_mut().chain([&mut self.handler]).flatten() {
            match op {
                Op::Set(at, word) => {
                    *at = (page(at.0), at.1);
                    *word = value(*word);
                }
                Op::Acquire(at) | Op::Add(at) | Op::Take(at) | Op::Await(at, _) | Op::IfIs(at, _, _) => {
                    *at = (page(at.0), at.1);
                }
                Op::Load(root) => *root = page(*root),
                _ => {}
            }
        }
        self
    }
}

/// Returns a random world.
fn by_chance(rng: &mut Rng) -> Plan {
    let mut plan = match rng.below(12) {
        0 => shootdown(),
        1 => switching(),
        2 => cleaning(),
        3 => reuse(0),
        4 => reuse(super::guest::table(OTHER)),
        5 => quiet_reuse(),
        6 => tree(),
        7 => another_life(),
        8 => filling(),
        9 => root_freed(),
        10 => private_roots(),
        _ => widening(),
    };
    plan.nodes = 2 + rng.below(3);
    for cpu in &mut plan.cpus {
        cpu.0 = rng.below(plan.nodes);
    }
    // Some pages join later, or again after they have left.
    let pages: Vec<u32> = plan.merged.iter().map(|(page, _)| *page).collect();
    plan.merged.truncate(rng.below(pages.len() + 1));
    for _ in 0..2 * pages.len() {
        plan.proposals.push(pages[rng.below(pages.len())]);
    }
    if rng.below(2) == 0 {
        plan.accessed = Accessed::Sent;
    }
    let mut numbers: Vec<u32> = (0..plan.pages).collect();
    for at in (1..numbers.len()).rev() {
        numbers.swap(at, rng.below(at + 1));
    }
    // Page 0 is no table.
    let zero = numbers
        .iter()
        .position(|number| *number == 0)
        .expect("one of them");
    numbers.swap(0, zero);
    plan.renumbered(&numbers)
}

fn send_op(seed: u64) -> (u64, u64) {
    let mut rng = Rng::new(seed);
    let plan = by_chance(&mut rng);
    let mut world = World::new(&plan);
    for _ in 0..STEPS_MAX {
        let mut steps = Vec::new();
        plan.actions(&world, &mut steps);
        let next = loop {
            if steps.is_empty() {
                break None;
            }
            let step = steps.swap_remove(rng.below(steps.len()));
            if let Some(next) = plan.next_state(&world, step) {
                break Some(next);
            }
        };
        let Some(next) = next else { break };
        world = next;
        assert_eq!(world.wrong, None, "seed {seed}: {plan:#?}");
    }
    assert!(
        world.is_over(&plan),
        "seed {seed} does not end: {plan:#?}\n{world:#?}"
    );
    let merges = world.nodes.iter().map(|node| node.merger.merges());
    assert_eq!(
        merges.clone().map(|merges| merges.conflicts).sum::<u64>(),
        0,
        "seed {seed}"
    );
    (
        merges.clone().map(|merges| merges.sent).sum(),
        merges.map(|merges| merges.left).sum(),
    )
}

#[test]
fn random_runs_of_guests_are_correct() {
    let (mut sent, mut left) = (0, 0);
    for seed in 0..STORIES {
        let told = send_op(seed);
        sent += told.0;
        left += told.1;
    }
    println!("{sent} words sent, {left} pages left");
    assert!(
        sent > STORIES / 4 && left > STORIES / 4,
        "stories in which nothing happens"
    );
}
