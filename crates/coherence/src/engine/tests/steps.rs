//! Messages and pages that each kind of fault costs: the least possible.

use super::world::{Op, World};
use crate::Want::{self, Discard, Read, Write};
use crate::{Counters, Layout, ManagedRange, NodeId, Page, Right};

const PAGE: Page = Page(0);

/// Four nodes and one page, which node 0 manages.
fn world() -> World {
    let manager = NodeId(0);
    let layout = Layout {
        ranges: vec![ManagedRange { first: PAGE, manager }],
        ..Layout::even(manager, 4, 1)
    };
    World::new(&layout, &[1; 4])
}

/// Runs one operation of a node; messages arrive at once, and a granted page is used.
fn run(world: &mut World, (node, want): (u16, Want)) {
    let is_done = |world: &World| world.environment.processors[usize::from(node)][0].done > 0;
    while !is_done(world) {
        world.go(node, 0, Op { want, page: PAGE }, 1);
        while let Some(packet) = world.environment.outbox.pop() {
            world.deliver(packet).expect("honest");
        }
    }
    world.environment.processors[usize::from(node)][0].done = 0;
    for node in 0..4 {
        world.used(node, PAGE);
    }
    assert_eq!(world.wrong(PAGE, std::iter::empty()), None);
}

fn total(world: &World, of: fn(&Counters) -> u64) -> u64 {
    world.engines.iter().map(|engine| of(engine.counters())).sum()
}

/// Operations before, operation, messages, pages.
type Row = (&'static str, &'static [(u16, Want)], (u16, Want), u64, u64);

/// A request goes to the manager and on to the owner, which replies: two messages if one of them is the
/// manager, else three. An owner sends no request. To invalidate a copy costs two. A page without a valid
/// copy is sent with its bytes, except for a discard.
const COSTS: [Row; 25] = [
    ("its manager, a page that no node wrote", &[], (0, Write), 0, 0),
    ("read, nobody wrote it", &[], (1, Read), 2, 0),
    ("write, nobody wrote it", &[], (1, Write), 2, 0),
    ("read of the manager's", &[(0, Write)], (1, Read), 2, 1),
    ("read of a third node's", &[(1, Write)], (2, Read), 3, 1),
    ("read by the manager", &[(1, Write)], (0, Read), 2, 1),
    (
        "read of a third node's by another",
        &[(1, Write), (2, Read)],
        (3, Read),
        3,
        1,
    ),
    (
        "read after the manager's read",
        &[(1, Write), (0, Read)],
        (2, Read),
        2,
        1,
    ),
    ("write of the manager's", &[(0, Write)], (1, Write), 2, 1),
    ("write of a third node's", &[(1, Write)], (2, Write), 3, 1),
    ("write by the manager", &[(1, Write)], (0, Write), 2, 1),
    (
        "upgrade, the manager's",
        &[(0, Write), (1, Read)],
        (1, Write),
        2,
        0,
    ),
    (
        "upgrade, a third node's",
        &[(1, Write), (2, Read)],
        (2, Write),
        3,
        0,
    ),
    (
        "upgrade, one other copy",
        &[(0, Write), (1, Read), (2, Read)],
        (1, Write),
        4,
        0,
    ),
    (
        "upgrade by the owner, two copies",
        &[(0, Write), (1, Read), (2, Read)],
        (0, Write),
        4,
        0,
    ),
    (
        "upgrade by the manager after its read",
        &[(1, Write), (0, Read)],
        (0, Write),
        2,
        0,
    ),
    (
        "write, two copies",
        &[(0, Write), (1, Read), (2, Read)],
        (3, Write),
        6,
        1,
    ),
    ("discard of a page that no node wrote", &[], (0, Discard), 0, 0),
    ("discard, the manager's", &[(0, Write)], (0, Discard), 0, 0),
    ("discard, another node's", &[(1, Write)], (0, Discard), 2, 0),
    (
        "discard, the manager's, two copies",
        &[(0, Write), (1, Read), (2, Read)],
        (0, Discard),
        4,
        0,
    ),
    (
        "discard, another node's, two copies",
        &[(1, Write), (2, Read), (3, Read)],
        (0, Discard),
        6,
        0,
    ),
    (
        "the manager's first use after a discard",
        &[(1, Write), (0, Discard)],
        (0, Write),
        0,
        0,
    ),
    (
        "read after a discard",
        &[(1, Write), (0, Discard)],
        (2, Read),
        2,
        0,
    ),
    (
        "write after a discard",
        &[(1, Write), (0, Discard)],
        (1, Write),
        2,
        0,
    ),
];

#[test]
fn each_kind_of_fault_costs_the_least_messages_and_pages() {
    for (name, before, fault, messages, pages) in COSTS {
        let mut world = world();
        for step in before {
            run(&mut world, *step);
        }
        let sent = |world: &World| {
            let messages = total(world, |counters| counters.messages_sent);
            (messages, total(world, |counters| counters.pages_sent))
        };
        let (messages_before, pages_before) = sent(&world);
        run(&mut world, fault);
        let (messages_after, pages_after) = sent(&world);
        let cost = (messages_after - messages_before, pages_after - pages_before);
        assert_eq!(cost, (messages, pages), "{name}");
    }
}

/// Prefetches from a node; messages arrive at once. Returns whether it sent a request, and the cost.
fn prefetch(world: &mut World, node: u16) -> (bool, u64, u64) {
    let before = total(world, |counters| counters.messages_sent);
    let pages_before = total(world, |counters| counters.pages_sent);
    let asked = world.prefetch(node, PAGE);
    while let Some(packet) = world.environment.outbox.pop() {
        world.deliver(packet).expect("honest");
    }
    let messages = total(world, |counters| counters.messages_sent) - before;
    let pages = total(world, |counters| counters.pages_sent) - pages_before;
    (asked, messages, pages)
}

/// Operations before, prefetching node, whether it sends a request, messages, pages.
type PrefetchRow = (&'static str, &'static [(u16, Want)], u16, bool, u64, u64);

/// A copy if that delays no other node now, otherwise a message of 16 bytes.
const PREFETCHES: [PrefetchRow; 8] = [
    ("of the manager's", &[(0, Write)], 1, true, 2, 1),
    ("of a third node's", &[(1, Write)], 2, true, 3, 1),
    ("by the manager", &[(1, Write)], 0, true, 2, 1),
    ("nobody wrote it", &[], 1, true, 2, 0),
    ("its owner", &[(1, Write)], 1, false, 0, 0),
    ("its manager, nobody wrote it", &[], 0, false, 0, 0),
    ("it has a copy", &[(0, Write), (1, Read)], 1, false, 0, 0),
    ("others have copies", &[(0, Write), (1, Read)], 2, true, 2, 1),
];

#[test]
fn prefetch_yields_a_copy_without_a_fault_or_costs_one_nack() {
    for (name, before, node, asks, messages, pages) in PREFETCHES {
        let mut world = world();
        for step in before {
            run(&mut world, *step);
        }
        let faults = total(&world, |counters| counters.read_faults);
        let got = prefetch(&mut world, node);
        assert_eq!(got, (asks, messages, pages), "{name}");
        assert_eq!(world.wrong(PAGE, std::iter::empty()), None, "{name}");
        assert_eq!(world.wrong_at_rest(PAGE), None, "{name}");
        let engine = &world.engines[usize::from(node)];
        assert!(!engine.is_held(PAGE), "{name}: nobody waited");
        assert_eq!(engine.counters().prefetched, pages, "{name}");
        // A later read has the copy, or sends a request as without a prefetch.
        run(&mut world, (node, Read));
        let has_it = pages > 0 || before.iter().any(|step| step.0 == node);
        let faulted = total(&world, |counters| counters.read_faults) - faults;
        assert_eq!(faulted, u64::from(!has_it), "{name}");
    }
}

#[test]
fn prefetch_of_a_manager_does_not_transfer_the_ownership() {
    let mut world = world();
    run(&mut world, (1, Write));
    assert_eq!(prefetch(&mut world, 0), (true, 2, 1));
    let before = total(&world, |counters| counters.messages_sent);
    run(&mut world, (1, Write));
    assert_eq!(total(&world, |counters| counters.messages_sent) - before, 2);
    assert_eq!(world.engines[0].right(PAGE), Right::None);
}

/// A discarded page is zero, so no copy is prefetched; a prefetched copy of the manager is discarded like any
/// other.
#[test]
fn discard_invalidates_prefetched_copies_and_leaves_none() {
    let mut world = world();
    run(&mut world, (1, Write));
    for node in [0, 2] {
        assert_eq!(prefetch(&mut world, node).2, 1, "node {node}");
    }
    assert_eq!(world.engines[0].right(PAGE), Right::Read);
    let messages = |world: &World| total(world, |counters| counters.messages_sent);
    let before = messages(&world);
    run(&mut world, (0, Discard));
    assert_eq!(
        messages(&world) - before,
        4,
        "to the owner and the copy, and back"
    );
    assert!(world.engines[1..].iter().all(|engine| engine.is_absent(PAGE)));
    assert!(world.engines[0].is_alone(PAGE));
    assert_eq!(prefetch(&mut world, 2), (true, 2, 0), "it is declined");
    assert_eq!(prefetch(&mut world, 0), (false, 0, 0), "it owns the page");
    assert_eq!(world.wrong_at_rest(PAGE), None);
    assert!(world.engines[0].claim(PAGE), "as at the start");
}

/// A pending prefetch of the manager itself is answered before a discard begins.
#[test]
fn page_with_a_pending_prefetch_is_not_discarded() {
    let mut world = world();
    run(&mut world, (1, Write));
    assert!(world.prefetch(0, PAGE));
    let discard = Op {
        want: Discard,
        page: PAGE,
    };
    world.go(0, 0, discard, 0);
    assert!(!world.engines[0].is_absent(PAGE), "its bytes may be on their way");
    assert_eq!(world.environment.outbox.len(), 1, "the request, and no other");
    while let Some(packet) = world.environment.outbox.pop() {
        world.deliver(packet).expect("honest");
    }
    run(&mut world, (0, Discard));
    assert_eq!(world.engines[0].counters().discarded, 1);
    assert_eq!(world.wrong_at_rest(PAGE), None);
}

/// A migratory page is not copied to a node that prefetches it.
#[test]
fn prefetch_of_a_migratory_or_held_page_gets_a_nack() {
    let mut world = world();
    for engine in &mut world.engines {
        engine.layout.migratory = true;
    }
    for node in [1, 2] {
        run(&mut world, (node, Read));
        run(&mut world, (node, Write));
    }
    assert_eq!(prefetch(&mut world, 3), (true, 2, 0));
    assert_eq!(world.engines[0].counters().nacked, 1, "by the manager");
    assert!(!prefetch(&mut world, 0).0, "which does not even ask itself");
    run(&mut world, (3, Read));
    assert_eq!(world.engines[3].right(PAGE), Right::Write, "it still migrates");
    // A held page is not sent to another node, whether a thread waits for it or not.
    let page = PAGE;
    world.go(0, 0, Op { want: Write, page }, 9);
    while let Some(packet) = world.environment.outbox.pop() {
        world.deliver(packet).expect("honest");
    }
    assert!(world.engines[0].is_held(PAGE));
    for engine in &mut world.engines {
        engine.layout.migratory = false;
    }
    assert_eq!(prefetch(&mut world, 1), (true, 2, 0));
    world.used(0, PAGE);
    assert_eq!(prefetch(&mut world, 1), (true, 2, 1));
}

/// A claimed page is as after a write fault whose page was used.
#[test]
fn claim_has_the_effect_of_a_first_write_without_a_fault() {
    let mut written = world();
    run(&mut written, (0, Write));
    let mut claimed = world();
    assert!(!claimed.engines[1].claim(PAGE), "only its manager can");
    assert!(claimed.engines[0].claim(PAGE));
    assert_eq!(claimed.engines[0].states, written.engines[0].states);
    assert!(!claimed.engines[0].claim(PAGE), "once");
    for who in [0, 1] {
        let mut asked = world();
        run(&mut asked, (who, Read));
        assert!(!asked.engines[0].claim(PAGE), "node {who} has read it");
    }
}

/// A discarded page is as at the start and can be claimed again; a page in use is not discarded.
#[test]
fn discarded_page_is_in_the_initial_state() {
    for before in [
        &[(0, Write)][..],
        &[(1, Write), (2, Read)],
        &[(1, Read), (0, Read)],
    ] {
        let mut world = world();
        for step in before {
            run(&mut world, *step);
        }
        run(&mut world, (0, Discard));
        assert_eq!(world.engines[0].counters().discarded, 1);
        assert!(world.engines[0].is_alone(PAGE));
        assert!(world.engines[1..].iter().all(|engine| engine.is_absent(PAGE)));
        assert!(
            !world.engines[1].claim(PAGE) && world.engines[0].claim(PAGE),
            "{before:?}"
        );
    }
    let mut held = world();
    let write = Op {
        want: Write,
        page: PAGE,
    };
    held.go(0, 0, write, 1);
    held.go(0, 0, write, 1);
    let discard = Op {
        want: Discard,
        page: PAGE,
    };
    assert!(!held.engines[0].is_alone(PAGE));
    held.go(0, 0, discard, 0);
    assert_eq!(
        (held.engines[0].counters().discarded, held.environment.latest[0]),
        (0, 1)
    );
    held.used(0, PAGE);
    held.go(0, 0, discard, 0);
    assert_eq!(
        (held.engines[0].counters().discarded, held.environment.latest[0]),
        (1, 0)
    );
}

/// A page that nodes read and then write in turn costs a read and an upgrade at first, then the read alone.
#[test]
fn migratory_page_costs_one_request_for_each_node() {
    let mut world = world();
    for engine in &mut world.engines {
        engine.layout.migratory = true;
    }
    let mut costs = Vec::new();
    for node in [1, 2, 3, 1, 2] {
        let before = total(&world, |counters| counters.messages_sent);
        run(&mut world, (node, Read));
        run(&mut world, (node, Write));
        costs.push(total(&world, |counters| counters.messages_sent) - before);
    }
    // The first node sends its request to the manager, which owns the page; the manager's own copy makes the
    // second node's upgrade two messages longer.
    assert_eq!(costs, [4, 6, 3, 3, 3]);
    assert_eq!(total(&world, |counters| counters.migratory_reads), 3);
}

#[test]
fn counters_match_the_events() {
    let mut world = world();
    for step in [
        (0, Write),
        (1, Read),
        (2, Read),
        (2, Write),
        (1, Write),
        (1, Write),
    ] {
        run(&mut world, step);
    }
    let count = |of| total(&world, of);
    assert_eq!(count(|counters| counters.read_faults), 2);
    assert_eq!(count(|counters| counters.write_faults), 3);
    assert_eq!(count(|counters| counters.upgrades), 1);
    assert_eq!(count(|counters| counters.local), 1);
    assert_eq!(count(|counters| counters.fetched_with_bytes), 3);
    assert_eq!(count(|counters| counters.fetched_without_bytes), 1);
    assert_eq!(count(|counters| counters.invalidations_sent), 1);
    assert_eq!(count(|counters| counters.invalidated), 1);
    assert_eq!(count(|counters| counters.migratory_reads), 0);
    assert_eq!(count(|counters| counters.pages_sent), 3);
}
