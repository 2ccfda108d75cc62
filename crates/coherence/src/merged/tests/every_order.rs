//! Model checking of small guests on several nodes: every order of instructions, walks, collections and
//! messages.

use model_checker::{Model, Property, check, explore};

use super::guest::{Va, table};
use super::machine::{Broken, Plan, World};
use super::plans::*;
use crate::merged::Accessed;
use crate::{Page, Right};

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step {
    /// A CPU executes its next instruction.
    Go(usize),
    /// A CPU faults on a page.
    Want(usize, u32, bool),
    Interrupted(usize),
    /// The hardware walks speculatively.
    Guess(usize, Va),
    Cache(usize, Va, usize),
    /// A node replies to a request for a page.
    Answer(u32, usize),
    Work(usize),
    Apply(usize),
    Deliver(usize),
    Propose(u32),
}

impl Model for Plan {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        if world.wrong.is_some() {
            return;
        }
        for cpu in 0..world.cpus.len() {
            let one = &world.cpus[cpu];
            if one.is_interrupted && one.handler.is_none() && !one.is_out {
                steps.push(Step::Interrupted(cpu));
            }
            if let Some(op) = world.next_op(self, cpu) {
                match world.lacks(cpu, op) {
                    None => steps.push(Step::Go(cpu)),
                    Some((page, right)) => steps.push(Step::Want(cpu, page, right == Right::Write)),
                }
            }
            if !one.is_out && one.cr3.is_some() {
                for va in &self.guesses {
                    steps.push(Step::Guess(cpu, va));
                    for depth in 0..va.len() - 1 {
                        steps.push(Step::Cache(cpu, va, depth));
                    }
                }
            }
        }
        for request in &world.requests {
            let free =
                |node: &&usize| world.nodes[**node].task.is_none() && world.nodes[**node].applying.is_none();
            steps.extend(
                request
                    .unasked
                    .iter()
                    .filter(free)
                    .map(|node| Step::Answer(request.page, *node)),
            );
        }
        for (at, node) in world.nodes.iter().enumerate() {
            if world.may_go_on(self, at) && node.applying.is_none() {
                steps.push(Step::Work(at));
            }
            if node.applying.is_some() {
                steps.push(Step::Apply(at));
            }
        }
        for at in 0..world.packets.len() {
            if world.is_ready(self, &world.packets[at]) {
                steps.push(Step::Deliver(at));
            }
        }
        if let Some(page) = self.proposals.get(world.proposed) {
            steps.push(Step::Propose(*page));
        }
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut next = world.clone();
        let is_new = match step {
            Step::Go(cpu) => {
                let op = world.next_op(self, cpu)?;
                next.execute(self, cpu, op)
            }
            Step::Want(cpu, page, writes) => {
                let is_asked =
                    world.requests.iter().any(|one| one.page == page) || world.held.contains(&page);
                if !is_asked {
                    let right = if writes { Right::Write } else { Right::Read };
                    next.request(world.cpus[cpu].node, page, right, false);
                }
                !is_asked
            }
            Step::Interrupted(cpu) => {
                next.cpus[cpu].is_interrupted = false;
                next.cpus[cpu].handler = Some(0);
                true
            }
            Step::Guess(cpu, va) => next.fill(cpu, va, false),
            Step::Cache(cpu, va, depth) => next.cache_walk(cpu, va, depth),
            Step::Answer(page, node) => {
                next.answer(self, page, node);
                true
            }
            Step::Work(node) => {
                next.go_on(self, node);
                true
            }
            Step::Apply(node) => {
                next.apply(node);
                true
            }
            Step::Deliver(at) => {
                next.deliver(at);
                true
            }
            Step::Propose(page) => {
                next.proposed += 1;
                next.propose(page);
                true
            }
        };
        is_new.then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("right", |_, world: &World| world.wrong.is_none()),
            Property::always("no conflict", |_, world: &World| {
                world.nodes.iter().all(|node| node.merger.merges().conflicts == 0)
            }),
            Property::always("stays", |plan: &Plan, world: &World| {
                let is_merged = |page| world.nodes.iter().all(|node| node.merger.is_merged(Page(page)));
                plan.stay.iter().all(|page| is_merged(*page))
            }),
            Property::always("goes on", |plan: &Plan, world: &World| {
                world.wrong.is_some() || world.is_over(plan) || {
                    let mut steps = Vec::new();
                    plan.actions(world, &mut steps);
                    steps
                        .into_iter()
                        .any(|step| plan.next_state(world, step).is_some())
                }
            }),
            Property::sometimes("ends", |plan: &Plan, world: &World| world.is_over(plan)),
        ]
    }
}

/// Returns the property that the plan violates in some order, if there is one.
fn find(plan: Plan) -> Option<&'static str> {
    let outcome = explore(plan);
    let violated = outcome.violation.map(|violation| violation.property);
    println!("{} states, {violated:?}", outcome.states);
    violated
}

/// Checks the plan in all orders. The smallest has 336 states.
fn holds(plan: Plan) {
    check(plan, 300);
}

fn breaks(mut plan: Plan, broken: Broken) {
    plan.broken = broken;
    assert!(find(plan).is_some(), "{broken:?} goes unnoticed");
}

#[test]
fn no_cpu_uses_the_old_translation_after_a_shootdown() {
    holds(shootdown());
    breaks(shootdown(), Broken::Interrupts);
}

#[test]
fn uninterrupted_cpu_learns_of_a_change_by_an_acknowledgement() {
    holds(switching());
    breaks(switching(), Broken::Acknowledgements);
}

#[test]
fn no_write_to_a_frame_is_dropped_as_clean() {
    holds(cleaning());
    holds(Plan {
        accessed: Accessed::Sent,
        ..cleaning()
    });
}

#[test]
fn freed_table_leaves_before_it_becomes_data() {
    holds(reuse(0));
    holds(reuse(table(OTHER)));
}

#[test]
fn table_freed_without_an_interrupt_leaves_before_the_next_page_transfer() {
    holds(quiet_reuse());
    // With two nodes the manager is one of them, and closes the table in time.
    let with_third = Plan {
        nodes: 3,
        ..quiet_reuse()
    };
    holds(with_third.clone());
    breaks(with_third, Broken::Hasty);
}

#[test]
fn tables_below_a_freed_table_leave_with_it() {
    holds(tree());
}

#[test]
fn no_walk_reads_a_table_with_its_former_contents() {
    holds(another_life());
    breaks(another_life(), Broken::Upwards);
    breaks(another_life(), Broken::Downwards);
}

#[test]
fn no_update_under_a_lock_is_lost() {
    holds(filling());
    breaks(filling(), Broken::Transfers);
    breaks(filling(), Broken::Early);
}

#[test]
fn no_update_is_lost_while_a_table_joins() {
    let mut plan = filling();
    plan.merged = vec![(ROOT, 2)];
    plan.proposals = vec![LEAF];
    holds(plan.clone());
    breaks(plan, Broken::Open);
}

#[test]
fn table_freed_while_joining_leaves_before_it_becomes_data() {
    let mut plan = reuse(table(OTHER));
    plan.merged = vec![(ROOT, 2)];
    plan.proposals = vec![LEAF];
    plan.guesses = vec![];
    holds(plan);
}

#[test]
fn spurious_fault_ends_with_the_transfer_of_the_lock() {
    holds(widening());
    breaks(widening(), Broken::Transfers);
}

#[test]
fn unloaded_root_leaves_before_it_becomes_data() {
    holds(root_freed());
    breaks(root_freed(), Broken::Blind);
}

#[test]
fn kernel_tables_stay_merged_while_all_cpus_have_other_roots() {
    holds(private_roots());
    breaks(private_roots(), Broken::Interrupts);
    let none_stands = Plan {
        pinned: 0..0,
        ..private_roots()
    };
    assert_eq!(find(none_stands), Some("stays"));
}

#[test]
fn pinned_root_that_becomes_data_is_detected_as_a_guest_error() {
    let plan = Plan {
        pinned: OTHER..OTHER + 1,
        ..root_freed()
    };
    assert_eq!(find(plan), Some("right"));
}

#[test]
fn causality_holds_over_a_third_node() {
    holds(hearsay());
    breaks(hearsay(), Broken::Unordered);
}
