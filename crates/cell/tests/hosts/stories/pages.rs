//! Pages that the home and a part on the other host have in common.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use cell::remote::protocol::FromPart;
use serde_json::{Value, json};
use shard::arch::x86_64::layout::Layout;
use shard::ending::EndSignal;
use shard::launch::{Answer, Ending, Order, Report, SpanLaunch};
use shard::memory::replica::Replica;
use shard::sandbox::Threads;
use vm_memory::{Bytes, GuestAddress};

use crate::hosts::two::{SOON, Two, kill_process, remote, started, wait};

pub fn pages_come(two: &Two) {
    pages_come_by(two, "streams", None);
}

pub fn pages_come_by_memory(two: &Two) {
    pages_come_by(two, "shared", None);
}

pub fn pages_come_without_memory(two: &Two) {
    let note = "pages of the shard in cell 1 on host beta come by streams: cell 1 on host beta does not see \
                this host's shared memory, or uses it for another VM";
    pages_come_by(two, "streams", Some(note));
}

/// This process serves the home's memory. Checks the transport of its lanes, and the note about it.
fn pages_come_by(two: &Two, way: &str, note: Option<&str>) {
    /// Number of pages that are beta's at first.
    const PAGES: u64 = 200;
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    let bytes = opened.launch.memory.bytes;
    let mut files = Vec::new();
    let launch = boot.launch(0, &mut files);
    let (mut near, mut far) = UnixStream::pair().expect("sockets");
    shard::process::send(&mut near, &launch, &files).expect("a message");
    let (launch, mut files) = shard::process::receive::<SpanLaunch>(&mut far).expect("a message");
    drop(boot);
    let coherent = launch.coherence.as_ref().expect("a copy of its own");
    let replica = Replica::take(&launch, coherent, bytes, &mut files).expect("a replica");
    let layout = Layout::new(bytes, &[]).expect("a layout");
    let memory = replica.ram(&layout).expect("memory");
    let end = Arc::new(EndSignal::new().expect("an event"));
    let coherence = replica.start(&Threads::open(), &end).expect("lanes");

    // A thread that waits for a page that never comes waits forever.
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let since = Instant::now();
        for page in 0..PAGES {
            let place = GuestAddress(bytes / 2 + page * 4096);
            assert_eq!(memory.read_obj::<u64>(place).expect("in memory"), 0);
        }
        let took = since.elapsed();
        println!("  a page in {} us", took.as_micros() / u128::from(PAGES));
        for page in 0..PAGES {
            let place = GuestAddress(bytes / 2 + page * 4096 + 8);
            memory.write_obj(page + 1, place).expect("in memory");
            assert_eq!(memory.read_obj::<u64>(place).expect("in memory"), page + 1);
        }
        let _ = tell.send(());
    });
    told.recv_timeout(SOON).expect("all pages");
    let here = coherence.status();
    assert!(here["faults"]["read"]["count"].as_u64() > Some(0), "{here}");
    assert!(here["faults"]["upgrade"]["count"].as_u64() > Some(0), "{here}");
    assert_eq!(here["ways"], json!([null, way]), "{here}");
    let notes = here["notes"].as_array().expect("notes");
    assert_eq!(
        notes
            .iter()
            .any(|found| Some(found) == note.map(Value::from).as_ref()),
        note.is_some(),
        "{notes:?}"
    );
    let remote = remote(&span);
    remote.order(&Order::Status).expect("an order");
    match remote.next(Some(SOON)) {
        Some(FromPart::Report(Report::Answer {
            answer: Answer::Status(status),
            ..
        })) => {
            assert!(
                status["coherence"]["messages"].as_u64() >= Some(PAGES),
                "{status}"
            );
            assert_eq!(status["coherence"]["ways"], json!([way, null]), "{status}");
        }
        other => panic!("{other:?}"),
    }
    two.shards().into_iter().for_each(kill_process);
    wait(|| end.cause().is_some());
    match end.cause() {
        Some(Ending::PeerLost { detail }) => {
            assert!(
                detail.starts_with("the shard in cell 1 on host beta is gone"),
                "{detail}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert!(!coherence.is_whole());
    span.leave();
    two.wait_until_free();
}
