//! Small guests over nodes, in every order of instructions, walks, collections and messages.

use stateright::{Checker, Model, Property};

use super::guest::{Op, Va, maps, table};
use super::machine::{Broken, Plan, World};
use crate::Right;
use crate::merged::Accessed;

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step {
    /// A CPU's next instruction.
    Go(usize),
    /// A CPU waits for a page.
    Want(usize, u32, bool),
    Interrupted(usize),
    /// Hardware translates by itself.
    Guess(usize, Va),
    Cache(usize, Va, usize),
    /// A node answers who wants a page.
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

const ROOT: u32 = 1;
const LEAF: u32 = 4;
const FLAGS: u32 = 3;
const LOCK: u32 = 2;
const OTHER: u32 = 5;
const FRAME: u64 = 100;
const NEW: u64 = 101;
const VA: Va = &[0, 0];

const ACK: (u32, usize) = (FLAGS, 0);
const GO: (u32, usize) = (LOCK, 0);

/// Two nodes with a CPU each, one address space: root, leaf table, one frame.
fn plan(programs: [Vec<Op>; 2]) -> Plan {
    Plan {
        nodes: 2,
        pages: 6,
        top: 2,
        merged: vec![(ROOT, 2), (LEAF, 1)],
        memory: vec![((ROOT, 0), table(LEAF)), ((LEAF, 0), maps(FRAME))],
        shared: vec![],
        cpus: vec![(0, Some(ROOT)), (1, Some(ROOT))],
        programs: programs.into(),
        handler: vec![Op::Flush, Op::Add(ACK)],
        guesses: vec![VA],
        proposals: vec![],
        accessed: Accessed::Preset,
        broken: Broken::Nothing,
    }
}

fn touch(writes: bool) -> Op {
    Op::Touch {
        va: VA,
        writes,
        fault: 0,
    }
}

/// What is wrong in some order, if anything; checked to the end otherwise.
fn find(plan: &Plan) -> Option<&'static str> {
    let checker = plan.clone().checker().spawn_bfs().join();
    let wrong = ["right", "no conflict", "goes on"]
        .into_iter()
        .find(|name| checker.discovery(name).is_some());
    println!("{} states, {wrong:?}", checker.unique_state_count());
    if wrong.is_none() {
        assert!(checker.discovery("ends").is_some(), "no order ends");
    }
    wrong
}

fn holds(plan: Plan) {
    let checker = plan.clone().checker().spawn_bfs().join();
    for name in ["right", "no conflict", "goes on"] {
        if let Some(path) = checker.discovery(name) {
            let last = path.last_state().clone();
            panic!("{name}: {:?}\n{:#?}\n{last:#?}", last.wrong, path.into_actions());
        }
    }
    println!("{} states", checker.unique_state_count());
    assert!(checker.discovery("ends").is_some(), "no order ends");
}

fn breaks(mut plan: Plan, broken: Broken) {
    plan.broken = broken;
    assert!(find(&plan).is_some(), "{broken:?} goes unnoticed");
}

/// A page is unmapped, all CPUs are told, its frame is used anew.
fn shootdown() -> Plan {
    let unmap = vec![
        Op::Take((LEAF, 0)),
        Op::Interrupt(1),
        Op::Await(ACK, 1),
        Op::Free(FRAME),
    ];
    plan([unmap, vec![touch(false), touch(true)]])
}

#[test]
fn after_a_shootdown_nobody_uses_the_old_translation() {
    holds(shootdown());
    breaks(shootdown(), Broken::Interrupts);
}

/// Who unmaps looks whether the other CPU has the address space; who takes it on says so first. Neither sends a page.
fn switching() -> Plan {
    let mask = (FLAGS, 1);
    let unmap = vec![
        Op::Take((LEAF, 0)),
        Op::IfIs(mask, 1, 2),
        Op::Interrupt(1),
        Op::Await((LOCK, 0), 1),
        Op::Free(FRAME),
    ];
    let switch = vec![Op::Set(mask, 1), Op::Load(ROOT), touch(false)];
    let mut plan = plan([unmap, switch]);
    plan.cpus[1].1 = None;
    plan.shared = vec![FLAGS];
    plan.handler = vec![Op::Flush, Op::Add((LOCK, 0))];
    plan
}

#[test]
fn who_is_not_interrupted_has_heard_by_an_acknowledgement() {
    holds(switching());
    breaks(switching(), Broken::Acknowledgements);
}

/// The dirty bit is cleared where the entry stays writable, as for MADV_FREE; later the page is dropped unless it is dirty.
fn cleaning() -> Plan {
    let clean_and_drop = vec![
        Op::Set((LEAF, 0), maps(FRAME)),
        Op::Interrupt(1),
        Op::Await(ACK, 1),
        Op::Cleaned(FRAME),
        Op::Take((LEAF, 0)),
        Op::Interrupt(1),
        Op::Await(ACK, 2),
        Op::IfClean(1),
        Op::Discard(FRAME),
    ];
    plan([clean_and_drop, vec![touch(true), touch(true)]])
}

#[test]
fn no_write_is_dropped_as_clean() {
    holds(cleaning());
    holds(Plan {
        accessed: Accessed::Sent,
        ..cleaning()
    });
}

fn with_lock(at: (u32, usize)) -> Vec<Op> {
    vec![Op::Acquire(at), Op::Enter, Op::Exit, Op::Set(at, 0)]
}

/// A leaf table is cut off, all CPUs are told, and its page becomes data with a lock.
fn reuse(instead: u64) -> Plan {
    let mut free = vec![
        Op::Set((ROOT, 0), instead),
        Op::Interrupt(1),
        Op::Await(ACK, 1),
        Op::Set(GO, 1),
    ];
    free.extend(with_lock((LEAF, 1)));
    let mut other = vec![touch(false), Op::Await(GO, 1)];
    other.extend(with_lock((LEAF, 1)));
    plan([free, other])
}

#[test]
fn a_freed_table_is_one_page_before_it_is_data() {
    holds(reuse(0));
    holds(reuse(table(OTHER)));
}

/// As before, but the other CPU never had the address space, so nobody interrupts it.
fn quiet_reuse() -> Plan {
    let mut plan = reuse(table(OTHER));
    plan.programs[0].drain(1..3);
    plan.programs[1].remove(0);
    plan.cpus[1].1 = None;
    plan
}

#[test]
fn a_table_freed_without_an_interrupt_has_left_before_the_next_page_goes() {
    holds(quiet_reuse());
    // With two nodes the manager is one of them, and closes the table by itself in time.
    let with_third = Plan {
        nodes: 3,
        ..quiet_reuse()
    };
    holds(with_third.clone());
    breaks(with_third, Broken::Hasty);
}

/// A tree is cut off at its root, and the leaf table below is reused: nobody emptied the table between.
fn tree() -> Plan {
    const DEEP: Va = &[0, 0, 0];
    let mut plan = reuse(0);
    plan.top = 3;
    plan.merged = vec![(ROOT, 3), (OTHER, 2), (LEAF, 1)];
    plan.memory = vec![
        ((ROOT, 0), table(OTHER)),
        ((OTHER, 0), table(LEAF)),
        ((LEAF, 0), maps(FRAME)),
    ];
    plan.guesses = vec![];
    plan.programs[1][0] = Op::Touch {
        va: DEEP,
        writes: false,
        fault: 0,
    };
    plan
}

#[test]
fn what_only_a_freed_table_led_to_leaves_with_it() {
    holds(tree());
}

/// A table of one address space becomes one of another, which the other CPU has loaded; what it mapped before is freed.
fn another_life() -> Plan {
    let move_on = vec![
        Op::Take((LEAF, 0)),
        Op::Free(FRAME),
        Op::Set((OTHER, 0), table(LEAF)),
    ];
    let mut plan = plan([move_on, vec![Op::Set((FLAGS, 1), 1), touch(false)]]);
    plan.merged = vec![(ROOT, 2), (OTHER, 2), (LEAF, 1)];
    plan.cpus[1].1 = Some(OTHER);
    plan
}

#[test]
fn no_walk_finds_a_table_in_its_former_life() {
    holds(another_life());
    breaks(another_life(), Broken::Upwards);
    breaks(another_life(), Broken::Downwards);
}

/// Both CPUs find an entry empty and fill it, under a lock in an ordinary page.
fn filling() -> Plan {
    let fill = |frame| {
        vec![
            Op::Acquire((LOCK, 0)),
            Op::IfIs((LEAF, 1), 0, 2),
            Op::Set((LEAF, 1), maps(frame)),
            Op::Win,
            Op::Set((LOCK, 0), 0),
        ]
    };
    plan([fill(FRAME), fill(NEW)])
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
fn a_table_that_is_freed_while_it_joins_is_one_page_before_it_is_data() {
    let mut plan = reuse(table(OTHER));
    plan.merged = vec![(ROOT, 2)];
    plan.proposals = vec![LEAF];
    plan.guesses = vec![];
    holds(plan);
}

/// An entry is made writable without an interrupt; the other CPU learns of it by ordinary memory, or faults, takes the lock and
/// tries again.
#[test]
fn a_fault_ends_with_the_transfer_of_the_lock() {
    let widen = vec![
        Op::Acquire((LOCK, 0)),
        Op::Set((LEAF, 0), maps(FRAME)),
        Op::Set((FLAGS, 1), 1),
        Op::Set((LOCK, 0), 0),
    ];
    let must = Op::Touch {
        va: VA,
        writes: true,
        fault: usize::MAX,
    };
    let fault = vec![
        touch(true),
        Op::Acquire((LOCK, 0)),
        Op::IfIs((FLAGS, 1), 1, 1),
        must,
        Op::Set((LOCK, 0), 0),
    ];
    let mut widening = plan([widen, fault]);
    widening.memory[1].1 &= !crate::merged::Entry::WRITABLE;
    holds(widening.clone());
    breaks(widening, Broken::Transfers);
}

/// A CPU leaves an address space for another; then its root is freed and becomes data.
fn root_freed() -> Plan {
    let mut free = vec![Op::Await(GO, 1), Op::Set((FLAGS, 1), 1)];
    free.extend(with_lock((OTHER, 1)));
    let mut leave = vec![Op::Load(ROOT), Op::Set(GO, 1), Op::Await((FLAGS, 1), 1)];
    leave.extend(with_lock((OTHER, 1)));
    let mut plan = plan([free, leave]);
    plan.merged = vec![(ROOT, 2), (OTHER, 2)];
    plan.cpus[1].1 = Some(OTHER);
    plan.guesses = vec![];
    plan
}

#[test]
fn a_root_that_no_cpu_has_is_one_page_before_it_is_data() {
    holds(root_freed());
    breaks(root_freed(), Broken::Blind);
}

/// What node 0 did reaches node 2 by node 1.
fn hearsay() -> Plan {
    let first = vec![Op::Take((LEAF, 0)), Op::Free(FRAME), Op::Set(GO, 1)];
    let second = vec![Op::Await(GO, 1), Op::Set((FLAGS, 1), 1)];
    let third = vec![Op::Await((FLAGS, 1), 1), Op::Load(ROOT), touch(false)];
    let mut plan = plan([first, second]);
    plan.programs.push(third);
    plan.nodes = 3;
    plan.cpus = vec![(0, Some(ROOT)), (1, None), (2, None)];
    plan
}

#[test]
fn what_one_node_heard_of_another_it_does_not_tell_too_early() {
    holds(hearsay());
    breaks(hearsay(), Broken::Unordered);
}
