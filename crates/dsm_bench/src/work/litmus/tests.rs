use std::sync::atomic::AtomicU64;

use super::program::{Instance, Outcome, Seen, Test};
use super::{PAGES, Placement, Run, placements};
use crate::shared::PAGE_WORDS;

const BASE: u64 = 400;
const OLD: u64 = 7;

fn classify(test: Test, seen: [Seen; 4], last: Seen) -> Outcome {
    let written = |value: u64| match value {
        0 => OLD,
        new => BASE + new,
    };
    test.classify(&seen.map(|seen| seen.map(written)), last.map(written), BASE)
}

#[test]
fn forbidden_outcomes_are_detected() {
    use Test::*;
    let none = [0, 0];
    for (test, seen, last) in [
        (SbFenced, [none, none, none, none], [1, 1]),
        (SbLocked, [none, none, none, none], [1, 1]),
        (Mp, [none, [1, 0], none, none], [1, 1]),
        (MpLocked, [none, [1, 0], none, none], [1, 1]),
        (Lb, [[1, 0], [1, 0], none, none], [1, 1]),
        (S, [none, [1, 0], none, none], [2, 1]),
        (RFenced, [none, [0, 0], none, none], [1, 2]),
        (TwoPlusTwoW, [none, none, none, none], [1, 1]),
        (Wrc, [none, [1, 0], [1, 0], none], [1, 1]),
        (Iriw, [none, none, [1, 0], [1, 0]], [1, 1]),
        (CoRr, [none, [2, 1], none, none], [2, 0]),
        (CoRr, [none, [1, 0], none, none], [2, 0]),
        (Add, [[3, 0], [3, 0], none, none], [0, 0]),
        (Halves, [none, [1, 0], none, none], [0, 0]),
    ] {
        assert_eq!(classify(test, seen, last), Outcome::Forbidden, "{test:?}");
    }
    let halves = |low: u64, high: u64| low | high << 32;
    let back = [[0, 0], [halves(OLD, BASE + 1), 0]];
    assert_eq!(Test::HalvesBack.classify(&back, [0, 0], BASE), Outcome::Forbidden);
    for value in [halves(OLD, BASE + 1), halves(BASE + 1, OLD), halves(OLD, OLD)] {
        let crossing = [[0, 0], [BASE + 1, value]];
        assert_eq!(
            Test::Crossing.classify(&crossing, [0, 0], BASE),
            Outcome::Forbidden
        );
    }
}

#[test]
fn lost_write_is_detected() {
    // The threads' reads are allowed; the first variable has its old value in the end.
    for test in Test::ALL.into_iter().filter(|test| *test != Test::Crossing) {
        let seen = [[BASE + 1, BASE + 1]; 4];
        assert_eq!(
            test.classify(&seen, [OLD, BASE + 1], BASE),
            Outcome::Forbidden,
            "{test:?}"
        );
    }
    assert_eq!(
        Test::Crossing.classify(&[[OLD, OLD | OLD << 32]; 4], [OLD, OLD], BASE),
        Outcome::Forbidden
    );
}

#[test]
fn store_buffer_outcomes_are_counted_apart() {
    let none = [0, 0];
    assert_eq!(classify(Test::Sb, [none; 4], [1, 1]), Outcome::Relaxed);
    assert_eq!(classify(Test::R, [none; 4], [1, 2]), Outcome::Relaxed);
    let torn = [[0, 0], [OLD, OLD | (BASE + 1) << 32]];
    assert_eq!(
        Test::Crossing.classify(&torn, [0, BASE + 1], BASE),
        Outcome::Relaxed
    );
}

#[test]
fn sequential_threads_show_only_ordinary_outcomes() {
    // On one thread every test has an outcome of some order, whichever thread's part comes first.
    for test in Test::ALL {
        for backwards in [false, true] {
            let mut words = [[OLD; 4]; 2];
            words[0][0] = if test == Test::Add { 0 } else { OLD | OLD << 32 };
            let [x, y] = words.each_mut().map(|word| word.as_mut_ptr());
            let instance = Instance {
                x,
                y,
                across: y.wrapping_add(1).wrapping_byte_add(4),
                base: BASE,
            };
            let mut seen = [[0, 0]; 4];
            let mut order: Vec<u32> = (0..test.threads()).collect();
            if backwards {
                order.reverse();
            }
            for thread in order {
                seen[thread as usize] = test.step(thread, &instance);
            }
            let outcome = test.classify(&seen, instance.last(), BASE);
            let torn = test == Test::Crossing && backwards;
            assert!(
                outcome == Outcome::Ordinary || torn,
                "{test:?} {outcome:?} {seen:?}"
            );
        }
    }
}

fn run(test: Test, cpus: u16) -> Run {
    Run {
        test,
        millis: 30,
        first: 0,
        second: PAGES,
        batch: 1,
        nodes: 2,
        cpus,
    }
}

/// Returns the node of each thread of each team.
fn nodes(test: Test, cpus: u16) -> Vec<Vec<u16>> {
    let mut nodes: Vec<Vec<u16>> = Vec::new();
    for Placement { team, thread, node } in placements(&run(test, cpus)) {
        nodes.resize(nodes.len().max(team as usize + 1), Vec::new());
        assert_eq!(nodes[team as usize].len(), thread as usize, "{test:?}");
        nodes[team as usize].push(node);
    }
    nodes
}

#[test]
fn two_cpus_of_a_node_run_threads_of_a_test_at_the_same_time() {
    assert_eq!(nodes(Test::Mp, 1), [[0, 1]]);
    assert_eq!(nodes(Test::Iriw, 1), [[0, 1, 0, 1]]);
    // Two tests of two threads at once, in the same pages: each node writes in one and reads in the other.
    assert_eq!(nodes(Test::Mp, 2), [[0, 1], [1, 0]]);
    // Instances share the variable that crosses two pages.
    assert_eq!(nodes(Test::Crossing, 2), [[0, 1]]);
    // In larger tests neighbours share a node: the first reader may see a write before it leaves the node.
    assert_eq!(nodes(Test::Wrc, 2), [[0, 0, 1]]);
    assert_eq!(nodes(Test::Iriw, 2), [[0, 0, 1, 1]]);
}

#[test]
fn plain_memory_shows_the_order_of_this_processor() {
    let words: Vec<AtomicU64> = (0..(PAGES as usize + 1) * PAGE_WORDS)
        .map(|_| AtomicU64::new(0))
        .collect();
    let mut batch = 1;
    for cpus in [1, 2] {
        for test in Test::ALL {
            let counts = super::in_memory(
                &words,
                &Run {
                    batch,
                    ..run(test, cpus)
                },
                |_, _| (),
            );
            assert_eq!(counts.forbidden, 0, "{test:?}, {cpus} CPUs: {counts:?}");
            assert!(counts.ordinary > 0, "{test:?} {counts:?}");
            batch = counts.batches;
        }
    }
}
