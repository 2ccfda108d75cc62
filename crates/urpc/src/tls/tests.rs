//! Two hosts on the loopback, and a third that is not of theirs.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;

const LIMIT: Duration = Duration::from_secs(20);

fn keys() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path(), ["alpha", "beta"]).unwrap();
    folder
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// A stream from alpha to beta: both ends, and whom beta sees.
fn pair() -> (UnixStream, UnixStream, Peer) {
    let folder = keys();
    let alpha = Identity::load(folder.path(), "alpha").unwrap();
    let beta = Identity::load(folder.path(), "beta").unwrap();
    let (listener, address) = listener();
    let taken = std::thread::spawn(move || beta.accept(listener.accept().unwrap().0, LIMIT).unwrap());
    let near = alpha.connect(address, "beta", LIMIT).unwrap();
    let (far, peer) = taken.join().unwrap();
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
    }
    (near, far, peer)
}

#[test]
fn bytes_go_both_ways_at_once_and_the_end_is_seen() {
    let (near, far, peer) = pair();
    assert!(peer.is("alpha") && !peer.is("beta") && !peer.is("not a name"));
    let bytes: Vec<u8> = (0..4_000_000_u32).map(|number| (number * 7 / 8) as u8).collect();
    let send = |mut stream: UnixStream, bytes: Vec<u8>| {
        std::thread::spawn(move || stream.write_all(&bytes).unwrap())
    };
    let receive = |mut stream: UnixStream, count: usize| {
        std::thread::spawn(move || {
            let mut read = vec![0; count];
            stream.read_exact(&mut read).unwrap();
            read
        })
    };
    let senders = [
        send(near.try_clone().unwrap(), bytes.clone()),
        send(far.try_clone().unwrap(), bytes.clone()),
    ];
    let receivers = [
        receive(near.try_clone().unwrap(), bytes.len()),
        receive(far.try_clone().unwrap(), bytes.len()),
    ];
    senders.into_iter().for_each(|sender| sender.join().unwrap());
    for receiver in receivers {
        assert!(receiver.join().unwrap() == bytes);
    }
    // What was written before the end still comes.
    (&near).write_all(b"last").unwrap();
    near.shutdown(Shutdown::Both).unwrap();
    let mut rest = Vec::new();
    (&far).read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"last");
}

#[test]
fn a_reader_that_is_slow_loses_nothing() {
    let (near, far, _) = pair();
    let sender = std::thread::spawn(move || {
        for number in 0..200_000_u32 {
            (&near).write_all(&number.to_le_bytes()).unwrap();
        }
    });
    std::thread::sleep(Duration::from_millis(200));
    let mut read = Vec::new();
    (&far).read_to_end(&mut read).unwrap();
    sender.join().unwrap();
    let expected: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    assert!(read == expected);
}

#[test]
fn a_stranger_and_another_host_than_meant_are_refused() {
    let (ours, theirs) = (keys(), keys());
    let beta = Identity::load(ours.path(), "beta").unwrap();
    let (listener, address) = listener();
    let taken = std::thread::spawn(move || {
        (0..2)
            .map(|_| beta.accept(listener.accept().unwrap().0, LIMIT).is_ok())
            .collect::<Vec<_>>()
    });
    let stranger = Identity::load(theirs.path(), "alpha").unwrap();
    assert!(stranger.connect(address, "beta", LIMIT).is_err());
    let alpha = Identity::load(ours.path(), "alpha").unwrap();
    assert!(alpha.connect(address, "alpha", LIMIT).is_err());
    assert_eq!(taken.join().unwrap(), [false, false]);
}

#[test]
fn hosts_can_be_added_and_missing_keys_are_named() {
    let folder = keys();
    let before = std::fs::read(folder.path().join("alpha.pem")).unwrap();
    make(folder.path(), ["alpha", "gamma"]).unwrap();
    assert_eq!(std::fs::read(folder.path().join("alpha.pem")).unwrap(), before);
    Identity::load(folder.path(), "gamma").unwrap();
    let error = Identity::load(folder.path(), "delta").unwrap_err().to_string();
    assert!(
        error.contains("delta.pem") && error.contains("mirrorball cluster keys"),
        "{error}"
    );
    std::fs::write(folder.path().join("gamma.key"), "nonsense").unwrap();
    let error = Identity::load(folder.path(), "gamma").unwrap_err().to_string();
    assert!(error.contains("gamma.key"), "{error}");
}
