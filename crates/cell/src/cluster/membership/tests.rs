//! Against a real etcd on the loopback.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};

use data_encoding::BASE64;
use serde_json::{Value, json};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use urpc::tls::Subject;

use super::etcd::Etcd as Client;
use super::*;
use loopback::Etcd;

/// Etcd on the loopback, for the tests of two hosts, too.
#[path = "../../../tests/hosts/etcd.rs"]
mod loopback;

const LIMIT: Duration = Duration::from_secs(60);

struct Server {
    etcd: Etcd,
    _data: tempfile::TempDir,
    site: Site,
}

fn server() -> Server {
    server_called("127.0.0.1")
}

/// An etcd whose certificate is valid for one name or address.
fn server_called(name: &str) -> Server {
    let data = tempfile::tempdir().unwrap();
    let keys = data.path().join("keys");
    let own = Subject {
        file: "etcd".to_owned(),
        names: vec![name.to_owned()],
    };
    urpc::tls::make(&keys, ["here".into(), own]).unwrap();
    urpc::tls::make(&keys, ["gone"]).unwrap();
    let etcd = Etcd::start(|url| server::command(url, &keys, data.path()));
    let site = Site {
        here: "here".into(),
        hosts: Vec::new(),
        etcd: vec![etcd.url.clone()],
        runs_etcd: false,
        keys,
        silence_ms: 200,
        spans: Default::default(),
        on_lost: config::cluster::OnLost::Keep,
        file: None,
    };
    Server {
        etcd,
        _data: data,
        site,
    }
}

/// Enters a cell whose host has no record of an earlier incarnation.
fn join(site: &Site, number: u16) -> Membership {
    Membership::join(site, number, 0, || false).unwrap().unwrap()
}

fn run(membership: Membership) -> (Sender<CellId>, Receiver<MembershipEvent>) {
    let (suspect, suspects) = mpsc::channel();
    let (tell, news) = mpsc::channel();
    std::thread::spawn(move || membership.run(&suspects, |changed| _ = tell.send(changed), |_| ()));
    (suspect, news)
}

#[test]
fn suspected_cell_is_dead_for_all_and_learns_it_itself() {
    let server = server();
    let first = join(&server.site, 0);
    let second = join(&server.site, 1);
    let third = join(&server.site, 2);
    assert_eq!(first.me, CellId { number: 0, life: 1 });
    assert_eq!(third.members, [(0, 1), (1, 1), (2, 1)].into());
    let victim = second.me;
    // As if it had joined last.
    let first = Membership {
        members: third.members.clone(),
        ..first
    };
    let (suspect, first_news) = run(first);
    let (accuse, second_news) = run(second);
    let (_keep_third, third_news) = run(third);
    suspect.send(CellId { number: 1, life: 7 }).unwrap();
    assert!(
        first_news.recv_timeout(POLL_INTERVAL_MIN * 5).is_err(),
        "another life is not meant"
    );
    suspect.send(victim).unwrap();
    assert_eq!(first_news.recv_timeout(LIMIT), Ok(MembershipEvent::Died(victim)));
    assert_eq!(third_news.recv_timeout(LIMIT), Ok(MembershipEvent::Died(victim)));
    assert_eq!(second_news.recv_timeout(LIMIT), Ok(MembershipEvent::Evicted));
    // A dead cell accuses no other.
    accuse.send(CellId { number: 0, life: 1 }).unwrap();
    assert!(third_news.recv_timeout(POLL_INTERVAL_MIN * 5).is_err());
    let again = join(&server.site, 1);
    assert_eq!((again.me.life, again.members.len()), (2, 3));
}

#[test]
fn silent_cell_dies_after_its_lease_and_a_new_incarnation_ends_the_old_one() {
    let server = server();
    let first = join(&server.site, 0);
    let silent = join(&server.site, 1);
    let replaced = join(&server.site, 2);
    let (over, old) = (silent.me, replaced.me);
    let first = Membership {
        members: replaced.members.clone(),
        ..first
    };
    let (_suspect, news) = run(first);
    let (_keep, old_news) = run(replaced);
    // It goes on: the silent one alone is dead at the end of its lease.
    let (_keep_new, _) = run(join(&server.site, 2));
    assert_eq!(news.recv_timeout(LIMIT), Ok(MembershipEvent::Died(old)));
    assert_eq!(old_news.recv_timeout(LIMIT), Ok(MembershipEvent::Evicted));
    assert_eq!(news.recv_timeout(LIMIT), Ok(MembershipEvent::Died(over)));
}

#[test]
fn without_etcd_no_cell_dies_and_a_cell_that_joins_waits() {
    let server = server();
    let first = join(&server.site, 0);
    let second = join(&server.site, 1);
    let victim = second.me;
    let first = Membership {
        members: second.members.clone(),
        ..first
    };
    let (suspect, news) = run(first);
    let stop = |signal: &str| {
        let pid = server.etcd.child.id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &pid])
                .status()
                .unwrap()
                .success()
        );
    };
    stop("-STOP");
    suspect.send(victim).unwrap();
    let (tell, joined) = mpsc::channel();
    let site = server.site.clone();
    std::thread::spawn(move || tell.send(join(&site, 2).me));
    assert!(news.recv_timeout(Duration::from_secs(2)).is_err());
    assert!(joined.try_recv().is_err());
    stop("-CONT");
    assert_eq!(news.recv_timeout(LIMIT), Ok(MembershipEvent::Died(victim)));
    assert_eq!(joined.recv_timeout(LIMIT), Ok(CellId { number: 2, life: 1 }));
}

#[test]
fn a_cell_looks_less_often_where_silence_may_last_long() {
    assert_eq!(poll_interval(200), POLL_INTERVAL_MIN);
    assert_eq!(poll_interval(20_000), Duration::from_secs(1));
}

/// A request that deletes all keys of cells.
fn everything() -> Value {
    let end = format!("{}0", PREFIX.trim_end_matches('/'));
    json!({ "key": BASE64.encode(PREFIX.as_bytes()), "range_end": BASE64.encode(end.as_bytes()) })
}

/// A member's channels: lost links go in, events come out.
type Ends = (Sender<CellId>, Receiver<MembershipEvent>);

/// Three cells that are linked, and their events.
fn three(server: &Server) -> ([CellId; 3], Vec<Ends>) {
    let cells = [0, 1, 2].map(|number| join(&server.site, number));
    let members = cells[2].members.clone();
    let lives = [cells[0].me, cells[1].me, cells[2].me];
    let run_among = |cell| {
        run(Membership {
            members: members.clone(),
            ..cell
        })
    };
    (lives, cells.into_iter().map(run_among).collect())
}

fn no_news(watched: &[(Sender<CellId>, Receiver<MembershipEvent>)]) {
    for (_, news) in watched {
        assert_eq!(news.try_recv(), Err(mpsc::TryRecvError::Empty));
    }
}

#[test]
fn a_stranger_without_a_certificate_can_delete_nothing() {
    let server = server();
    let (_, watched) = three(&server);
    let client = Client::new(&server.site.etcd, &KeyFiles::of(&server.site.keys, "here")).unwrap();
    let before = client.list(PREFIX).unwrap();
    assert_eq!(before.0.len(), 6);
    let secure = format!("{}/v3/kv/deleterange", server.etcd.url);
    let plain = secure.replace("https:", "http:");
    let authority = std::fs::read(KeyFiles::of(&server.site.keys, "here").authority).unwrap();
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::Specific(std::sync::Arc::new(vec![
            Certificate::from_pem(&authority).unwrap(),
        ])))
        .unversioned_rustls_crypto_provider(urpc::tls::provider())
        .build();
    let stranger: ureq::Agent = ureq::Agent::config_builder().tls_config(tls).build().into();
    for url in [secure, plain] {
        stranger.post(&url).send_json(everything()).unwrap_err();
    }
    // A key of another authority is none.
    let other = server._data.path().join("other");
    urpc::tls::make(&other, ["here"]).unwrap();
    let forged = KeyFiles {
        authority: KeyFiles::of(&server.site.keys, "here").authority,
        ..KeyFiles::of(&other, "here")
    };
    let forger = Client::new(&server.site.etcd, &forged).unwrap();
    forger.ask("kv/deleterange", &everything()).unwrap_err();
    assert_eq!(client.list(PREFIX).unwrap(), before);
    no_news(&watched);
}

#[test]
fn cells_outlive_the_loss_of_all_their_entries_and_no_life_is_given_twice() {
    let server = server();
    let (lives, watched) = three(&server);
    let client = Client::new(&server.site.etcd, &KeyFiles::of(&server.site.keys, "here")).unwrap();
    let before = client.list(PREFIX).unwrap().0;
    for _ in 0..3 {
        let answer = client.ask("kv/deleterange", &everything()).unwrap();
        assert_eq!(answer["deleted"], "6");
        let deadline = Instant::now() + LIMIT;
        while client.list(PREFIX).unwrap().0 != before {
            assert!(Instant::now() < deadline);
            std::thread::sleep(POLL_INTERVAL_MIN);
        }
        no_news(&watched);
    }
    // A cell that was not there when the entries were lost gets no incarnation that it had before: its host
    // has a record of that one, and the others have written back all that they have.
    let again = join(&server.site, 1);
    assert_eq!(again.me.life, lives[1].life + 1);
    assert_eq!(again.members, [(0, 1), (1, 2), (2, 1)].into());
    assert_eq!(
        watched[0].1.recv_timeout(LIMIT),
        Ok(MembershipEvent::Died(lives[1]))
    );
    assert_eq!(watched[1].1.recv_timeout(LIMIT), Ok(MembershipEvent::Evicted));
    let known_by_its_host = Membership::join(&server.site, 7, 4, || false).unwrap().unwrap();
    assert_eq!(known_by_its_host.me.life, 5);
}

#[test]
fn keys_that_can_not_be_read_are_named() {
    let server = server();
    let missing = KeyFiles::of(Path::new("/nowhere"), "here");
    let error = Client::new(&server.site.etcd, &missing).unwrap_err();
    assert!(error.to_string().contains("/nowhere/here."), "{error}");
}

/// The keys of `gone`, as that host has them: the authority's folder loses them when the host is removed.
fn keys_of_gone(server: &Server) -> KeyFiles {
    let folder = server._data.path().join("gone");
    std::fs::create_dir(&folder).unwrap();
    for name in ["authority.pem", "gone.pem", "gone.key"] {
        std::fs::copy(server.site.keys.join(name), folder.join(name)).unwrap();
    }
    KeyFiles::of(&folder, "gone")
}

/// Calls etcd until it answers, or for as long as it may take to start.
fn once_up<T>(mut call: impl FnMut() -> io::Result<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        match call() {
            Ok(value) => return value,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(POLL_INTERVAL_MIN);
    }
}

#[test]
fn etcd_is_reached_by_the_host_name_of_its_certificate_and_refused_under_any_other() {
    let server = server_called("localhost");
    let keys = KeyFiles::of(&server.site.keys, "here");
    let by_name = |server: &Server| vec![server.etcd.url.replace("127.0.0.1", "localhost")];
    let named = Client::new(&by_name(&server), &keys).unwrap();
    once_up(|| named.list(PREFIX));
    let site = Site {
        etcd: by_name(&server),
        ..server.site.clone()
    };
    assert_eq!(join(&site, 0).me, CellId { number: 0, life: 1 });
    // The certificate does not have the address of the same etcd.
    let by_address = Client::new(&server.site.etcd, &keys).unwrap();
    let error = by_address.list(PREFIX).unwrap_err().to_string();
    assert!(error.contains("certificate"), "{error}");
    // Nor does another name's certificate serve, though the authority is the same.
    let other = server_called("etcd.example");
    let keys = KeyFiles::of(&other.site.keys, "here");
    let client = Client::new(&by_name(&other), &keys).unwrap();
    once_up(|| match client.list(PREFIX).unwrap_err() {
        error if error.to_string().contains("certificate") => Ok(()),
        error => Err(error),
    });
}

#[test]
fn a_removed_host_is_refused_by_etcd_at_once_and_its_connections_end_with_etcds_restart() {
    let mut server = server();
    let gone_keys = keys_of_gone(&server);
    let client = |keys: &KeyFiles| Client::new(&server.site.etcd, keys).unwrap();
    let own_keys = KeyFiles::of(&server.site.keys, "here");
    let (own, gone) = (client(&own_keys), client(&gone_keys));
    let entered = once_up(|| {
        own.put_if(
            "/mirrorball/x",
            None,
            &[Put {
                key: "/mirrorball/x",
                value: "1",
                lease: None,
            }],
        )
    });
    assert!(entered);
    once_up(|| gone.list(PREFIX));
    let watch = server::RevocationWatch::begin(&server.site.keys).unwrap();
    urpc::tls::revoke(&server.site.keys, "gone").unwrap();
    let since = Instant::now();
    // The same etcd, not started again: it reads the list at each handshake.
    client(&gone_keys).list(PREFIX).unwrap_err();
    client(&own_keys).list(PREFIX).unwrap();
    gone.list(PREFIX).expect("etcd checks nothing between handshakes");
    let ended = watch.wait(&mut server.etcd.child).unwrap();
    assert!(matches!(ended, server::Ended::ListChanged), "{ended:?}");
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    let mut command = server::command(&server.etcd.url, &server.site.keys, server._data.path()).unwrap();
    server.etcd.child = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (kept, _) = once_up(|| own.list(PREFIX));
    assert_eq!(kept, [("x".to_owned(), "1".to_owned())].into());
    gone.list(PREFIX).unwrap_err();
    // While the list stays as it is, etcd runs on.
    let watch = server::RevocationWatch::begin(&server.site.keys).unwrap();
    let killed = server.etcd.child.id();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        Command::new("kill").arg(killed.to_string()).status().unwrap();
    });
    let ended = watch.wait(&mut server.etcd.child).unwrap();
    assert!(matches!(ended, server::Ended::Exited(_)), "{ended:?}");
}

#[test]
fn retired_cell_is_dead_for_all_accuses_none_and_cannot_join_again() {
    let server = server();
    let [first, second] = [0, 1].map(|number| join(&server.site, number));
    let left = second.me;
    let first = Membership {
        members: second.members.clone(),
        ..first
    };
    let (_keep, first_news) = run(first);
    let (accuse, second_news) = run(second);
    retire(&server.site, &[1]).unwrap();
    assert_eq!(first_news.recv_timeout(LIMIT), Ok(MembershipEvent::Died(left)));
    assert_eq!(second_news.recv_timeout(LIMIT), Ok(MembershipEvent::Evicted));
    accuse.send(CellId { number: 0, life: 1 }).unwrap();
    assert!(first_news.recv_timeout(POLL_INTERVAL_MIN * 5).is_err());
    let looks = std::cell::Cell::new(0);
    let is_to_end = || looks.replace(looks.get() + 1) == 3;
    assert!(Membership::join(&server.site, 1, 0, is_to_end).unwrap().is_none());
    assert_eq!(members(&server.site).unwrap(), [(0, 1)].into());
    assert!(present(&server.site).unwrap().is_retired(1));
}

#[test]
fn cell_that_is_to_end_waits_no_longer_for_an_etcd_that_does_not_answer() {
    let keys = tempfile::tempdir().unwrap();
    urpc::tls::make(keys.path(), ["here"]).unwrap();
    let gone = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let site = Site {
        here: "here".to_owned(),
        hosts: Vec::new(),
        etcd: vec![format!("https://{gone}")],
        runs_etcd: false,
        keys: keys.path().to_owned(),
        silence_ms: 200,
        spans: Default::default(),
        on_lost: OnLost::Keep,
        file: None,
    };
    let looks = std::cell::Cell::new(0);
    let is_to_end = || looks.replace(looks.get() + 1) == 3;
    assert!(Membership::join(&site, 0, 0, is_to_end).unwrap().is_none());
    assert_eq!(looks.get(), 4);
}
