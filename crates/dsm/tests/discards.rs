//! Risk: discarded pages keep their memory, return with old contents, or lose a later write.

mod support;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use dsm::{Node, PAGE_LEN, Settings, Shape};
use support::{LIMIT, METHODS, Nodes, fill_at_manager, published, shape, start, start_with, within, word};

/// One node writes each page and another one reads it, so that several have memory for it.
fn fill(memory: &Nodes, pages: Range<u32>) {
    let nodes = &memory.nodes;
    let writer = |page: u32| page as usize % nodes.len();
    for page in pages.clone() {
        word(&nodes[writer(page)], page, 7).store(u64::from(page) + 1, SeqCst);
    }
    // Not one by one: the writer's page server would wait for this thread, now the reader, until the bound of
    // the residency.
    for page in pages {
        let reader = &nodes[(writer(page) + 1) % nodes.len()];
        assert_eq!(word(reader, page, 7).load(SeqCst), u64::from(page) + 1);
    }
}

fn give_back(node: &Node, pages: Range<u32>) -> u64 {
    node.discards().give_back(std::iter::once(pages))
}

fn resident(memory: &Nodes) -> u64 {
    memory
        .nodes
        .iter()
        .map(|node| node.resident_bytes().unwrap())
        .sum()
}

/// Waits until the nodes use that much memory or less: they free theirs when they receive the frame.
fn settles_to(memory: &Nodes, bytes: u64) {
    let end = Instant::now() + Duration::from_secs(10);
    while resident(memory) > bytes {
        assert!(Instant::now() < end, "{} bytes of {bytes}", resident(memory));
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn pages_sent(memory: &Nodes) -> u64 {
    published();
    memory.nodes.iter().map(|node| node.meter().pages).sum()
}

#[test]
fn discarded_pages_use_no_memory_on_any_node_and_read_zero() {
    within(LIMIT, || {
        for (method, nodes, lanes) in METHODS
            .iter()
            .flat_map(|method| [(*method, 2, 1), (*method, 3, 2)])
        {
            const PAGES: u32 = 1536;
            let memory = start(Shape {
                method,
                lanes,
                ..shape(nodes, PAGES)
            });
            fill(&memory, 0..PAGES);
            assert!(resident(&memory) >= u64::from(2 * PAGES) * PAGE_LEN as u64);
            let giver = &memory.nodes[usize::from(nodes) - 1];
            assert_eq!(give_back(giver, 0..PAGES), u64::from(PAGES), "{method:?}");
            settles_to(&memory, 0);
            // Zero pages are not sent, except those that a manager claimed with others; later writes are
            // kept.
            let sent = pages_sent(&memory);
            for page in 0..PAGES {
                let node = &memory.nodes[usize::from((memory.nodes[0].manager(page) + 1) % nodes)];
                assert_eq!(word(node, page, 7).load(SeqCst), 0, "{method:?} page {page}");
            }
            assert_eq!(pages_sent(&memory), sent, "{method:?}");
            fill(&memory, 0..PAGES);
        }
    });
}

#[test]
fn only_discarded_pages_are_zeroed() {
    within(LIMIT, || {
        let memory = start(shape(2, 1024));
        fill(&memory, 0..1024);
        let before = resident(&memory);
        // Pages at the border of the two ranges, and single ones.
        let given = [3..4, 60..70, 500..530, 1000..5000];
        let gone = |page| given.iter().any(|range| range.contains(&page));
        let freed = memory.nodes[0].discards().give_back(given.clone());
        assert_eq!(freed, 1 + 10 + 30 + 24);
        settles_to(&memory, before - 2 * freed * PAGE_LEN as u64);
        for page in 0..1024 {
            let wanted = if gone(page) { 0 } else { u64::from(page) + 1 };
            for node in &memory.nodes {
                assert_eq!(word(node, page, 7).load(SeqCst), wanted, "page {page}");
            }
        }
    });
}

#[test]
fn manager_fills_discarded_pages_by_few_faults() {
    within(LIMIT, || {
        for method in METHODS {
            let memory = start(Shape {
                method,
                ..shape(2, 1024)
            });
            fill(&memory, 0..512);
            give_back(&memory.nodes[1], 0..512);
            fill_at_manager(&memory, 0..512);
        }
    });
}

/// One thread's cycle with its pages, while others do the same in the same blocks: it writes, another node
/// reads, one of the two gives back, both read zeroes.
fn use_and_give_back(nodes: [&Node; 2], pages: impl Fn(u32) -> u32, seed: u64, turns: u32) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut values = [0_u64; 16];
    for turn in 1..=turns {
        let at = random.usize(..values.len());
        let page = pages(at as u32);
        let node = || nodes[fastrand::usize(..2)];
        match random.u32(..4) {
            0 => {
                if give_back(node(), page..page + 1) == 1 {
                    values[at] = 0;
                }
                let now = word(node(), page, 9).load(SeqCst);
                assert_eq!(now, values[at], "given back: page {page}, turn {turn}");
            }
            1 | 2 => {
                values[at] = u64::from(turn) << 8 | seed;
                word(node(), page, 9).store(values[at], SeqCst);
            }
            _ => {
                let now = word(node(), page, 9).load(SeqCst);
                assert_eq!(now, values[at], "page {page}, turn {turn}");
            }
        }
    }
}

#[test]
fn neighbours_of_discarded_pages_keep_their_contents() {
    within(LIMIT, || {
        for (method, lanes) in METHODS.iter().flat_map(|method| [(*method, 1), (*method, 2)]) {
            let memory = Arc::new(start(Shape {
                method,
                lanes,
                migratory: true,
                ..shape(2, 128)
            }));
            let threads: Vec<_> = (0..4_u32)
                .map(|thread| {
                    let memory = memory.clone();
                    std::thread::spawn(move || {
                        let nodes = [&memory.nodes[0], &memory.nodes[1]];
                        // Every fourth page, of both ranges.
                        use_and_give_back(nodes, |at| 32 + 4 * at + thread, u64::from(thread), 400);
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        }
    });
}

#[test]
fn discard_during_writes_leaves_whole_pages() {
    within(LIMIT, || {
        for method in METHODS {
            const PAGES: u32 = 8;
            let memory = Arc::new(start(Shape {
                method,
                ..shape(2, 64)
            }));
            let stop = Arc::new(AtomicBool::new(false));
            let writers: Vec<_> = (0..2_u32)
                .map(|writer| {
                    let (memory, stop) = (memory.clone(), stop.clone());
                    std::thread::spawn(move || {
                        let node = &memory.nodes[writer as usize];
                        let mut times = 0_u64;
                        while !stop.load(Acquire) {
                            times += 1;
                            for page in 28..28 + PAGES {
                                // A thread reads from its own word its last write, or zero if the page was
                                // given back since.
                                let own = word(node, page, writer as usize);
                                let now = own.load(Relaxed);
                                assert!(now == 0 || now == times - 1, "{now} in turn {times}");
                                own.store(times, Relaxed);
                                let others = word(node, page, 1 - writer as usize);
                                let earlier = others.load(Acquire);
                                let later = others.load(Acquire);
                                assert!(later == 0 || later >= earlier, "{later} after {earlier}");
                            }
                        }
                        times
                    })
                })
                .collect();
            let end = Instant::now() + Duration::from_millis(1500);
            let (mut freed, mut times) = (0, 0);
            while Instant::now() < end {
                freed += give_back(&memory.nodes[times % 2], 28..28 + PAGES);
                times += 1;
            }
            stop.store(true, Release);
            for writer in writers {
                let turns = writer.join().unwrap();
                println!("{method:?}: {turns} turns, {freed} pages given back in {times} times");
                assert!(turns > 10 && freed > 10);
            }
            // At rest nothing has changed.
            assert_eq!(give_back(&memory.nodes[0], 28..28 + PAGES), u64::from(PAGES));
            fill(&memory, 0..64);
        }
    });
}

/// Reads page after page, so that the node prefetches, until a flag stops it: each page has a write since its
/// last discard, or zeroes. Returns the number of pages with a write.
fn read_on(node: &Node, pages: Range<u32>, since: &AtomicU64, stop: &AtomicBool) -> u64 {
    let mut full = 0;
    while !stop.load(Acquire) {
        for page in pages.clone() {
            let least = since.load(SeqCst);
            let now = word(node, page, 3).load(SeqCst);
            assert!(
                now == 0 || now >= least,
                "page {page}: {now}, given back before {least}"
            );
            full += u64::from(now > 0);
        }
    }
    full
}

#[test]
fn prefetched_pages_are_discarded_and_never_read_again() {
    within(LIMIT, || {
        for (method, nodes) in METHODS.iter().flat_map(|method| [(*method, 2), (*method, 3)]) {
            const PAGES: u32 = 192;
            let settings = Settings {
                ahead: true,
                ..Settings::default()
            };
            let memory = start_with(
                Shape {
                    method,
                    ..shape(nodes, PAGES)
                },
                &settings,
            );
            let (since, stop) = (AtomicU64::new(0), AtomicBool::new(false));
            let mut gone = 0;
            std::thread::scope(|scope| {
                let read = |node| read_on(node, 0..PAGES, &since, &stop);
                let readers: Vec<_> = memory.nodes[..2]
                    .iter()
                    .map(|node| scope.spawn(move || read(node)))
                    .collect();
                let end = Instant::now() + Duration::from_millis(1500);
                let mut turn = 0;
                // On a busy host a round may take half a second.
                while gone <= 3 || Instant::now() < end {
                    turn += 1;
                    // Pages of all managers, given back by each node in turn.
                    let node = |turn: u64| &memory.nodes[turn as usize % memory.nodes.len()];
                    for page in 0..PAGES {
                        word(node(turn), page, 3).store(turn, SeqCst);
                    }
                    std::thread::sleep(Duration::from_millis(1));
                    if give_back(node(turn / 3), 0..PAGES) == u64::from(PAGES) {
                        since.store(turn + 1, SeqCst);
                        gone += 1;
                    }
                }
                stop.store(true, Release);
                let full: u64 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
                let ahead: u64 = memory.nodes.iter().map(|node| node.meter().ahead).sum();
                println!(
                    "{method:?}, {nodes}: {turn} turns, {gone} without a page left; {full} pages read, \
                     {ahead} were prefetched"
                );
                assert!(full > 1000 && ahead > 100);
            });
            assert!(memory.nodes.iter().all(|node| node.end().is_none()));
        }
    });
}

/// A thread that gives back many pages does not delay others' faults.
#[test]
fn faults_are_served_during_large_discards() {
    within(LIMIT, || {
        const PAGES: u32 = 32 << 10;
        let memory = start(shape(2, PAGES + 512));
        let [manager, other] = &memory.nodes[..] else {
            unreachable!("two nodes");
        };
        for page in 0..PAGES / 2 {
            word(manager, page, 0).store(1, Relaxed);
        }
        // A page that moves between the two nodes.
        let pair = |count: u32| {
            let page = PAGES / 2 - 512 + count % 256;
            let before = Instant::now();
            word(other, page, 0).fetch_add(1, SeqCst);
            word(manager, page, 0).fetch_add(1, SeqCst);
            before.elapsed()
        };
        let alone: Duration = (0..256).map(pair).sum();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let giver = scope.spawn(|| {
                let before = Instant::now();
                let freed = give_back(manager, 0..PAGES / 2 - 512);
                done.store(true, Release);
                (freed, before.elapsed())
            });
            let (mut count, mut longest) = (0_u32, Duration::ZERO);
            while !done.load(Acquire) {
                longest = longest.max(pair(count));
                count += 1;
            }
            let (freed, took) = giver.join().unwrap();
            println!("{freed} pages given back in {took:?}");
            println!(
                "{count} pairs of faults, {longest:?} the longest; {:?} one alone",
                alone / 256
            );
            assert_eq!(freed, u64::from(PAGES / 2 - 512));
            assert!(count > 3, "{count} pairs of faults in {took:?}");
        });
    });
}
