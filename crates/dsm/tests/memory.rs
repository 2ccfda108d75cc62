//! The memory as a program sees it: one copy of everything.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use dsm::{End, Method, Shape};
use support::{LIMIT, METHODS, WAYS, fill_at_manager, shape, start, start_by, within, word};

#[test]
fn write_of_one_node_is_read_by_the_others() {
    within(LIMIT, || {
        for (method, way) in METHODS
            .into_iter()
            .zip(WAYS)
            .chain([(None, WAYS[1]), (None, WAYS[2])])
        {
            let shape = Shape {
                method,
                ..shape(3, 64)
            };
            let memory = start_by(way, shape);
            let nodes = &memory.nodes;
            for page in 0..64 {
                let writer = page as usize % 3;
                assert_eq!(
                    word(&nodes[(writer + 1) % 3], page, 5).load(SeqCst),
                    0,
                    "a new page is zero"
                );
                word(&nodes[writer], page, 5).store(u64::from(page) + 1, SeqCst);
                word(&nodes[writer], page, 511).store(7, SeqCst);
                for node in nodes {
                    assert_eq!(
                        word(node, page, 5).load(SeqCst),
                        u64::from(page) + 1,
                        "{method:?} {way:?} {page}"
                    );
                    assert_eq!(word(node, page, 511).load(SeqCst), 7);
                }
                word(&nodes[(writer + 2) % 3], page, 5).store(1000, SeqCst);
                assert_eq!(
                    word(&nodes[writer], page, 5).load(SeqCst),
                    1000,
                    "an old copy was read"
                );
            }
        }
    });
}

#[test]
fn filling_memory_at_its_manager_faults_once_for_many_pages() {
    within(LIMIT, || {
        for method in METHODS {
            let memory = start(Shape {
                method,
                ..shape(2, 1024)
            });
            fill_at_manager(&memory, 0..512);
        }
    });
}

#[test]
fn no_increment_is_lost_between_threads_of_all_nodes() {
    within(LIMIT, || {
        let cases = [
            (None, 1, false, WAYS[0]),
            (None, 2, true, WAYS[0]),
            (Some(Method::Copy), 2, false, WAYS[0]),
            (None, 1, false, WAYS[1]),
            (None, 2, true, WAYS[2]),
        ];
        for (method, lanes, migratory, way) in cases {
            let shape = Shape {
                method,
                lanes,
                migratory,
                ..shape(2, 32)
            };
            let memory = Arc::new(start_by(way, shape));
            const TIMES: u64 = 3000;
            let threads: Vec<_> = (0..4)
                .map(|thread| {
                    let memory = memory.clone();
                    std::thread::spawn(move || {
                        let node = &memory.nodes[thread % 2];
                        for turn in 0..TIMES {
                            word(node, (turn / 100 % 8) as u32, 3).fetch_add(1, SeqCst);
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            for node in &memory.nodes {
                let sum: u64 = (0..8).map(|page| word(node, page, 3).load(SeqCst)).sum();
                assert_eq!(sum, 4 * TIMES, "{method:?} {way:?}");
            }
        }
    });
}

#[test]
fn no_reader_goes_back_to_an_older_value() {
    within(LIMIT, || {
        for way in WAYS {
            let memory = Arc::new(start_by(way, shape(3, 8)));
            const LAST: u64 = 20_000;
            let threads: Vec<_> = (0..4)
                .map(|thread| {
                    let memory = memory.clone();
                    std::thread::spawn(move || {
                        let node = &memory.nodes[thread % 3];
                        if thread == 0 {
                            // Two words of one page and one of another, in this order.
                            for value in 1..=LAST {
                                word(node, 0, 0).store(value, Relaxed);
                                word(node, 3, 9).store(value, Relaxed);
                            }
                            return;
                        }
                        let mut seen = 0;
                        while seen < LAST {
                            let second = word(node, 3, 9).load(std::sync::atomic::Ordering::Acquire);
                            let first = word(node, 0, 0).load(Relaxed);
                            assert!(second >= seen, "{second} after {seen}");
                            assert!(first >= second, "{first} was written before {second}");
                            seen = second;
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        }
    });
}

#[test]
fn access_across_pages_of_two_nodes_completes() {
    within(LIMIT, || {
        let memory = Arc::new(start(shape(2, 16)));
        let threads: Vec<_> = (0..2)
            .map(|thread| {
                let memory = memory.clone();
                std::thread::spawn(move || {
                    let node = &memory.nodes[thread];
                    // Node 0 manages page 7, node 1 page 8; each invalidates the other's copy.
                    let at = node.view().wrapping_add(8 * dsm::PAGE_LEN - 4).cast::<u64>();
                    for turn in 0..500_u64 {
                        // SAFETY: within the view; no thread relies on the value.
                        unsafe { at.write_unaligned(turn) };
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn system_calls_fetch_remote_pages() {
    use std::io::{Read, Write};
    within(LIMIT, || {
        let memory = start(shape(2, 4));
        assert!(
            memory.nodes[0].notes().is_empty(),
            "run as root: {:?}",
            memory.nodes[0].notes()
        );
        word(&memory.nodes[0], 1, 0).store(u64::from_le_bytes(*b"elsewher"), SeqCst);
        let (mut near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: a page of the view, which no thread writes meanwhile.
        let page = unsafe { std::slice::from_raw_parts(memory.nodes[1].view().add(dsm::PAGE_LEN), 8) };
        near.write_all(page).unwrap();
        let mut bytes = [0; 8];
        far.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"elsewher");
    });
}

/// The sockets report the end, as they carry nothing else.
#[test]
fn loss_of_a_node_ends_the_others_over_every_transport() {
    within(LIMIT, || {
        for way in WAYS {
            let mut memory = start_by(way, shape(2, 64));
            word(&memory.nodes[0], 40, 3).store(5, SeqCst);
            assert_eq!(word(&memory.nodes[1], 40, 3).load(SeqCst), 5);
            drop(memory.nodes.pop());
            let ends = memory.ends.lock().unwrap();
            let end = ends.iter().find(|(node, _)| *node == 0).unwrap().1;
            assert!(matches!(end, End::Lost { .. }), "{way:?}: {end}");
        }
    });
}
