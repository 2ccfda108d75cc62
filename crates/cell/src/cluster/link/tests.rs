//! The same tests over every transport, since users of a link depend on none.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use protocol::CellId;

use super::local::LocalCalls;
use super::shared::SharedMemory;
use super::*;

const LIMIT: Duration = Duration::from_secs(20);
const LOWER: CellId = CellId { number: 3, life: 1 };
const HIGHER: CellId = CellId { number: 5, life: 2 };

/// The link as the lower-numbered cell sees it, which called, and as the other does.
fn links(way: Transport) -> [Link; 2] {
    match way {
        Transport::Ring => {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("link");
            let listener = UnixListener::bind(&path).unwrap();
            let (linked, far) = mpsc::channel();
            let calls = |me| LocalCalls::new(me, 1000, Arc::new(CallTable::new(me)));
            thread::spawn(move || calls(HIGHER).take(&listener, |link| _ = linked.send(link)));
            let near = calls(LOWER).call(&path).unwrap().expect("no call back");
            [near, far.recv_timeout(LIMIT).unwrap()]
        }
        Transport::Stream => {
            let (near, far) = UnixStream::pair().unwrap();
            [stream::link(HIGHER, near, LIMIT), stream::link(LOWER, far, LIMIT)].map(Result::unwrap)
        }
        Transport::Shared => {
            let [near, far] = memories(1 << 20);
            shared_links(&near, &far).expect("the same memory")
        }
    }
}

/// One memory as two hosts see it.
fn memories(bytes: u64) -> [SharedMemory; 2] {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    [0, 1].map(|_| SharedMemory::of(file.path(), vec![[1, 2], [3, 5]]).unwrap())
}

/// The link through two hosts' memories, if they are one.
fn shared_links(near: &SharedMemory, far: &SharedMemory) -> Option<[Link; 2]> {
    let (near, number) = near.offer(LOWER.number, HIGHER.number)?;
    let far = far.accept(HIGHER.number, LOWER.number, number)?;
    let (here, there) = UnixStream::pair().unwrap();
    Some([near.link(HIGHER, here, LIMIT), far.link(LOWER, there, LIMIT)].map(Result::unwrap))
}

/// The messages until the end of the link.
fn heard(receiving: Receiving) -> mpsc::Receiver<Vec<u8>> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        receiving
            .0
            .run(&mut |bytes| send.send(bytes.to_vec()).map_err(io::Error::other));
    });
    receive
}

/// Lengths from zero to more than a ring holds.
fn message(number: usize) -> Vec<u8> {
    let length = [1, 40, 64, 5000, 200_000][number % 5];
    (0..length).map(|at| (at * 7 + number) as u8).collect()
}

#[track_caller]
fn on_every_way(test: fn(Transport)) {
    for way in [Transport::Ring, Transport::Shared, Transport::Stream] {
        eprintln!("by {way}");
        test(way);
    }
}

#[test]
fn messages_of_all_sizes_come_whole_and_in_order_both_ways_at_once() {
    on_every_way(|way| {
        let [near, far] = links(way);
        assert_eq!(
            (near.peer, far.peer, near.transport, far.transport),
            (HIGHER, LOWER, way, way)
        );
        let sides = [(near.sending, far.receiving), (far.sending, near.receiving)];
        let sides = sides.map(|(mut sending, receiving)| {
            let heard = heard(receiving);
            let sender = thread::spawn(move || {
                for number in 0..100 {
                    sending.0.send(&message(number)).unwrap();
                    // So that both sides block occasionally.
                    if number % 20 == 0 {
                        thread::sleep(Duration::from_millis(20));
                    }
                }
                sending
            });
            (heard, sender)
        });
        for (heard, _) in &sides {
            for number in 0..100 {
                assert!(
                    heard.recv_timeout(LIMIT).unwrap() == message(number),
                    "{number} by {way}"
                );
            }
        }
        drop(sides.map(|(_, sender)| sender.join().unwrap()));
    });
}

#[test]
fn questions_and_answers_go_to_and_fro() {
    on_every_way(|way| {
        let [near, far] = links(way);
        let (mut asking, answers) = (near.sending, heard(near.receiving));
        let (mut answering, questions) = (far.sending, heard(far.receiving));
        thread::spawn(move || {
            questions
                .iter()
                .for_each(|question| answering.0.send(&question).unwrap());
        });
        for number in 0..200 {
            asking.0.send(&message(number % 3)).unwrap();
            assert_eq!(
                answers.recv_timeout(LIMIT).unwrap(),
                message(number % 3),
                "by {way}"
            );
        }
    });
}

#[test]
fn the_end_of_one_half_is_the_end_of_both_sides() {
    on_every_way(|way| {
        let [mut near, far] = links(way);
        let mut sending = far.sending;
        let heard_far = heard(far.receiving);
        near.sending.0.send(b"last").unwrap();
        assert_eq!(heard_far.recv_timeout(LIMIT).unwrap(), b"last", "by {way}");
        let heard_near = heard(near.receiving);
        drop(near.sending);
        let over = Err(mpsc::RecvTimeoutError::Disconnected);
        assert_eq!(heard_far.recv_timeout(LIMIT), over, "by {way}");
        assert_eq!(heard_near.recv_timeout(LIMIT), over, "by {way}");
        let start = Instant::now();
        while sending.0.send(b"nobody listens").is_ok() {
            assert!(start.elapsed() < LIMIT, "sent to a closed link by {way}");
        }
    });
}

#[test]
fn a_place_in_shared_memory_is_used_by_one_link_at_a_time() {
    let [near, far] = memories(1 << 20);
    let first = shared_links(&near, &far).expect("the same memory");
    assert!(shared_links(&near, &far).is_none(), "in use on both sides");
    let [here, there] = first;
    let ended = heard(here.receiving);
    drop(here.sending);
    drop(there);
    assert_eq!(
        ended.recv_timeout(LIMIT),
        Err(mpsc::RecvTimeoutError::Disconnected)
    );
    let start = Instant::now();
    let again = std::iter::repeat_with(|| shared_links(&near, &far)).find(|links| {
        thread::sleep(Duration::from_millis(5));
        links.is_some() || start.elapsed() > LIMIT
    });
    assert!(again.flatten().is_some(), "free when the link is over");
}

#[test]
fn memory_that_is_not_the_same_or_too_small_is_noticed() {
    let [near, _] = memories(1 << 20);
    let [_, far] = memories(1 << 20);
    assert!(shared_links(&near, &far).is_none());
    assert!(near.offer(3, 4).is_none(), "a pair without a place");
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(200_000).unwrap();
    SharedMemory::of(file.path(), vec![[1, 2]]).unwrap();
    let error = SharedMemory::of(file.path(), vec![[1, 2], [3, 5]])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&*file.path().to_string_lossy()) && error.contains("286720 bytes"),
        "{error}"
    );
    let error = SharedMemory::of("/no/such/file".as_ref(), Vec::new()).unwrap_err();
    assert!(
        error.to_string().starts_with("shared memory /no/such/file: "),
        "{error}"
    );
}

#[test]
fn two_cells_have_one_link_whichever_calls_first() {
    let callings = || [LOWER, HIGHER].map(CallTable::new);
    let calls = |calling: &CallTable, peer: CellId, meanwhile: &dyn Fn()| {
        let called = calling.during(peer.number, || {
            meanwhile();
            let [near, far] = links(Transport::Stream);
            Ok(Some(if peer == HIGHER { near } else { far }))
        });
        called.unwrap().is_some()
    };
    let is_welcome =
        |calling: &CallTable, caller| matches!(calling.answer(caller, VERSIONS), CallAnswer::Welcome { .. });

    // One after the other.
    for (first, second) in [(LOWER, HIGHER), (HIGHER, LOWER)] {
        let mut both = callings();
        if first == HIGHER {
            both.reverse();
        }
        assert!(calls(&both[0], second, &|| assert!(is_welcome(&both[1], first))));
        assert!(!calls(&both[1], first, &|| panic!(
            "{second} calls though {first} did"
        )));
        assert!(!is_welcome(&both[0], second), "a call that was sent before");
        let next = CellId {
            life: second.life + 1,
            ..second
        };
        assert!(is_welcome(&both[0], next));
    }
    // Both at once: the lower-numbered one's goes through.
    let [lower, higher] = callings();
    assert!(calls(&lower, HIGHER, &|| assert!(!is_welcome(&lower, HIGHER))));
    calls(&higher, LOWER, &|| assert!(is_welcome(&higher, LOWER)));
}

/// Cell 0 calls the earlier process of cell 1 while the next one calls it. Once the failure has been noticed,
/// either's next call goes through.
#[test]
fn cells_whose_calls_crossed_and_failed_are_linked_by_the_next_call() {
    for first in [LOWER, HIGHER] {
        let [lower, higher] = [LOWER, HIGHER].map(CallTable::new);
        let failed = lower.during(HIGHER.number, || {
            let crossed = higher.during(LOWER.number, || {
                assert!(matches!(lower.answer(HIGHER, VERSIONS), CallAnswer::Crossed));
                Ok(None)
            });
            assert!(crossed.unwrap().is_none());
            Err(io::ErrorKind::ConnectionRefused.into())
        });
        assert!(failed.is_err());
        let (caller, callee) = if first == LOWER {
            (lower, higher)
        } else {
            (higher, lower)
        };
        let peer = if first == LOWER { HIGHER } else { LOWER };
        let linked = caller.during(peer.number, || {
            let welcome = callee.answer(first, VERSIONS);
            assert!(
                matches!(welcome, CallAnswer::Welcome { .. }),
                "{first} calls again"
            );
            let [near, far] = links(Transport::Stream);
            Ok(Some(if peer == HIGHER { near } else { far }))
        });
        assert!(linked.unwrap().is_some());
    }
}

#[test]
fn caller_whose_link_could_not_be_made_may_call_again() {
    let calling = Arc::new(CallTable::new(LOWER));
    let calls = LocalCalls::new(LOWER, 0, Arc::clone(&calling));
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("link.sock")).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        // The thread ends with the process; the listener's does so with the test's last call.
        let server = calls.clone();
        let listener = &listener;
        scope.spawn(move || {
            for socket in listener.incoming().take(2) {
                let _ = send.send(
                    server
                        .take_one(socket.unwrap())
                        .map(|link| link.map(|link| link.peer)),
                );
            }
        });
        let path = folder.path().join("link.sock");
        // It sends no rings, so no link can be made of its call.
        let mut broken = UnixStream::connect(&path).unwrap();
        let hail = local::hail_without_rings(HIGHER);
        shard_api::message::send(&mut broken, &hail, &[]).unwrap();
        assert!(receive.recv().unwrap().is_err());
        let other = LocalCalls::new(HIGHER, 0, Arc::new(CallTable::new(HIGHER)));
        assert!(other.call(&path).unwrap().is_some());
        assert_eq!(receive.recv().unwrap().unwrap(), Some(HIGHER));
    });
}
