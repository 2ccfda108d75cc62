use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use urpc::pipe::WORD_BYTES;

use super::*;

/// Words of a pipe that holds much less than the tests send.
const WORDS: usize = 128;

/// Returns the near and far ends of two streams, over pipes of that many words.
pub(crate) fn wires<const N: usize>(words: usize) -> [[Wire; N]; 2] {
    let (sockets, pipes, _) = segments(words);
    let mut ends = sockets
        .into_iter()
        .zip(pipes)
        .map(|(sockets, pipes): ([OwnedFd; N], [Pipes; N])| {
            let mut pipes = pipes.into_iter();
            sockets.map(|socket| Wire::new(socket, pipes.next()))
        });
    std::array::from_fn(|_| ends.next().unwrap())
}

/// Returns the parts of [`wires`], and their memory.
pub(crate) fn segments<const N: usize>(words: usize) -> ([[OwnedFd; N]; 2], [[Pipes; N]; 2], File) {
    let memory = tempfile::tempfile_in("/dev/shm").unwrap();
    let room = (urpc::pipe::Pipe::bytes(words) as u64).next_multiple_of(page::PAGE_BYTES);
    memory.set_len(2 * N as u64 * room).unwrap();
    let pairs: [_; N] = std::array::from_fn(|_| UnixStream::pair().unwrap());
    let mut near = Vec::new();
    let mut far = Vec::new();
    for (one, other) in pairs {
        near.push(OwnedFd::from(one));
        far.push(OwnedFd::from(other));
    }
    let pipe = |number: usize| SharedPipe::at(&memory, number as u64 * room, words).unwrap();
    let end = |side: usize| {
        std::array::from_fn(|stream| Pipes {
            outgoing: pipe(2 * stream + side),
            incoming: pipe(2 * stream + 1 - side),
        })
    };
    let pipes = [end(0), end(1)];
    ([near, far].map(|side| side.try_into().unwrap()), pipes, memory)
}

fn wire_pair() -> (Wire, Wire) {
    let [[near], [far]] = wires(WORDS);
    (near, far)
}

fn send(wire: &mut Wire, bytes: &[u8]) -> io::Result<()> {
    let (first, second) = bytes.split_at(bytes.len() / 2 / WORD_BYTES * WORD_BYTES);
    // SAFETY: borrowed as long as the call.
    unsafe {
        wire.send([
            segment(first.as_ptr(), first.len()),
            segment(second.as_ptr(), second.len()),
        ])
    }
}

fn receive(wire: &mut Wire, most: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; most];
    // SAFETY: borrowed as long as the call.
    let count = unsafe { wire.receive([segment(bytes.as_mut_ptr(), most), EMPTY_SEGMENT]) }?;
    Ok(count.map(|count| {
        bytes.truncate(count);
        bytes
    }))
}

/// Sleeps as a page server does. Returns false if nothing arrived in 20 s.
fn sleep(wire: &mut Wire) -> bool {
    if wire.prepare_to_sleep() {
        let mut wait = [PollFd::new(wire.socket.as_fd(), PollFlags::POLLIN)];
        if poll(&mut wait, PollTimeout::from(20_000_u16)) != Ok(1) {
            return false;
        }
        wire.fill();
    }
    wire.unblocked();
    true
}

fn next(wire: &mut Wire, most: usize) -> Vec<u8> {
    loop {
        match receive(wire, most).unwrap() {
            Some(bytes) => return bytes,
            None => assert!(sleep(wire), "a bell that did not come"),
        }
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    let words = (0..(bytes / WORD_BYTES) as u64).flat_map(|word| (word * 0x9e37_79b9).to_le_bytes());
    words.collect()
}

#[test]
fn no_doorbell_is_sent_while_the_reader_polls() {
    let (mut near, mut far) = wire_pair();
    assert_eq!(receive(&mut far, 64).unwrap(), None);
    send(&mut near, &pattern(80)).unwrap();
    let mut wait = [PollFd::new(far.socket.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut wait, PollTimeout::ZERO), Ok(0));
    far.poll_streams();
    assert_eq!(receive(&mut far, 64).unwrap().unwrap(), pattern(80)[..64]);
    assert_eq!(receive(&mut far, 64).unwrap().unwrap(), pattern(80)[64..]);
    assert_eq!(receive(&mut far, 64).unwrap(), None);
}

#[test]
fn pending_bytes_prevent_sleep_and_a_sleeper_gets_a_doorbell() {
    let (mut near, mut far) = wire_pair();
    send(&mut near, &[1; 16]).unwrap();
    assert!(!far.prepare_to_sleep());
    assert_eq!(receive(&mut far, 64).unwrap(), Some(vec![1; 16]));
    assert!(far.prepare_to_sleep());
    send(&mut near, &[2; 16]).unwrap();
    let mut wait = [PollFd::new(far.socket.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut wait, PollTimeout::from(20_000_u16)), Ok(1));
    far.unblocked();
    far.fill();
    assert_eq!(receive(&mut far, 64).unwrap(), Some(vec![2; 16]));
    assert_eq!(receive(&mut far, 64).unwrap(), None, "the bell is no bytes");
    assert!(far.prepare_to_sleep());
    let mut wait = [PollFd::new(far.socket.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut wait, PollTimeout::ZERO), Ok(0), "it was heard");
}

/// Each end sleeps before each message except some, which arrive while it polls.
#[test]
fn no_wakeup_is_lost_in_a_hundred_thousand_replies() {
    const TIMES: u64 = 100_000;
    let (mut near, mut far) = wire_pair();
    let answering = thread::spawn(move || {
        for _ in 0..TIMES {
            let asked = next(&mut far, 16);
            send(&mut far, &asked).unwrap();
        }
    });
    for number in 0..TIMES {
        let asked = [number.to_le_bytes(), number.to_be_bytes()].concat();
        send(&mut near, &asked).unwrap();
        assert_eq!(next(&mut near, 16), asked);
    }
    answering.join().unwrap();
}

/// Page servers must not wait for each other: each sends, and only then reads.
#[test]
fn both_ends_can_send_more_than_a_pipe_holds_before_reading() {
    const BYTES: usize = 40 * WORDS * WORD_BYTES;
    let (mut near, mut far) = wire_pair();
    let sent = pattern(BYTES);
    for wire in [&mut near, &mut far] {
        for piece in sent.chunks(5 * WORD_BYTES) {
            send(wire, piece).unwrap();
        }
    }
    let reading = |mut wire: Wire| {
        move || {
            let mut came = Vec::new();
            while came.len() < BYTES {
                came.extend(next(&mut wire, 1000 * WORD_BYTES));
            }
            // The backlog drains while this end sleeps, and stays until both are done.
            (wire, came)
        }
    };
    let done = std::sync::Arc::new(AtomicU64::new(0));
    let sides = [near, far].map(|wire| {
        let (read, done) = (reading(wire), done.clone());
        thread::spawn(move || {
            let (mut wire, came) = read();
            done.fetch_add(1, Ordering::SeqCst);
            while done.load(Ordering::SeqCst) < 2 {
                assert_eq!(receive(&mut wire, 64).unwrap(), None);
                thread::yield_now();
            }
            came
        })
    });
    for side in sides {
        assert!(side.join().unwrap() == sent);
    }
}

/// The writer fills its backlog and waits; the reader takes bytes, and then sleeps and is rung for, or polls
/// on.
#[test]
fn sender_blocks_for_room_and_continues() {
    const BYTES: usize = 2 * BUFFER_BYTES;
    for polls in [false, true] {
        let (mut near, mut far) = wire_pair();
        let sending = thread::spawn(move || {
            for piece in pattern(BYTES).chunks(4096) {
                send(&mut near, piece).unwrap();
            }
            // The rest is sent as room appears, though nothing else happens.
            loop {
                assert_eq!(receive(&mut near, 64).unwrap(), None);
                if near.shm.as_ref().unwrap().backlog.is_empty() {
                    return near;
                }
                assert!(sleep(&mut near), "a bell for room that did not come");
            }
        });
        let mut came = Vec::new();
        while came.len() < BYTES {
            match polls {
                true => came.extend(receive(&mut far, 4096 + 16).unwrap().unwrap_or_default()),
                false => came.extend(next(&mut far, 4096 + 16)),
            }
        }
        assert!(came == pattern(BYTES));
        sending.join().unwrap();
    }
}

#[test]
fn bytes_sent_before_the_end_are_received_before_it() {
    let (mut near, mut far) = wire_pair();
    send(&mut near, &pattern(64)).unwrap();
    drop(near);
    assert!(!far.prepare_to_sleep());
    far.fill();
    assert_eq!(receive(&mut far, 40).unwrap().unwrap(), pattern(64)[..40]);
    assert_eq!(receive(&mut far, 40).unwrap().unwrap(), pattern(64)[40..]);
    far.fill();
    for _ in 0..2 {
        assert_eq!(
            receive(&mut far, 40).unwrap_err().kind(),
            ErrorKind::UnexpectedEof
        );
    }
    assert_eq!(
        send(&mut far, &[0; 16]).unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );
}

/// Also if both arrive between a read of the pipe and one of the socket, as in some of these rounds.
#[test]
fn poller_receives_bytes_sent_just_before_the_end() {
    for round in 0..300_u64 {
        let (mut near, mut far) = wire_pair();
        let sending = thread::spawn(move || {
            // Sometimes later, as the poller takes time to begin.
            (0..round % 200 * 20).for_each(|_| std::hint::spin_loop());
            send(&mut near, &[7; 16]).unwrap();
        });
        let mut came = None;
        let end = loop {
            far.fill();
            match receive(&mut far, 16) {
                Ok(None) => {}
                Ok(Some(bytes)) => came = Some(bytes),
                Err(error) => break error,
            }
        };
        assert_eq!(came, Some(vec![7; 16]), "{end} in round {round}");
        sending.join().unwrap();
    }
}

#[test]
fn end_of_the_connection_wakes_a_sleeping_reader_and_a_blocked_writer() {
    let (near, mut far) = wire_pair();
    let shutdown = thread::spawn(move || {
        thread::sleep(std::time::Duration::from_millis(50));
        drop(near);
    });
    assert!(sleep(&mut far));
    assert_eq!(
        receive(&mut far, 40).unwrap_err().kind(),
        ErrorKind::UnexpectedEof
    );
    shutdown.join().unwrap();
    let (near, mut far) = wire_pair();
    let shutdown = thread::spawn(move || {
        thread::sleep(std::time::Duration::from_millis(50));
        drop(near);
    });
    let error = loop {
        if let Err(error) = send(&mut far, &[0; 1 << 16]) {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    shutdown.join().unwrap();
}

#[test]
fn corrupt_pipe_is_an_error_and_prevents_sleep() {
    let ([_near_socket, [socket]], [_, [pipes]], memory) = segments::<1>(WORDS);
    let mut far = Wire::new(socket, Some(pipes));
    // The writer's position of the first pipe, which is the far end's incoming one.
    nix::sys::uio::pwrite(&memory, &u64::MAX.to_le_bytes(), 0).unwrap();
    assert!(!far.prepare_to_sleep());
    assert_eq!(receive(&mut far, 16).unwrap_err().kind(), ErrorKind::InvalidData);
}
