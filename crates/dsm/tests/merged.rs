//! Page tables as merged pages, driven by real faults: two nodes write the same table, and nothing that one could know of is missed.

mod support;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread;
use std::time::{Duration, Instant};

use dsm::{Node, PAGE_BYTES, Settings};

use support::{LIMIT, Nodes, shape, start_with, within, word};

/// The top table and one below it, and ordinary pages.
const ROOT: u32 = 3;
const TABLE: u32 = 70;
const FLAG: u32 = 100;
const DATA: u32 = 120;
/// Present, writable, accessed.
const LINK: u64 = 0x23;

fn entry(page: u32) -> u64 {
    (u64::from(page) * PAGE_BYTES as u64) | LINK
}

/// Two nodes whose processors have the same table loaded, with one table below it.
fn nodes() -> Nodes {
    let settings = Settings {
        processors: 1,
        ..Settings::default()
    };
    let nodes = start_with(shape(2, 128), &settings);
    word(&nodes.nodes[0], ROOT, 0).store(entry(TABLE), Relaxed);
    for node in &nodes.nodes {
        let causal = node.causal().expect("two nodes and one lane");
        causal.root(0, Some(u64::from(ROOT) * PAGE_BYTES as u64));
    }
    nodes
}

/// Both nodes write the page until it comes to neither of them any more.
fn heat(nodes: &[Node], page: u32, merged: u64) {
    let start = Instant::now();
    let mut round = 0;
    while nodes.iter().any(|node| node.meter().merged < merged) {
        round += 1;
        for (number, node) in nodes.iter().enumerate() {
            // Not present: the guest's own business.
            word(node, page, 500 + number).store(round << 1, Relaxed);
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "page {page} is not merged"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// What a processor of one node does, and then tells the other's by a word of an ordinary page.
fn tell(from: &Node, to: &Node, round: u64, change: &AtomicU64) {
    change.store(round << 1, Relaxed);
    word(from, FLAG, 0).store(round, Release);
    while word(to, FLAG, 0).load(Acquire) != round {
        std::hint::spin_loop();
    }
}

#[test]
fn tables_are_open_to_both_and_who_is_told_sees_the_change() {
    within(LIMIT, || {
        let Nodes { nodes, ends } = nodes();
        heat(&nodes, ROOT, 1);
        heat(&nodes, TABLE, 2);
        let before = nodes[0].hottest(128);
        let (one, other) = (&nodes[0], &nodes[1]);
        for round in 1..=300 {
            for (from, to) in [(one, other), (other, one)] {
                for page in [ROOT, TABLE] {
                    let place = 7 + (round as usize % 400);
                    let number = round * 4 + u64::from(page == TABLE) * 2 + u64::from(from.me());
                    tell(from, to, number, word(from, page, place));
                    assert_eq!(word(to, page, place).load(Relaxed), number << 1, "page {page}");
                }
                // By a message that the memory does not know of.
                word(from, TABLE, 450).store(round << 1, Relaxed);
                let count = from.causal().expect("merged").before();
                to.causal().expect("merged").after(count);
                assert_eq!(word(to, TABLE, 450).load(Relaxed), round << 1);
            }
        }
        let times =
            |list: &[(u32, u32)], page| list.iter().find(|(hot, _)| *hot == page).map(|(_, times)| *times);
        for page in [ROOT, TABLE] {
            assert_eq!(
                times(&one.hottest(128), page),
                times(&before, page),
                "page {page} came again"
            );
        }
        let meter = one.meter();
        assert_eq!((meter.merged, meter.unmerged, meter.conflicts), (2, 0, 0));
        assert!(meter.words >= 600, "{meter:?}");
        drop(nodes);
        drop(ends);
    });
}

#[test]
fn a_table_that_is_cut_off_is_an_ordinary_page_before_anybody_knows() {
    within(LIMIT, || {
        let Nodes { nodes, ends } = nodes();
        heat(&nodes, ROOT, 1);
        heat(&nodes, TABLE, 2);
        let (one, other) = (&nodes[0], &nodes[1]);
        for round in 1..=40_u64 {
            // Unlinked, told, and used as data that both add to.
            tell(one, other, round, word(one, ROOT, 0));
            assert_eq!(word(other, ROOT, 0).load(Relaxed), round << 1);
            let sum = word(one, TABLE, 9).load(Relaxed);
            thread::scope(|scope| {
                for node in [one, other] {
                    scope.spawn(move || {
                        for _ in 0..200 {
                            word(node, TABLE, 9).fetch_add(2, Relaxed);
                        }
                    });
                }
            });
            assert_eq!(word(other, TABLE, 9).load(Relaxed), sum + 800, "round {round}");
            word(one, DATA, 0).store(round, Relaxed);
            // A table again, empty, as a guest has it before it links it.
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

#[test]
fn a_merged_table_is_not_given_back_and_what_lies_beside_it_is() {
    within(LIMIT, || {
        let Nodes { nodes, ends } = nodes();
        heat(&nodes, ROOT, 1);
        heat(&nodes, TABLE, 2);
        for (node, other, number) in [(&nodes[0], &nodes[1], 30), (&nodes[1], &nodes[0], 31)] {
            let merged = nodes[0].meter().merged;
            tell(node, other, number, word(node, ROOT, 30));
            word(&nodes[0], ROOT + 1, 5).store(1, Relaxed);
            word(&nodes[1], TABLE + 1, 5).store(1, Relaxed);
            // Each is managed by another node.
            let pages = [ROOT..ROOT + 2, TABLE..TABLE + 2];
            assert_eq!(node.discards().give_back(pages), 2);
            for reader in &nodes {
                let at = |page, index| word(reader, page, index).load(Relaxed);
                assert_eq!((at(ROOT, 0), at(ROOT, 30)), (entry(TABLE), number << 1));
                assert_eq!((at(ROOT + 1, 5), at(TABLE + 1, 5)), (0, 0));
            }
            assert_eq!((nodes[0].meter().merged, nodes[0].meter().unmerged), (merged, 0));
        }
        // Still tables of both.
        let (one, other) = (&nodes[0], &nodes[1]);
        for round in 1..=50 {
            tell(one, other, round, word(one, TABLE, 77));
            assert_eq!(word(other, TABLE, 77).load(Relaxed), round << 1);
        }
        drop(nodes);
        drop(ends);
    });
}
