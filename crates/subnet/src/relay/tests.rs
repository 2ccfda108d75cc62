use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::frames::FRAME_BYTES_MAX;
use super::*;
use crate::listing::{AGE_MAX, HOLD_MAX};
use crate::process::Count;
use crate::samples::{SYN, TCP, UDP, address, frame, message, tcp, udp};

const CLUSTER: &str = "198.51.100.3";
/// An address that no list has at first.
const OTHER: &str = "203.0.113.1";
const LIMIT: Duration = Duration::from_secs(10);

/// A relay on a thread, with the other ends of its sockets.
struct Running {
    card: UnixStream,
    passt: UnixStream,
    lists: OwnedFd,
    count: Count,
    thread: JoinHandle<End>,
}

fn barred(cluster: &[&str]) -> Barred {
    Barred {
        cluster: cluster.iter().map(|text| address(text)).collect(),
        ..Barred::default()
    }
}

/// Starts a relay with a list of this age.
fn relay_of_age(udp_ports: &[u16], age: Duration) -> Running {
    let (card, near_card) = UnixStream::pair().unwrap();
    let (passt, near_passt) = UnixStream::pair().unwrap();
    let kind = SockType::SeqPacket;
    let (lists, near_lists) = socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let count = Count::new().unwrap();
    let sockets = Sockets {
        card: near_card.into(),
        passt: near_passt.into(),
        lists: near_lists,
        count: count.as_fd().try_clone_to_owned().unwrap().into(),
    };
    let list = barred(&[CLUSTER]);
    let mut relay = Relay::new(sockets, list.clone(), Resolvers::default(), udp_ports.to_vec());
    relay.listing = Listing::new(list, Instant::now().checked_sub(age).unwrap());
    card.set_read_timeout(Some(LIMIT)).unwrap();
    passt.set_read_timeout(Some(LIMIT)).unwrap();
    Running {
        card,
        passt,
        lists,
        count,
        thread: std::thread::spawn(move || relay.run().unwrap()),
    }
}

fn relay(udp_ports: &[u16]) -> Running {
    relay_of_age(udp_ports, Duration::ZERO)
}

fn syn(to: &str, port: u16) -> Vec<u8> {
    frame(address("10.0.2.15"), address(to), TCP, &tcp(port, 2379, SYN))
}

fn receive(mut from: &UnixStream) -> Vec<u8> {
    let mut length = [0; LENGTH_BYTES];
    from.read_exact(&mut length).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(length) as usize];
    from.read_exact(&mut frame).unwrap();
    frame
}

fn is_at_end(mut stream: &UnixStream) -> bool {
    stream.read(&mut [0]).unwrap() == 0
}

/// Waits for the count: it is written after the frames that were read together.
fn expect_count(count: &Count, expected: u64) {
    let deadline = Instant::now() + LIMIT;
    while count.get() != expected && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(count.get(), expected);
}

#[test]
fn frames_to_the_cluster_are_dropped_and_counted_and_the_rest_keeps_its_order() {
    let Running {
        card, passt, count, ..
    } = &relay(&[]);
    let mut stream = Vec::new();
    for port in 0..200 {
        stream.extend(message(&syn(CLUSTER, port)));
        stream.extend(message(&syn(OTHER, port)));
    }
    // In pieces of arbitrary lengths.
    let mut writer = card;
    for piece in stream.chunks(37) {
        writer.write_all(piece).unwrap();
    }
    for port in 0..200 {
        assert_eq!(receive(passt), syn(OTHER, port));
    }
    expect_count(count, 200);
}

#[test]
fn frames_of_any_size_reach_the_card_unchanged() {
    let running = relay(&[]);
    let frames: Vec<Vec<u8>> = [14, 60, 1514, 65_535, FRAME_BYTES_MAX, 100]
        .map(|length| (0..length).map(|place| (place % 251) as u8).collect())
        .into();
    let stream: Vec<u8> = frames.iter().flat_map(|frame| message(frame)).collect();
    let Running { card, passt, .. } = &running;
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let mut passt = passt;
            passt.write_all(&stream)
        });
        for expected in &frames {
            assert!(receive(card) == *expected, "{} bytes", expected.len());
        }
        sender.join().unwrap().unwrap();
    });
}

#[test]
fn a_peer_of_a_forwarded_udp_port_is_answered() {
    let Running {
        card, passt, count, ..
    } = &relay(&[53]);
    let (mut to_passt, mut to_card) = (card, passt);
    let guest = address("10.0.2.15");
    let answer = frame(guest, address(CLUSTER), UDP, &udp(53, 5000, b"!"));
    to_passt.write_all(&message(&answer)).unwrap();
    to_passt.write_all(&message(&syn(OTHER, 1))).unwrap();
    assert_eq!(receive(passt), syn(OTHER, 1));
    expect_count(count, 1);
    let question = frame(address(CLUSTER), guest, UDP, &udp(5000, 53, b"?"));
    to_card.write_all(&message(&question)).unwrap();
    assert_eq!(receive(card), question);
    to_passt.write_all(&message(&answer)).unwrap();
    assert_eq!(receive(passt), answer);
}

#[test]
fn the_end_of_either_side_ends_both() {
    let Running {
        card, passt, thread, ..
    } = relay(&[]);
    drop(card);
    assert!(is_at_end(&passt));
    assert_eq!(thread.join().unwrap(), End::Card);
    let Running {
        card, passt, thread, ..
    } = relay(&[]);
    drop(passt);
    assert!(is_at_end(&card));
    assert_eq!(thread.join().unwrap(), End::Passt);
    // With any bytes still to be sent.
    let Running {
        card, passt, thread, ..
    } = relay(&[]);
    fill(&card, &syn(OTHER, 1));
    fill(&passt, &syn(OTHER, 1));
    drop(card);
    assert_eq!(thread.join().unwrap(), End::Card);
    drop(passt);
}

/// Sends `frame` repeatedly until its receiver is full, and has had time to make room.
fn fill(to: &UnixStream, frame: &[u8]) {
    to.set_nonblocking(true).unwrap();
    let (mut to, message) = (to, message(frame));
    let mut refused = 0;
    while refused < 20 {
        match to.write(&message) {
            // The rest of a partial frame is never sent: the receiver must not read it.
            Ok(count) => refused = if count == message.len() { 0 } else { 20 },
            Err(_) => refused += 1,
        }
        if refused > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    to.set_nonblocking(false).unwrap();
}

#[test]
fn blocked_direction_does_not_block_the_other() {
    let incoming = frame(address(OTHER), address("10.0.2.15"), TCP, &tcp(80, 1, SYN));
    let stuck = relay(&[]);
    fill(&stuck.card, &syn(OTHER, 1));
    (&stuck.passt).write_all(&message(&incoming)).unwrap();
    assert_eq!(receive(&stuck.card), incoming);
    let stuck = relay(&[]);
    fill(&stuck.passt, &incoming);
    (&stuck.card).write_all(&message(&syn(OTHER, 2))).unwrap();
    assert_eq!(receive(&stuck.passt), syn(OTHER, 2));
}

#[test]
fn a_length_that_no_frame_has_ends_both() {
    for length in [0, FRAME_BYTES_MAX as u32 + 1, u32::MAX] {
        let broken = |from_card: bool| {
            let Running {
                card, passt, thread, ..
            } = relay(&[]);
            let mut sender = if from_card { &card } else { &passt };
            sender.write_all(&length.to_be_bytes()).unwrap();
            assert!(is_at_end(&passt) && is_at_end(&card), "{length}");
            thread.join().unwrap()
        };
        assert_eq!(broken(true), End::CardBroken);
        assert_eq!(broken(false), End::PasstBroken);
    }
}

#[test]
fn frames_wait_for_the_reply_when_the_list_is_old() {
    let Running {
        card,
        passt,
        lists,
        count,
        ..
    } = &relay_of_age(&[], AGE_MAX * 2);
    let mut to_passt = card;
    let answer = |bytes: &[u8]| send(lists.as_raw_fd(), bytes, MsgFlags::empty()).unwrap();
    to_passt.write_all(&message(&syn(OTHER, 1))).unwrap();
    let mut asked = [0; 8];
    assert_eq!(recv(lists.as_raw_fd(), &mut asked, MsgFlags::empty()), Ok(1));
    answer(&Message::list(&barred(&[OTHER])).unwrap());
    to_passt.write_all(&message(&syn(CLUSTER, 2))).unwrap();
    assert_eq!(receive(passt), syn(CLUSTER, 2));
    expect_count(count, 1);
    // A current list is not requested again.
    let refused = recv(lists.as_raw_fd(), &mut asked, MsgFlags::MSG_DONTWAIT);
    assert_eq!(refused, Err(Errno::EAGAIN));
}

#[test]
fn list_stays_as_it_is_when_its_sender_is_gone() {
    let Running {
        card,
        passt,
        lists,
        count,
        ..
    } = relay_of_age(&[], AGE_MAX * 2);
    drop(lists);
    let mut to_passt = &card;
    for port in 0..3 {
        to_passt.write_all(&message(&syn(CLUSTER, port))).unwrap();
        to_passt.write_all(&message(&syn(OTHER, port))).unwrap();
        assert_eq!(receive(&passt), syn(OTHER, port));
    }
    expect_count(&count, 3);
}

#[test]
fn request_without_a_reply_holds_frames_for_a_limited_time() {
    let Running {
        card, passt, lists, ..
    } = relay_of_age(&[], AGE_MAX * 2);
    let started = Instant::now();
    let mut to_passt = &card;
    to_passt.write_all(&message(&syn(OTHER, 1))).unwrap();
    assert_eq!(receive(&passt), syn(OTHER, 1));
    assert!(started.elapsed() >= HOLD_MAX, "{:?}", started.elapsed());
    drop(lists);
}
