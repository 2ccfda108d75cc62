//! Cost of accesses to pages, and agreement of all nodes on the contents.

use super::*;

#[test]
fn no_addition_of_any_process_is_lost() {
    with_memory(
        Shape {
            lanes: 2,
            ..shape(3, 64)
        },
        |session| {
            additions_count(session, 40, 100);
        },
    );
}

#[test]
fn each_kind_of_fault_sends_the_least_messages() {
    const PAGES: u32 = 64;
    with_memory(shape(2, 2 * PAGES), |session| {
        // Node 1 manages the second half. Columns: node, write, messages and pages sent for each page.
        for (step, (node, write, messages, pages)) in [
            (1, true, 0, 0),
            (0, false, 2, 1),
            (1, true, 2, 0),
            (0, true, 2, 1),
            (1, true, 2, 1),
            (0, false, 2, 1),
            (0, true, 2, 0),
            (0, true, 0, 0),
            (1, false, 2, 1),
        ]
        .into_iter()
        .enumerate()
        {
            let before = session.meter().unwrap();
            let touch = Touch {
                pages: PAGES..2 * PAGES,
                write,
                threads: 1,
                order: AccessOrder::Ascending,
            };
            session.run_on(node, Job::Touch(touch)).unwrap();
            let sent = session.meter().unwrap() - before;
            let all = u64::from(PAGES);
            assert_eq!(
                (sent.messages, sent.pages),
                (messages * all, pages * all),
                "step {step}"
            );
            assert_eq!(sent.bytes, (16 * messages + 4096 * pages) * all, "step {step}");
            let landed = if pages == 1 { all } else { 0 };
            assert_eq!(
                sent.landed, landed,
                "step {step}: bytes did not come straight to their place"
            );
        }
    });
}

/// While reads continue, a thread waits for the first page of each window, and for pages in flight. The cost
/// is the same.
#[test]
fn sequential_reader_stalls_for_few_pages() {
    const PAGES: u32 = 1024;
    with_memory(shape(2, 2 * PAGES), |session| {
        let sum = (u64::from(PAGES)..2 * u64::from(PAGES)).sum::<u64>();
        for ahead in [false, true, false, true] {
            session.run_all(&vec![Job::Ahead(ahead); 2]).unwrap();
            let write = Touch {
                pages: PAGES..2 * PAGES,
                write: true,
                threads: 1,
                order: AccessOrder::Ascending,
            };
            session.run_on(1, Job::Touch(write.clone())).unwrap();
            let before = session.meter().unwrap();
            let answer = session.run_on(0, Job::Scan(PAGES..2 * PAGES)).unwrap();
            let sent = session.meter().unwrap() - before;
            assert!(
                matches!(answer, JobResult::Scanned { sum: scanned, .. } if scanned == sum),
                "{answer:?}"
            );
            let all = u64::from(PAGES);
            // On a busy host a page may not have been used yet where it was written: a prefetch is then
            // refused.
            assert_eq!(
                (sent.messages, sent.pages),
                (2 * (all + sent.declined), all),
                "ahead {ahead}"
            );
            assert!(sent.declined <= all / 16, "ahead {ahead}: {sent:?}");
            let waits = sent.reads.count - sent.joined;
            assert_eq!(waits + sent.ahead, all, "ahead {ahead}: {sent:?}");
            let expected = if ahead { 1..=all / 8 } else { all..=all };
            assert!(expected.contains(&waits), "ahead {ahead}: {waits} waits");
            // Prefetched pages are invalidated like any other.
            let before = session.meter().unwrap();
            session.run_on(1, Job::Touch(write)).unwrap();
            let sent = session.meter().unwrap() - before;
            assert_eq!((sent.messages, sent.invalidated), (2 * all, all), "ahead {ahead}");
        }
    });
}

/// A thread that fills zero pages of another manager prefetches the next ones, and none that other nodes have
/// written.
#[test]
fn sequential_writer_stalls_for_few_zero_pages() {
    const PAGES: u32 = 512;
    with_memory(shape(2, 2 * PAGES), |session| {
        let write = |node, pages: Range<u32>| {
            let touch = Touch {
                pages,
                write: true,
                threads: 1,
                order: AccessOrder::Ascending,
            };
            let before = session.meter().unwrap();
            session.run_on(node, Job::Touch(touch)).unwrap();
            session.meter().unwrap() - before
        };
        for (ahead, from) in [(false, PAGES), (true, PAGES + 128)] {
            session.run_all(&vec![Job::Ahead(ahead); 2]).unwrap();
            let sent = write(0, from..from + 128);
            assert_eq!(sent.pages, 0, "nobody had written them: {sent:?}");
            // Also for pages in flight, which depends on timing.
            let expected = if ahead { 1..=64 } else { 128..=128 };
            assert!(expected.contains(&sent.writes.count), "ahead {ahead}: {sent:?}");
            assert!(sent.writes.count + sent.filled >= 128, "ahead {ahead}: {sent:?}");
            assert_eq!(
                sent.messages,
                2 * (sent.writes.count + sent.filled),
                "ahead {ahead}"
            );
        }
        // The manager's own writes are there, and move when requested.
        let rest = PAGES + 256..PAGES + 320;
        write(1, rest.clone());
        let before = session.meter().unwrap();
        session.run_all(&vec![Job::Scan(PAGES..PAGES + 256); 2]).unwrap();
        let scanned = session.meter().unwrap() - before;
        assert!(
            scanned.pages >= 256,
            "the manager reads what was filled: {scanned:?}"
        );
        let sent = write(0, rest.start + 16..rest.end);
        assert_eq!((sent.filled, sent.pages), (0, 48), "{sent:?}");
    });
}

/// No copy is made of a page that no node has written.
#[test]
fn zero_pages_are_not_prefetched_for_reading() {
    const PAGES: u32 = 256;
    with_memory(shape(2, 2 * PAGES), |session| {
        session.run_all(&vec![Job::Ahead(true); 2]).unwrap();
        let touch = |pages, write| Touch {
            pages,
            write,
            threads: 1,
            order: AccessOrder::Ascending,
        };
        // The manager's first writes claim whole runs of pages.
        session
            .run_on(1, Job::Touch(touch(PAGES..PAGES + 96, true)))
            .unwrap();
        session.run_on(0, Job::Scan(PAGES..PAGES + 96)).unwrap();
        let sent = session.meter().unwrap();
        assert_eq!(sent.pages, 96, "only what was written");
        assert!(sent.declined > 0, "{sent:?}");
        // So the manager still owns them alone, and sends no message.
        session
            .run_on(1, Job::Touch(touch(PAGES + 96..2 * PAGES, true)))
            .unwrap();
        assert_eq!(session.meter().unwrap().messages, sent.messages);
    });
}

#[test]
fn discarded_memory_returns_to_the_host_in_all_processes() {
    const PAGES: u32 = 1024;
    const BYTES: u64 = PAGES as u64 * 4096;
    let count = |answer: &JobResult| match answer {
        JobResult::Count(count) => *count,
        _ => panic!("{answer:?}"),
    };
    with_memory(shape(2, PAGES), move |session| {
        let touch = |node, write| {
            let touch = Touch {
                pages: 0..PAGES,
                write,
                threads: 1,
                order: AccessOrder::Ascending,
            };
            session.run_on(node, Job::Touch(touch)).unwrap();
        };
        // Both nodes have memory for all pages, and node 1 owns them.
        touch(0, true);
        touch(1, true);
        let resident = || -> Vec<u64> {
            let answers = session.run_all(&[Job::Memory, Job::Memory]).unwrap();
            answers.iter().map(count).collect()
        };
        assert!(resident().iter().all(|bytes| *bytes >= BYTES), "{:?}", resident());
        for giver in [0, 1] {
            let before = session.meter().unwrap();
            let freed = session.run_on(giver, Job::Discard(0..PAGES)).unwrap();
            assert_eq!(count(&freed), u64::from(PAGES));
            let end = Instant::now() + Duration::from_secs(10);
            while resident().iter().any(|bytes| *bytes > 0) {
                assert!(Instant::now() < end, "{:?} bytes", resident());
                std::thread::sleep(Duration::from_millis(5));
            }
            let sent = session.meter().unwrap() - before;
            assert_eq!((sent.pages, sent.discarded), (0, u64::from(PAGES)));
            // The owners manage half of the pages. At first node 1 owns the other half, then node 0 has
            // copies: two messages each.
            assert_eq!(sent.messages, u64::from(PAGES));
            // Zero pages, which are not sent either.
            touch(0, false);
            assert_eq!((session.meter().unwrap() - before).pages, 0);
            assert_eq!(word(session.node(), 5, 0).load(SeqCst), 0);
        }
    });
}
