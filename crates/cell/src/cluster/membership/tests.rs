//! Against a real etcd on the loopback.

use std::process::Command;
use std::sync::mpsc::{self, Receiver, Sender};

use super::*;
use loopback::Etcd;

/// That of the stories of two hosts, too.
#[path = "../../../tests/hosts/etcd.rs"]
mod loopback;

const LIMIT: Duration = Duration::from_secs(60);

struct Server {
    etcd: Etcd,
    _data: tempfile::TempDir,
    site: Site,
}

fn server() -> Server {
    let data = tempfile::tempdir().unwrap();
    let etcd = Etcd::start(data.path());
    let site = Site {
        here: "here".into(),
        hosts: Vec::new(),
        etcd: vec![etcd.url.clone()],
        runs_etcd: false,
        keys: "keys".into(),
        silence_ms: 200,
        spans: Default::default(),
    };
    Server {
        etcd,
        _data: data,
        site,
    }
}

fn run(membership: Membership) -> (Sender<CellId>, Receiver<News>) {
    let (suspect, suspects) = mpsc::channel();
    let (tell, news) = mpsc::channel();
    std::thread::spawn(move || membership.run(&suspects, |changed| _ = tell.send(changed)));
    (suspect, news)
}

#[test]
fn one_that_is_suspected_is_over_for_all_and_knows_it() {
    let server = server();
    let first = Membership::join(&server.site, 0);
    let second = Membership::join(&server.site, 1);
    let third = Membership::join(&server.site, 2);
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
        first_news.recv_timeout(LOOK * 5).is_err(),
        "another life is not meant"
    );
    suspect.send(victim).unwrap();
    assert_eq!(first_news.recv_timeout(LIMIT), Ok(News::Over(victim)));
    assert_eq!(third_news.recv_timeout(LIMIT), Ok(News::Over(victim)));
    assert_eq!(second_news.recv_timeout(LIMIT), Ok(News::Outcast));
    // The dead accuse nobody.
    accuse.send(CellId { number: 0, life: 1 }).unwrap();
    assert!(third_news.recv_timeout(LOOK * 5).is_err());
    let again = Membership::join(&server.site, 1);
    assert_eq!((again.me.life, again.members.len()), (2, 3));
}

#[test]
fn one_that_says_no_more_is_over_after_its_lease_and_a_new_life_ends_the_old_one() {
    let server = server();
    let first = Membership::join(&server.site, 0);
    let silent = Membership::join(&server.site, 1);
    let replaced = Membership::join(&server.site, 2);
    let (over, old) = (silent.me, replaced.me);
    let first = Membership {
        members: replaced.members.clone(),
        ..first
    };
    let (_suspect, news) = run(first);
    let (_keep, old_news) = run(replaced);
    Membership::join(&server.site, 2);
    assert_eq!(news.recv_timeout(LIMIT), Ok(News::Over(old)));
    assert_eq!(old_news.recv_timeout(LIMIT), Ok(News::Outcast));
    assert_eq!(news.recv_timeout(LIMIT), Ok(News::Over(over)));
}

#[test]
fn without_etcd_nobody_dies_and_who_joins_waits() {
    let server = server();
    let first = Membership::join(&server.site, 0);
    let second = Membership::join(&server.site, 1);
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
    std::thread::spawn(move || tell.send(Membership::join(&site, 2).me));
    assert!(news.recv_timeout(Duration::from_secs(2)).is_err());
    assert!(joined.try_recv().is_err());
    stop("-CONT");
    assert_eq!(news.recv_timeout(LIMIT), Ok(News::Over(victim)));
    assert_eq!(joined.recv_timeout(LIMIT), Ok(CellId { number: 2, life: 1 }));
}

#[test]
fn a_cell_looks_less_often_where_silence_may_last_long() {
    assert_eq!(look(200), LOOK);
    assert_eq!(look(20_000), Duration::from_secs(1));
}
