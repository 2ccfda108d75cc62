//! Tests of channels between threads and processes, with blocking.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::message::Message;
use crate::ring::{RecvError, SendError};

const BLOCK_NS: u64 = 5_000;

fn message(number: u64) -> Message {
    Message {
        words: [number; 7],
        kind: 1,
    }
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(20))
}

#[track_caller]
fn all_come(count: u64, mut outbox: BlockingSender, mut inbox: BlockingReceiver) {
    let writer = thread::spawn(move || {
        for number in 0..count {
            outbox.send(&message(number), soon()).expect("room in time");
        }
    });
    for number in 0..count {
        let got = inbox.recv(soon()).expect("open").expect("a message in time");
        assert_eq!(got, message(number));
    }
    writer.join().expect("no panic");
    assert_eq!(inbox.recv(soon()), Err(RecvError::Closed));
}

/// In a small ring both sides block repeatedly, and no wake-up may be lost.
#[test]
fn no_message_is_lost_when_both_sides_block() {
    let (outbox, inbox) = channel(2, 0).expect("a channel");
    all_come(50_000, outbox, inbox);
}

#[test]
fn wait_ends_at_its_deadline() {
    let (mut outbox, mut inbox) = channel(2, BLOCK_NS).expect("a channel");
    let start = Instant::now();
    let after = |ms| Some(Instant::now() + Duration::from_millis(ms));
    assert_eq!(inbox.recv(after(30)), Ok(None));
    (0..2).for_each(|number| outbox.send(&message(number), soon()).expect("room"));
    assert_eq!(outbox.send(&message(2), after(30)), Err(SendError::Full));
    let waited = start.elapsed();
    assert!(
        (Duration::from_millis(60)..Duration::from_secs(10)).contains(&waited),
        "{waited:?}"
    );
}

#[test]
fn blocked_side_is_woken_when_its_peer_exits() {
    let (outbox, mut inbox) = channel(2, 0).expect("a channel");
    let reader = thread::spawn(move || inbox.recv(soon()));
    thread::sleep(Duration::from_millis(50));
    drop(outbox);
    assert_eq!(reader.join().expect("no panic"), Err(RecvError::Closed));

    let (mut outbox, inbox) = channel(2, 0).expect("a channel");
    (0..2).for_each(|number| outbox.send(&message(number), soon()).expect("room"));
    let writer = thread::spawn(move || outbox.send(&message(2), soon()));
    thread::sleep(Duration::from_millis(50));
    drop(inbox);
    assert_eq!(writer.join().expect("no panic"), Err(SendError::Closed));
}

#[test]
fn blocked_receiver_uses_no_cpu() {
    let (_outbox, mut inbox) = channel(2, BLOCK_NS).expect("a channel");
    let cpu = || {
        let used = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_THREAD)
            .expect("always allowed");
        Duration::from_micros((used.user_time().tv_usec() + used.system_time().tv_usec()) as u64)
            + Duration::from_secs((used.user_time().tv_sec() + used.system_time().tv_sec()) as u64)
    };
    let before = cpu();
    assert_eq!(
        inbox.recv(Some(Instant::now() + Duration::from_millis(500))),
        Ok(None)
    );
    let used = cpu() - before;
    assert!(used < Duration::from_millis(5), "{used:?} of 500 ms");
}

/// Returns both sides' doorbells, each rung by another thread, as over a network: later, and not by the
/// caller.
fn bells() -> [Block; 2] {
    let (ends, calls): (Vec<_>, Vec<_>) = (0..2).map(|_| mpsc::channel::<()>()).unzip();
    let bells: Vec<Arc<Doorbell>> = ends
        .into_iter()
        .map(|end| Arc::new(Doorbell::new(move || _ = end.send(()))))
        .collect();
    for (called, doorbell) in calls.into_iter().zip(bells.iter().rev().cloned()) {
        thread::spawn(move || called.iter().for_each(|()| doorbell.ring()));
    }
    [0, 1].map(|side| Block::Doorbell(bells[side].clone()))
}

/// As between hosts: in a small ring both sides block repeatedly.
#[test]
fn no_lost_wakeups_with_doorbells() {
    let (ring, file) = SharedRing::create(2).expect("a ring");
    let other = SharedRing::attach(&file).expect("the same ring");
    let [sends, receives] = bells();
    let outbox = BlockingSender::new(ring, sends, 0);
    let inbox = BlockingReceiver::new(other, receives, 0);
    all_come(20_000, outbox, inbox);
}

#[test]
fn doorbell_waiter_is_woken_when_the_channel_closes() {
    let (ring, file) = SharedRing::create(2).expect("a ring");
    let seen = SharedRing::attach(&file).expect("the same ring");
    let [_, block] = bells();
    let mut inbox = BlockingReceiver::new(ring, block.clone(), 0);
    let reader = thread::spawn(move || inbox.recv(soon()));
    thread::sleep(Duration::from_millis(50));
    end(&seen, &block);
    assert_eq!(reader.join().expect("no panic"), Err(RecvError::Closed));
}

#[test]
fn malformed_ring_memory_is_refused() {
    for lines in [0, 1, 3, 1 << 17] {
        assert!(
            matches!(SharedRing::create(lines), Err(MemoryError::Size(_))),
            "{lines}"
        );
    }
    let file = tempfile::tempfile().expect("a file");
    file.set_len(4096).expect("its size");
    let file = OwnedFd::from(file);
    assert!(SharedRing::attach(&file).is_err(), "a file that may shrink");
    let file = std::fs::File::from(file);
    assert!(matches!(
        SharedRing::at(&file, 4096, 2),
        Err(MemoryError::Size(0))
    ));
    assert!(SharedRing::at(&file, 0, 32).is_ok());
}

/// The child is this test program, which runs [`child_process_of_the_channel_test`] only.
#[test]
fn channel_connects_two_processes() {
    let (there, file) = SharedRing::create(8).expect("a ring");
    let (back, file_back) = SharedRing::create(8).expect("a ring");
    let mut outbox = BlockingSender::new(there, Block::Futex, BLOCK_NS);
    let mut inbox = BlockingReceiver::new(back, Block::Futex, BLOCK_NS);
    let program = std::env::current_exe().expect("this program");
    let mut call = Command::new(program);
    call.args([
        "--ignored",
        "--exact",
        "host::tests::child_process_of_the_channel_test",
    ]);
    let (first, second) = (file.as_raw_fd(), file_back.as_raw_fd());
    // SAFETY: these calls are safe between fork and exec. Both files are open; they are copied to numbers
    // above 4 first, so that neither is written over before it is copied.
    unsafe {
        call.pre_exec(move || {
            let copies = [first, second].map(|file| libc::fcntl(file, libc::F_DUPFD, 100));
            if copies.contains(&-1) || libc::dup2(copies[0], 3) < 0 || libc::dup2(copies[1], 4) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        })
    };
    let mut child = call.spawn().expect("the child");
    for number in 0..1000 {
        outbox.send(&message(number), soon()).expect("room in time");
        let answer = inbox.recv(soon()).expect("open").expect("an answer in time");
        assert_eq!(answer, message(number + 1));
    }
    drop(outbox);
    assert!(child.wait().expect("the child's end").success());
}

#[test]
#[ignore = "the other process of the test above, which runs it"]
fn child_process_of_the_channel_test() {
    // SAFETY: the parent put them there for this test alone.
    let (there, back) = unsafe { (OwnedFd::from_raw_fd(3), OwnedFd::from_raw_fd(4)) };
    let mut inbox = BlockingReceiver::new(
        SharedRing::attach(&there).expect("a ring"),
        Block::Futex,
        BLOCK_NS,
    );
    let mut outbox = BlockingSender::new(SharedRing::attach(&back).expect("a ring"), Block::Futex, BLOCK_NS);
    while let Ok(Some(got)) = inbox.recv(soon()) {
        outbox
            .send(&message(got.words[0] + 1), soon())
            .expect("room in time");
    }
}
