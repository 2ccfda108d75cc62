//! Programs of the guests in these worlds.

use super::guest::{Op, Va, maps, table};
use super::machine::{Broken, Plan};
use crate::merged::{Accessed, Entry};

pub const ROOT: u32 = 1;
pub const LEAF: u32 = 4;
const FLAGS: u32 = 3;
const LOCK: u32 = 2;
pub const OTHER: u32 = 5;
const FRAME: u64 = 100;
const NEW: u64 = 101;
const VA: Va = &[0, 0];

const ACK: (u32, usize) = (FLAGS, 0);
const GO: (u32, usize) = (LOCK, 0);

/// Two nodes with a CPU each, one address space: root, leaf table, one frame.
pub fn plan(programs: [Vec<Op>; 2]) -> Plan {
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
        pinned: 0..0,
        stay: vec![],
        broken: Broken::Nothing,
    }
}

pub fn touch(writes: bool) -> Op {
    Op::Touch {
        va: VA,
        writes,
        fault: 0,
    }
}

/// A page is unmapped, all CPUs are interrupted, and its frame is reused.
pub fn shootdown() -> Plan {
    let unmap = vec![
        Op::Take((LEAF, 0)),
        Op::Interrupt(1),
        Op::Await(ACK, 1),
        Op::Free(FRAME),
    ];
    plan([unmap, vec![touch(false), touch(true)]])
}

/// A CPU unmaps after it checks whether the other one has the address space; that one announces it before it
/// loads it. Neither sends a page.
pub fn switching() -> Plan {
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

/// The dirty bit is cleared while the entry stays writable, as for MADV_FREE; later the page is dropped
/// unless it is dirty.
pub fn cleaning() -> Plan {
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

/// A leaf table is cut off, all CPUs are interrupted, and its page becomes data with a lock.
pub fn reuse(instead: u64) -> Plan {
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

/// As before, but the other CPU never had the address space, so it is not interrupted.
pub fn quiet_reuse() -> Plan {
    let mut plan = reuse(table(OTHER));
    plan.programs[0].drain(1..3);
    plan.programs[1].remove(0);
    plan.cpus[1].1 = None;
    plan
}

/// A tree is cut off at its root, and the leaf table below is reused without having been emptied.
pub fn tree() -> Plan {
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

/// A table of one address space becomes one of another, which the other CPU has loaded; the page that it
/// mapped before is freed.
pub fn another_life() -> Plan {
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

/// Both CPUs find an entry empty and fill it, under a lock in an ordinary page.
pub fn filling() -> Plan {
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

/// A CPU leaves an address space for another; then its root is freed and becomes data.
pub fn root_freed() -> Plan {
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

/// A page of the kernel is unmapped while each CPU has a root private to its node. No CPU has the kernel's
/// own root; the kernel's tables stay merged below it.
pub fn private_roots() -> Plan {
    const OWN: u32 = 6;
    let mut plan = shootdown();
    plan.pages = 7;
    plan.pinned = ROOT..ROOT + 1;
    plan.stay = vec![ROOT, LEAF];
    plan.memory.push(((OWN, 0), table(LEAF)));
    plan.memory.push(((OTHER, 0), table(LEAF)));
    plan.programs[0].insert(0, Op::Load(OWN));
    plan.programs[1].insert(0, Op::Load(OTHER));
    plan
}

/// An event of node 0 reaches node 2 by node 1.
pub fn hearsay() -> Plan {
    let first = vec![Op::Take((LEAF, 0)), Op::Free(FRAME), Op::Set(GO, 1)];
    let second = vec![Op::Await(GO, 1), Op::Set((FLAGS, 1), 1)];
    let third = vec![Op::Await((FLAGS, 1), 1), Op::Load(ROOT), touch(false)];
    let mut plan = plan([first, second]);
    plan.programs.push(third);
    plan.nodes = 3;
    plan.cpus = vec![(0, Some(ROOT)), (1, None), (2, None)];
    plan
}

pub fn with_lock(at: (u32, usize)) -> Vec<Op> {
    vec![Op::Acquire(at), Op::Enter, Op::Exit, Op::Set(at, 0)]
}

/// An entry is made writable without an interrupt. The other CPU learns of it by ordinary memory, or faults,
/// takes the lock and tries again.
pub fn widening() -> Plan {
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
    let mut plan = plan([widen, fault]);
    plan.memory[1].1 &= !Entry::WRITABLE;
    plan
}
