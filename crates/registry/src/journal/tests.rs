//! Writers that are killed or stopped, many concurrent writers, and readers that resume early or late.

use std::sync::Barrier;

use super::*;

fn journal(bytes_max: u64) -> (tempfile::TempDir, Journal) {
    let directory = tempfile::tempdir().unwrap();
    let journal = Journal {
        bytes_max,
        ..Journal::at(directory.path())
    };
    (directory, journal)
}

fn running(number: usize) -> Change {
    Change::VmRunning {
        vm: format!("vm{number}"),
    }
}

/// Returns the events that a reader finds now, as numbers of VMs; `usize::MAX` is a gap.
fn read(reader: &mut Reader) -> Vec<usize> {
    let mut found = Vec::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        found.push(number(&entry));
    }
    found
}

fn number(entry: &Entry) -> usize {
    match entry.known().unwrap().change {
        Change::VmRunning { vm } => vm[2..].parse().unwrap(),
        Change::Gap { why } => {
            assert!(!why.is_empty());
            GAP
        }
        other => panic!("{other:?}"),
    }
}

const GAP: usize = usize::MAX;

#[test]
fn events_are_read_in_order_from_each_token_on_across_files() {
    let (_directory, journal) = journal(500);
    let mut follower = Reader::from_start(journal.clone());
    assert_eq!(follower.next_entry().unwrap(), None, "there is no journal yet");
    assert_eq!(follower.token(), None);
    let mut tokens = Vec::new();
    for event in 0..40 {
        journal.append(running(event)).unwrap();
        let entry = follower.next_entry().unwrap().expect("the event");
        assert_eq!(number(&entry), event);
        assert_eq!(entry.with_token()["token"], entry.token.to_string());
        assert_eq!(entry.token.to_string().parse(), Ok(entry.token));
        tokens.push(entry.token);
        assert_eq!(follower.next_entry().unwrap(), None);
    }
    let kept = read(&mut Reader::from_start(journal.clone()));
    assert!(kept.len() > 4 && kept.len() < 20, "{kept:?}");
    assert_eq!(kept, (40 - kept.len()..40).collect::<Vec<_>>());
    for (event, token) in tokens.into_iter().enumerate() {
        let after = read(&mut Reader::after(journal.clone(), token));
        // After the last event of a file that is gone nothing is missing, but no file proves it.
        match event + 1 >= kept[0] && after.first() != Some(&GAP) {
            true => assert_eq!(after, (event + 1..40).collect::<Vec<_>>(), "after {event}"),
            false => {
                assert!(event < kept[0], "after {event}: {after:?}");
                assert_eq!(after[0], GAP, "after {event}");
                assert_eq!(after[1..], kept, "after {event}");
            }
        }
    }
    let sizes = ["current", "previous"].map(|name| journal.directory.join(name).metadata().unwrap().len());
    assert!(sizes.iter().all(|size| *size <= 500), "{sizes:?}");
}

#[test]
fn reader_that_two_new_files_have_passed_reports_a_gap() {
    let (_directory, journal) = journal(500);
    journal.append(running(0)).unwrap();
    let mut slow = Reader::from_start(journal.clone());
    assert_eq!(read(&mut slow), [0]);
    for event in 1..40 {
        journal.append(running(event)).unwrap();
    }
    let found = read(&mut slow);
    let gap = found.iter().position(|event| *event == GAP).expect("a gap");
    assert_eq!(
        found[..gap],
        (1..=gap).collect::<Vec<_>>(),
        "what its own file had"
    );
    assert_eq!(
        found[gap + 1..],
        (40 - (found.len() - gap - 1)..40).collect::<Vec<_>>()
    );
}

#[test]
fn token_that_is_no_place_gives_a_gap_and_never_silence() {
    let (_directory, journal) = journal(FILE_BYTES_MAX);
    let token = |text: &str| text.parse::<Token>().unwrap();
    let mut early = Reader::after(journal.clone(), token("1-1-50"));
    assert_eq!(read(&mut early), [GAP], "there is no journal");
    journal.append(running(0)).unwrap();
    journal.append(running(1)).unwrap();
    assert_eq!(read(&mut early), [0, 1]);
    let known = early.token().unwrap();
    for wrong in [
        Token { journal: 1, ..known },
        Token {
            generation: 2,
            ..known
        },
        Token { offset: 0, ..known },
        Token { offset: 1, ..known },
        Token {
            offset: known.offset - 1,
            ..known
        },
        Token {
            offset: known.offset + 1,
            ..known
        },
        Token {
            offset: u64::MAX,
            ..known
        },
    ] {
        let found = read(&mut Reader::after(journal.clone(), wrong));
        assert_eq!(found, [GAP, 0, 1], "{wrong}");
    }
    for text in [
        "",
        "1",
        "1-1",
        "1-1-1-1",
        "x-1-1",
        "1-+1-1",
        "1-01-1",
        "-1-1",
        "1-1-99999999999999999999",
    ] {
        let error = text.parse::<Token>().unwrap_err().to_string();
        assert!(error.contains("is no token"), "{error}");
    }
    // The journal is removed, and another one is created.
    let mut follower = Reader::after(journal.clone(), known);
    assert!(read(&mut follower).is_empty());
    fs::remove_dir_all(&journal.directory).unwrap();
    journal.append(running(2)).unwrap();
    assert_eq!(read(&mut follower), [GAP, 2]);
}

#[test]
fn event_of_a_writer_that_was_killed_is_a_gap_and_costs_no_other_event() {
    let (_directory, journal) = journal(FILE_BYTES_MAX);
    journal.append(running(0)).unwrap();
    let mut follower = Reader::from_start(journal.clone());
    assert_eq!(read(&mut follower), [0]);
    let mut file = journal.current().unwrap();
    file.write_all(b"{\"unix_ms\":1,\"event\":\"vm-ru").unwrap();
    assert!(read(&mut follower).is_empty(), "its writer may go on");
    let mut late = Reader::from_end(journal.clone()).unwrap();
    journal.append(running(1)).unwrap();
    assert_eq!(read(&mut follower), [GAP, 1]);
    assert_eq!(read(&mut late), [GAP, 1]);
    assert_eq!(read(&mut Reader::from_start(journal.clone())), [0, GAP, 1]);
    // Lines that a writer without the lock may leave, and lines that no version wrote.
    file.write_all(b"\n\n[1]\n{\"unix_ms\":1}\n").unwrap();
    journal.append(running(2)).unwrap();
    assert_eq!(read(&mut follower), [GAP, GAP, 2]);
    // The rest of a file that is no longer the newest.
    file.write_all(b"{").unwrap();
    journal.rotate(&file).unwrap();
    journal.append(running(3)).unwrap();
    assert_eq!(read(&mut follower), [GAP, 3]);
}

#[test]
fn rotation_during_a_scan_hides_no_file() {
    let (_directory, journal) = journal(FILE_BYTES_MAX);
    let rotate = || journal.rotate(&journal.current().unwrap()).unwrap();
    journal.append(running(0)).unwrap();
    // After a first rotation there is a `previous`; before it there is none.
    for has_previous in [false, true] {
        if has_previous {
            rotate();
        }
        journal.append(running(1)).unwrap();
        let newest = journal.files().unwrap().pop().unwrap().0;
        // Rotates after each of the calls in turn.
        for when in 0..3 {
            let mut calls = 0;
            let files = journal.files_by(|name| {
                let opened = journal.open_file(name);
                if calls == when {
                    rotate();
                }
                calls += 1;
                opened
            });
            let found: Vec<Header> = files.unwrap().into_iter().map(|(header, ..)| header).collect();
            let before = Header {
                generation: newest.generation + when as u64,
                ..newest
            };
            assert!(
                found.contains(&before),
                "call {when}: {before:?} is not in {found:?}"
            );
        }
    }
}

#[test]
fn interrupted_rotation_loses_nothing() {
    let (_directory, journal) = journal(400);
    journal.append(running(0)).unwrap();
    let mut follower = Reader::from_start(journal.clone());
    let name = |name: &str| journal.directory.join(name);
    // A writer is killed once the file has its second name.
    fs::hard_link(name("current"), name("previous")).unwrap();
    assert_eq!(read(&mut Reader::from_start(journal.clone())), [0]);
    for event in 1..10 {
        journal.append(running(event)).unwrap();
        assert_eq!(read(&mut follower).last(), Some(&event));
    }
    assert!(follower.token().unwrap().generation > 1);
    // Another writer is killed before that.
    fs::remove_file(name("previous")).unwrap();
    for event in 10..20 {
        journal.append(running(event)).unwrap();
        assert_eq!(read(&mut follower), [event]);
    }
}

#[test]
fn events_of_many_writers_are_whole_and_none_is_lost() {
    const WRITERS: usize = 8;
    const EACH: usize = 200;
    let (_directory, journal) = journal(FILE_BYTES_MAX);
    let mut follower = Reader::from_start(journal.clone());
    let begin = Barrier::new(WRITERS);
    let mut found = std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (journal, begin) = (&journal, &begin);
            scope.spawn(move || {
                begin.wait();
                for event in 0..EACH {
                    journal.append(running(writer * EACH + event)).unwrap();
                }
            });
        }
        let mut found = Vec::new();
        while found.len() < WRITERS * EACH {
            found.extend(read(&mut follower));
        }
        found
    });
    for writer in 0..WRITERS {
        let own = |event: &&usize| **event / EACH == writer;
        assert!(found.iter().filter(own).is_sorted(), "each writer's in its order");
    }
    found.sort_unstable();
    assert_eq!(found, (0..WRITERS * EACH).collect::<Vec<_>>());
}

#[test]
fn writer_that_is_stopped_with_the_lock_delays_the_others_and_stops_none() {
    let (_directory, mut journal) = journal(FILE_BYTES_MAX);
    journal.append(running(0)).unwrap();
    journal.lock_limit = Duration::from_millis(20);
    let lock = private::lock_file(&journal.directory.join("lock")).unwrap();
    let held = lock::at_once(lock, Share::Exclusive).unwrap().expect("free");
    journal.append(running(1)).unwrap();
    drop(held);
    journal.append(running(2)).unwrap();
    assert_eq!(read(&mut Reader::from_start(journal)), [0, 1, 2]);
}

#[test]
fn reasons_are_bounded_and_events_of_later_versions_are_passed_on() {
    let (_directory, journal) = journal(FILE_BYTES_MAX);
    let long = Change::VmFailed {
        vm: "a".to_owned(),
        why: "\u{e4}\n".repeat(1 << 16),
    };
    journal.append(long).unwrap();
    journal
        .current()
        .unwrap()
        .write_all(b"{\"unix_ms\":7,\"event\":\"vm-painted\",\"colour\":\"red\"}\n")
        .unwrap();
    let mut reader = Reader::from_start(journal);
    let first = reader.next_entry().unwrap().unwrap();
    let Some(Change::VmFailed { why, .. }) = first.known().map(|event| event.change) else {
        panic!("{first:?}");
    };
    assert_eq!(why.chars().count(), WHY_MAX + 4);
    let later = reader.next_entry().unwrap().unwrap();
    assert_eq!(later.known(), None);
    assert_eq!(later.with_token()["colour"], "red");
}

#[test]
fn files_of_the_journal_are_closed_to_other_users() {
    use std::os::unix::fs::PermissionsExt;
    let (_directory, journal) = journal(300);
    (0..10).for_each(|event| journal.append(running(event)).unwrap());
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&journal.directory), private::DIRECTORY_MODE);
    for name in ["current", "previous", "lock"] {
        assert_eq!(mode(&journal.directory.join(name)), private::FILE_MODE, "{name}");
    }
}
