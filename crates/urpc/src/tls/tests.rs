//! Tests of two hosts on the loopback, and a third one of another cluster.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime};

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

/// Opens a stream from alpha to beta; returns both ends, and the peer that beta sees.
fn pair() -> (UnixStream, UnixStream, Peer) {
    let folder = keys();
    let alpha = Identity::load(folder.path(), "alpha").unwrap();
    let beta = Identity::load(folder.path(), "beta").unwrap();
    let (listener, address) = listener();
    let taken = std::thread::spawn(move || {
        let tcp = listener.accept().unwrap().0;
        beta.accept(tcp, Deadline::after(LIMIT)).unwrap()
    });
    let near = alpha.connect(address, "beta", LIMIT).unwrap();
    let (far, peer) = taken.join().unwrap();
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
    }
    (near, far, peer)
}

#[test]
fn bytes_flow_both_ways_and_end_of_stream_is_reported() {
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
    // Bytes written before the end still arrive.
    (&near).write_all(b"last").unwrap();
    near.shutdown(Shutdown::Both).unwrap();
    let mut rest = Vec::new();
    (&far).read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"last");
}

#[test]
fn slow_reader_loses_no_bytes() {
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
fn unknown_and_unexpected_hosts_are_refused() {
    let (ours, theirs) = (keys(), keys());
    let beta = Identity::load(ours.path(), "beta").unwrap();
    let (listener, address) = listener();
    let taken = std::thread::spawn(move || {
        (0..2)
            .map(|_| {
                let tcp = listener.accept().unwrap().0;
                beta.accept(tcp, Deadline::after(LIMIT)).is_ok()
            })
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

const DAY: Duration = Duration::from_secs(24 * 3600);

#[test]
fn certificate_is_valid_for_a_year_and_renewal_replaces_the_key() {
    let folder = keys();
    let key = || std::fs::read(folder.path().join("alpha.key")).unwrap();
    let authority = || std::fs::read(folder.path().join("authority.pem")).unwrap();
    let left = || {
        let alpha = Identity::load(folder.path(), "alpha").unwrap();
        alpha.end().duration_since(SystemTime::now()).unwrap()
    };
    assert!(left() > VALID - DAY && left() <= VALID, "{:?}", left());
    let issuer = keys::authority(folder.path()).unwrap();
    let soon = SystemTime::now() + DAY;
    keys::issue(folder.path(), &issuer, &"alpha".into(), soon).unwrap();
    assert!(left() <= DAY);
    let (old_key, old_authority) = (key(), authority());
    make(folder.path(), ["alpha"]).unwrap();
    assert_eq!(key(), old_key, "only missing keys are made");
    renew(folder.path(), ["alpha"]).unwrap();
    assert!(left() > VALID - DAY && key() != old_key && authority() == old_authority);
}

#[test]
fn expired_certificate_is_refused_with_renewal_help() {
    let folder = keys();
    let valid = Identity::load(folder.path(), "alpha").unwrap();
    let issuer = keys::authority(folder.path()).unwrap();
    let past = SystemTime::now() - 3 * DAY;
    keys::issue(folder.path(), &issuer, &"beta".into(), past).unwrap();
    let error = Identity::load(folder.path(), "beta").unwrap_err().to_string();
    assert!(
        error.contains("beta.pem: this certificate ended 3 days ago")
            && error.contains("help: run `mirrorball cluster keys FILE --renew`"),
        "{error}"
    );
    // A process that loaded its keys earlier runs on, and no other host accepts it.
    let end = SystemTime::now() + Duration::from_secs(2);
    keys::issue(folder.path(), &issuer, &"beta".into(), end).unwrap();
    let beta = Identity::load(folder.path(), "beta").unwrap();
    std::thread::sleep(Duration::from_secs(4));
    let server = Identity {
        end: SystemTime::now() + DAY,
        ..beta.clone()
    };
    let (listener, address) = listener();
    let taken = std::thread::spawn(move || {
        let tcp = listener.accept().unwrap().0;
        server.accept(tcp, Deadline::after(LIMIT)).is_err()
    });
    let error = valid.connect(address, "beta", LIMIT).unwrap_err();
    assert!(
        matches!(&error, TlsError::PeerEnded(host) if host == "beta"),
        "{error}"
    );
    assert!(taken.join().unwrap());
    let error = beta.connect(address, "alpha", LIMIT).unwrap_err();
    assert!(matches!(error, TlsError::Ended { .. }), "{error}");
}

/// Returns how long a connection that sends `bytes`, one every 50 ms, is kept without authentication.
fn kept(bytes: &'static [u8], limit: Duration) -> Duration {
    let folder = keys();
    let beta = Identity::load(folder.path(), "beta").unwrap();
    let (listener, address) = listener();
    let caller = std::thread::spawn(move || {
        let mut tcp = std::net::TcpStream::connect(address).unwrap();
        for byte in bytes {
            std::thread::sleep(Duration::from_millis(50));
            if tcp.write_all(&[*byte]).is_err() {
                return;
            }
        }
        let _ = tcp.read(&mut [0]);
    });
    let tcp = listener.accept().unwrap().0;
    let since = Instant::now();
    let error = beta.accept(tcp, Deadline::after(limit)).unwrap_err();
    assert!(
        matches!(&error, TlsError::Io(error) if error.kind() == io::ErrorKind::TimedOut),
        "{error}"
    );
    let kept = since.elapsed();
    caller.join().unwrap();
    kept
}

#[test]
fn silent_connection_is_closed_at_the_deadline() {
    let limit = Duration::from_millis(500);
    let kept = kept(b"", limit);
    assert!(kept >= limit && kept < LIMIT, "{kept:?}");
}

#[test]
fn slow_trickle_connection_is_closed_at_the_deadline() {
    // The first record of a handshake of 16 KiB, which never arrives completely: 10 s of bytes.
    const BYTES: [u8; 200] = {
        let mut bytes = [1; 200];
        (bytes[0], bytes[1], bytes[2], bytes[3], bytes[4]) = (22, 3, 1, 64, 0);
        bytes
    };
    let limit = Duration::from_millis(500);
    let kept = kept(&BYTES, limit);
    assert!(kept >= limit && kept < Duration::from_secs(5), "{kept:?}");
}

/// Greatest time until a stream of a revoked host ends: two checks of the list, and the delay of a busy
/// machine.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// Opens a stream from alpha to beta with the keys in a folder; returns the error of the side that refuses.
fn connected(folder: &std::path::Path) -> Result<(UnixStream, UnixStream), TlsError> {
    let alpha = Identity::load(folder, "alpha")?;
    let beta = Identity::load(folder, "beta")?;
    meet(&alpha, &beta)
}

fn meet(alpha: &Identity, beta: &Identity) -> Result<(UnixStream, UnixStream), TlsError> {
    let (listener, address) = listener();
    let beta = beta.clone();
    let taken = std::thread::spawn(move || {
        let tcp = listener.accept().unwrap().0;
        beta.accept(tcp, Deadline::after(LIMIT))
    });
    let near = alpha.connect(address, "beta", LIMIT);
    let (far, _) = taken.join().unwrap()?;
    let near = near?;
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
    }
    Ok((near, far))
}

#[test]
fn revoked_host_is_refused_and_its_streams_end_within_a_second() {
    let folder = keys();
    let alpha = Identity::load(folder.path(), "alpha").unwrap();
    let beta = Identity::load(folder.path(), "beta").unwrap();
    // Both sides check the list: either may close the stream.
    let (near, far) = meet(&alpha, &beta).unwrap();
    make(folder.path(), ["gamma"]).unwrap();
    let gamma = Identity::load(folder.path(), "gamma").unwrap();
    let (mut kept, other) = meet(&gamma, &beta).unwrap();
    let list = revoke(folder.path(), "alpha").unwrap();
    assert_eq!(list, revocation_list(folder.path()));
    let since = Instant::now();
    for mut stream in [near, far] {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    assert!(since.elapsed() < CLOSED_WITHIN, "{:?}", since.elapsed());
    let refused = meet(&alpha, &beta).unwrap_err().to_string();
    assert!(
        refused.starts_with("the certificate of the caller has been revoked; help: "),
        "{refused}"
    );
    // Streams of other hosts stay open.
    (&other).write_all(b"x").unwrap();
    assert_eq!(kept.read(&mut [0]).unwrap(), 1);
    meet(&gamma, &beta).unwrap();
}

#[test]
fn caller_refuses_a_revoked_host() {
    let folder = keys();
    let alpha = Identity::load(folder.path(), "alpha").unwrap();
    let beta = Identity::load(folder.path(), "beta").unwrap();
    revoke(folder.path(), "beta").unwrap();
    let (listener, address) = listener();
    let taken = std::thread::spawn(move || {
        let tcp = listener.accept().unwrap().0;
        let _ = beta.accept(tcp, Deadline::after(LIMIT));
    });
    let error = alpha.connect(address, "beta", LIMIT).unwrap_err();
    assert!(
        matches!(&error, TlsError::Revoked(host) if host == "beta"),
        "{error}"
    );
    taken.join().unwrap();
}

#[test]
fn all_certificates_of_a_removed_host_are_revoked_and_a_new_one_is_valid() {
    let folder = keys();
    let copy = |from: &std::path::Path, to: &std::path::Path, names: &[&str]| {
        for name in names {
            std::fs::copy(from.join(name), to.join(name)).unwrap();
        }
    };
    let old = tempfile::tempdir().unwrap();
    copy(
        folder.path(),
        old.path(),
        &["authority.pem", "alpha.pem", "alpha.key", "beta.pem", "beta.key"],
    );
    renew(folder.path(), ["alpha"]).unwrap();
    let renewed = tempfile::tempdir().unwrap();
    copy(
        folder.path(),
        renewed.path(),
        &["authority.pem", "alpha.pem", "alpha.key", "beta.pem", "beta.key"],
    );
    // Without a list in their folders both are valid.
    connected(old.path()).unwrap();
    connected(renewed.path()).unwrap();
    revoke(folder.path(), "alpha").unwrap();
    for stolen in [&old, &renewed] {
        copy(folder.path(), stolen.path(), &["revoked.crl"]);
        let error = Identity::load(stolen.path(), "alpha").unwrap_err();
        assert!(
            matches!(&error, TlsError::Revoked(host) if host == "alpha"),
            "{error}"
        );
    }
    assert!(!folder.path().join("alpha.key").exists());
    // A second removal keeps the first one's revocations.
    revoke(folder.path(), "beta").unwrap();
    assert_eq!(
        revocation::serials(&revocation_list(folder.path()))
            .unwrap()
            .len(),
        3
    );
    make(folder.path(), ["alpha", "beta"]).unwrap();
    connected(folder.path()).unwrap();
    let error = revoke(folder.path(), "delta").unwrap_err().to_string();
    assert!(
        error.contains("no key of delta has been made here; help: "),
        "{error}"
    );
}

#[test]
fn invalid_revocation_list_refuses_all_peers() {
    let (ours, theirs) = (keys(), keys());
    let list = revocation_list(ours.path());
    let beta = Identity::load(ours.path(), "beta").unwrap();
    let alpha = Identity::load(ours.path(), "alpha").unwrap();
    for wrong in [
        std::fs::read(revocation_list(theirs.path())).unwrap(),
        b"nonsense".to_vec(),
    ] {
        std::fs::write(&list, wrong).unwrap();
        meet(&alpha, &beta).unwrap_err();
        let error = Identity::load(ours.path(), "alpha").unwrap_err().to_string();
        assert!(error.starts_with(&list.display().to_string()), "{error}");
    }
}

#[test]
fn certificates_are_revoked_without_an_issue_record() {
    let folder = keys();
    let record = folder.path().join("issued.txt");
    std::fs::remove_file(&record).unwrap();
    std::fs::remove_file(revocation_list(folder.path())).unwrap();
    let alpha = Identity::load(folder.path(), "alpha").unwrap();
    let beta = Identity::load(folder.path(), "beta").unwrap();
    meet(&alpha, &beta).unwrap();
    revoke(folder.path(), "alpha").unwrap();
    meet(&alpha, &beta).unwrap_err();
    std::fs::write(&record, "beta 0g\n").unwrap();
    let error = revoke(folder.path(), "beta").unwrap_err().to_string();
    assert!(error.contains("issued.txt: line 1 "), "{error}");
}

#[test]
fn fingerprint_covers_the_whole_certificate() {
    let folder = keys();
    let path = KeyFiles::of(folder.path(), "alpha").certificate;
    let own = fingerprint(&path).unwrap();
    assert_eq!(own.len(), 32 * 3 - 1);
    assert!(
        own.chars()
            .all(|c| c == ':' || c.is_ascii_digit() || ('A'..='F').contains(&c))
    );
    assert_ne!(
        own,
        fingerprint(&KeyFiles::of(folder.path(), "beta").certificate).unwrap()
    );
    renew(folder.path(), ["alpha"]).unwrap();
    assert_ne!(own, fingerprint(&path).unwrap());
    // SHA-256 of the bytes "abc" (FIPS 180-2, appendix B.1), as the one certificate of a file.
    std::fs::write(
        &path,
        "-----BEGIN CERTIFICATE-----\nYWJj\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    assert_eq!(
        fingerprint(&path).unwrap(),
        "BA:78:16:BF:8F:01:CF:EA:41:41:40:DE:5D:AE:22:23:B0:03:61:A3:96:17:7A:9C:B4:10:FF:61:F2:00:15:AD"
    );
}

const CONTEXT: &[u8] = b"one token";

#[test]
fn joined_host_proves_its_key_and_can_be_revoked() {
    let (inviting, joining) = (keys(), tempfile::tempdir().unwrap());
    let (key, request) = KeyRequest::make("gamma", CONTEXT).unwrap();
    let wrong = |host: &str, request: &KeyRequest, context: &[u8]| {
        let error = sign(inviting.path(), host, request, context).unwrap_err();
        assert!(matches!(error, TlsError::Request(_)), "{error}");
    };
    wrong("delta", &request, CONTEXT);
    wrong("gamma", &request, b"another token");
    let (_, other) = KeyRequest::make("gamma", CONTEXT).unwrap();
    let public_key = other.public_key;
    wrong(
        "gamma",
        &KeyRequest {
            public_key,
            ..request.clone()
        },
        CONTEXT,
    );
    let public_key = vec![4; 65];
    wrong(
        "gamma",
        &KeyRequest {
            public_key,
            ..request.clone()
        },
        CONTEXT,
    );
    wrong(
        "gamma",
        &KeyRequest {
            public_key: Vec::new(),
            ..request.clone()
        },
        CONTEXT,
    );
    assert!(!has_issued(inviting.path(), "gamma").unwrap());

    let certificate = sign(inviting.path(), "gamma", &request, CONTEXT).unwrap();
    assert!(has_issued(inviting.path(), "gamma").unwrap());
    let authority = authority_digest(inviting.path()).unwrap().1;
    let revoked = std::fs::read_to_string(revocation_list(inviting.path())).unwrap();
    let texts = JoinedTexts {
        certificate: &certificate,
        authority: &authority,
        revoked: &revoked,
    };
    write_joined(joining.path(), "gamma", &key, &texts).unwrap();
    let gamma = Identity::load(joining.path(), "gamma").unwrap();
    let alpha = Identity::load(inviting.path(), "alpha").unwrap();
    let (listener, address) = listener();
    let taken = std::thread::spawn(move || {
        let tcp = listener.accept().unwrap().0;
        gamma.accept(tcp, Deadline::after(LIMIT)).unwrap()
    });
    let mut near = alpha.connect(address, "gamma", LIMIT).unwrap();
    let (far, peer) = taken.join().unwrap();
    assert!(peer.is("alpha") && !peer.is("gamma"));
    near.set_read_timeout(Some(LIMIT)).unwrap();

    // The list reaches the hosts as text. It ends the open link.
    let list = std::fs::read_to_string(revoke(inviting.path(), "gamma").unwrap()).unwrap();
    let revoked_at = Instant::now();
    assert_eq!(near.read(&mut [0]).unwrap(), 0);
    assert!(
        revoked_at.elapsed() < Duration::from_secs(1),
        "{:?}",
        revoked_at.elapsed()
    );
    drop(far);
    replace_revocation_list(joining.path(), "gamma", &list).unwrap();
    let error = Identity::load(joining.path(), "gamma").unwrap_err();
    assert!(matches!(error, TlsError::Revoked(_)), "{error}");
}

#[test]
fn invalid_foreign_or_older_list_replaces_none() {
    let (here, other) = (keys(), keys());
    let read = |folder: &Path| std::fs::read_to_string(revocation_list(folder)).unwrap();
    let empty = read(here.path());
    revoke(here.path(), "beta").unwrap();
    let full = read(here.path());
    revoke(other.path(), "beta").unwrap();
    for (text, why) in [
        (read(other.path()), "has not signed it"),
        (empty.clone(), "is older"),
        ("nonsense".to_owned(), "it is not one list"),
        (format!("{full}{empty}"), "it is not one list"),
    ] {
        let error = replace_revocation_list(here.path(), "alpha", &text)
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(read(here.path()), full);
    }
    replace_revocation_list(here.path(), "alpha", &full).unwrap();
}

#[test]
fn pinned_caller_connects_only_to_its_authority() {
    let (inviting, other) = (keys(), keys());
    let inviter = Inviter::open(inviting.path()).unwrap();
    let digest = authority_digest(other.path()).unwrap().0;
    let (listener, address) = listener();
    let authority = inviter.authority;
    let taken = std::thread::spawn(move || {
        let refused = inviter.accept(listener.accept().unwrap().0, Deadline::after(LIMIT));
        assert!(refused.is_err(), "{refused:?}");
        let mut exchange = inviter
            .accept(listener.accept().unwrap().0, Deadline::after(LIMIT))
            .unwrap();
        let said = exchange.receive().unwrap();
        exchange.send(&said).unwrap();
    });
    let error = Exchange::call(address, digest, LIMIT).unwrap_err().to_string();
    assert!(error.contains("another cluster's authority"), "{error}");
    let mut exchange = Exchange::call(address, authority, LIMIT).unwrap();
    let long: Vec<u8> = (0..200_000_u32).map(|number| number as u8).collect();
    exchange.send(&long).unwrap();
    assert_eq!(exchange.receive().unwrap(), long);
    taken.join().unwrap();
    assert!(Inviter::open(Path::new("/nowhere")).is_err());
}
