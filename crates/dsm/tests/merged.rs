//! Merged page tables, driven by real faults: nodes write the same table, and no causally earlier diff is
//! missed.

mod support;

use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread;
use std::time::{Duration, Instant};

use dsm::{Node, PAGE_LEN, Settings};

use support::{LIMIT, Nodes, piped, shape, slow, start_linked, start_over, within, word};

/// The root, a table below it, and ordinary pages.
const ROOT: u32 = 3;
const TABLE: u32 = 70;
const FLAG: u32 = 100;
const DATA: u32 = 120;
/// Present, writable, accessed.
const LINK: u64 = 0x23;

fn entry(page: u32) -> u64 {
    (u64::from(page) * PAGE_LEN as u64) | LINK
}

/// Starts nodes whose processors have the same root loaded, with one table below it. The link between the
/// first and the last has that delay.
fn nodes_with(count: u16, delay: Option<Duration>) -> Nodes {
    let settings = Settings {
        processors: 1,
        ..Settings::default()
    };
    let last = usize::from(count) - 1;
    loaded(start_over(
        shape(count, 128),
        &settings,
        |low, high| match delay {
            Some(delay) if (low, high) == (0, last) => slow(delay),
            _ => UnixStream::pair().unwrap(),
        },
    ))
}

fn loaded(nodes: Nodes) -> Nodes {
    word(&nodes.nodes[0], ROOT, 0).store(entry(TABLE), Relaxed);
    for node in &nodes.nodes {
        let causal = node.causal().expect("few nodes and one lane");
        causal.root(0, Some(u64::from(ROOT) * PAGE_LEN as u64));
    }
    nodes
}

fn nodes(count: u16) -> Nodes {
    nodes_with(count, None)
}

/// As [`nodes_with`], with pipes as VMs have them.
fn nodes_by_pipes(count: u16) -> Nodes {
    let settings = Settings {
        processors: 1,
        ..Settings::default()
    };
    loaded(start_linked(shape(count, 128), &settings, |_, _| piped(1 << 14)))
}

/// Passes a word from node to node, so that each writer has read the previous write.
fn walk(nodes: &[Node], steps: usize) -> impl Iterator<Item = (&Node, &Node)> {
    let mut at = 0;
    (0..steps).map(move |step| {
        let from = at;
        at = (from + 1 + step / nodes.len() % (nodes.len() - 1)) % nodes.len();
        (&nodes[from], &nodes[at])
    })
}

/// Passes a message that the memory does not see.
fn pass(from: &Node, to: &Node) {
    let batches = from.causal().expect("merged").before();
    to.causal()
        .expect("merged")
        .after(usize::from(from.me()), &batches);
}

/// All nodes write the page until it no longer moves.
fn heat(nodes: &[Node], page: u32, merged: u64) {
    let start = Instant::now();
    let mut round = 0;
    while nodes.iter().any(|node| node.meter().merged < merged) {
        round += 1;
        for (number, node) in nodes.iter().enumerate() {
            // Not present: ignored by the hardware.
            word(node, page, 500 + number).store(round << 1, Relaxed);
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "page {page} is not merged"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// A processor of one node writes a table, and then signals the other's by a word of an ordinary page.
fn tell(from: &Node, to: &Node, round: u64, change: &AtomicU64) {
    change.store(round << 1, Relaxed);
    word(from, FLAG, 0).store(round, Release);
    while word(to, FLAG, 0).load(Acquire) != round {
        thread::yield_now();
    }
}

#[test]
fn causally_later_node_sees_the_change_of_a_merged_table() {
    type Start = fn(u16) -> Nodes;
    let cases: [(u16, usize, Start); 6] = [
        (2, 600, nodes),
        (3, 200, nodes),
        (4, 100, nodes),
        (8, 40, nodes),
        (2, 600, nodes_by_pipes),
        (3, 200, nodes_by_pipes),
    ];
    for (count, steps, start) in cases {
        within(LIMIT, move || {
            let Nodes { nodes, ends } = start(count);
            heat(&nodes, ROOT, 1);
            heat(&nodes, TABLE, 2);
            let before = nodes[0].hottest(128);
            let mut number = 0;
            for (step, (from, to)) in walk(&nodes, steps).enumerate() {
                for page in [ROOT, TABLE] {
                    let place = 7 + (step / 2 % 400);
                    number += 1;
                    tell(from, to, number, word(from, page, place));
                    assert_eq!(word(to, page, place).load(Relaxed), number << 1, "page {page}");
                }
                number += 1;
                word(from, TABLE, 450).store(number << 1, Relaxed);
                pass(from, to);
                assert_eq!(word(to, TABLE, 450).load(Relaxed), number << 1);
            }
            let one = &nodes[0];
            let times = |list: &[(u32, u32)], page| {
                let hot = list.iter().find(|(hot, _)| *hot == page);
                hot.map(|(_, times)| *times)
            };
            for page in [ROOT, TABLE] {
                assert_eq!(
                    times(&one.hottest(128), page),
                    times(&before, page),
                    "page {page} came again"
                );
            }
            let meter = one.meter();
            assert_eq!((meter.merged, meter.unmerged, meter.conflicts), (2, 0, 0));
            assert!(meter.words >= steps as u64 / 2, "{meter:?}");
            drop(nodes);
            drop(ends);
        });
    }
}

/// The first node's diffs arrive late at the last one. When it reads the second node's write, it has all
/// diffs that the second had applied before.
#[test]
fn causality_through_a_third_node_holds() {
    const DELAY: Duration = Duration::from_millis(20);
    within(LIMIT, || {
        let Nodes { nodes, ends } = nodes_with(3, Some(DELAY));
        let [first, second, last] = &nodes[..] else {
            unreachable!("three");
        };
        heat(&nodes, ROOT, 1);
        heat(&nodes, TABLE, 2);
        // Pages whose messages don't use the slow link: the second node manages them.
        let mut flags = (0..128).filter(|page| first.manager(*page) == 1 && ![ROOT, TABLE].contains(page));
        let (near, far) = (flags.next().unwrap(), flags.next().unwrap());
        let mut quickest = LIMIT;
        for round in 1..=40_u64 {
            for (number, page) in [(2 * round, ROOT), (2 * round + 1, TABLE)] {
                let place = 7 + round as usize;
                let start = Instant::now();
                thread::scope(|scope| {
                    // The waiting node reads, so that only the awaited reply arrives.
                    scope.spawn(|| {
                        while word(second, near, 0).load(Acquire) != number {
                            thread::sleep(Duration::from_micros(50));
                        }
                        quickest = quickest.min(start.elapsed());
                        assert_eq!(word(second, page, place).load(Relaxed), number << 1);
                        word(second, far, 0).store(number, Release);
                    });
                    word(first, page, place).store(number << 1, Relaxed);
                    word(first, near, 0).store(number, Release);
                    while word(last, far, 0).load(Acquire) != number {
                        thread::sleep(Duration::from_micros(50));
                    }
                });
                assert_eq!(
                    word(last, page, place).load(Relaxed),
                    number << 1,
                    "round {round}"
                );
            }
            word(first, TABLE, 450).store(round << 1, Relaxed);
            pass(first, second);
            pass(second, last);
            assert_eq!(word(last, TABLE, 450).load(Relaxed), round << 1);
        }
        // Otherwise the order was a coincidence.
        assert!(
            quickest < DELAY / 2,
            "the second is notified as late as the last: {quickest:?}"
        );
        drop(nodes);
        drop(ends);
    });
}

#[test]
fn detached_table_is_an_ordinary_page_before_its_removal_is_known() {
    for (count, rounds) in [(2, 40), (3, 24)] {
        within(LIMIT, move || {
            let Nodes { nodes, ends } = nodes(count);
            heat(&nodes, ROOT, 1);
            heat(&nodes, TABLE, 2);
            let one = &nodes[0];
            for round in 1..=rounds {
                // The table is unlinked, announced, and reused as data that all nodes add to. The last node
                // to read the word has every earlier diff, as the first has.
                let other = &nodes[1 + round as usize % (nodes.len() - 1)];
                tell(one, other, round, word(one, ROOT, 0));
                assert_eq!(word(other, ROOT, 0).load(Relaxed), round << 1);
                let sum = word(one, TABLE, 9).load(Relaxed);
                thread::scope(|scope| {
                    for node in &nodes {
                        scope.spawn(move || {
                            for _ in 0..200 {
                                word(node, TABLE, 9).fetch_add(2, Relaxed);
                            }
                        });
                    }
                });
                let all = sum + 400 * u64::from(count);
                assert_eq!(word(other, TABLE, 9).load(Relaxed), all, "round {round}");
                word(one, DATA, 0).store(round, Relaxed);
                // An empty table again, as a guest has it before it links it.
                for index in 0..512 {
                    word(one, TABLE, index).store(0, Relaxed);
                }
                word(one, ROOT, 0).store(entry(TABLE), Relaxed);
                if round % 8 == 0 {
                    let merged = nodes.iter().map(|node| node.meter().merged).max().unwrap_or(0);
                    heat(&nodes, TABLE, merged + 1);
                }
            }
            assert!(
                nodes
                    .iter()
                    .all(|node| node.meter().unmerged > 0 && node.end().is_none())
            );
            drop(nodes);
            drop(ends);
        });
    }
}

#[test]
fn merged_table_is_not_discarded_but_its_neighbours_are() {
    within(LIMIT, || {
        let Nodes { nodes, ends } = nodes(2);
        heat(&nodes, ROOT, 1);
        heat(&nodes, TABLE, 2);
        for (node, other, number) in [(&nodes[0], &nodes[1], 30), (&nodes[1], &nodes[0], 31)] {
            let merged = nodes[0].meter().merged;
            tell(node, other, number, word(node, ROOT, 30));
            word(&nodes[0], ROOT + 1, 5).store(1, Relaxed);
            word(&nodes[1], TABLE + 1, 5).store(1, Relaxed);
            // A different node manages each of them.
            let pages = [ROOT..ROOT + 2, TABLE..TABLE + 2];
            assert_eq!(node.discards().give_back(pages), 2);
            for reader in &nodes {
                let at = |page, index| word(reader, page, index).load(Relaxed);
                assert_eq!((at(ROOT, 0), at(ROOT, 30)), (entry(TABLE), number << 1));
                assert_eq!((at(ROOT + 1, 5), at(TABLE + 1, 5)), (0, 0));
            }
            assert_eq!((nodes[0].meter().merged, nodes[0].meter().unmerged), (merged, 0));
        }
        // They are still tables of both nodes.
        let (one, other) = (&nodes[0], &nodes[1]);
        for round in 1..=50 {
            tell(one, other, round, word(one, TABLE, 77));
            assert_eq!(word(other, TABLE, 77).load(Relaxed), round << 1);
        }
        drop(nodes);
        drop(ends);
    });
}
