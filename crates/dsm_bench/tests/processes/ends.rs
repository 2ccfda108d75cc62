//! Admission of nodes, the memory that they share, and the end of a session.

use super::*;

#[test]
fn keys_enforce_tls_and_refuse_unknown_nodes() {
    let _alone = alone();
    within(LIMIT, || {
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys");
        urpc::tls::make(&keys, ["west", "east"]).unwrap();
        let keys = keys.to_str().unwrap().to_owned();
        let (others, peers) = ChildNodes::start(1, &keys);
        // A node without a key is refused, and the one with a key still joins.
        let stranger = Peer {
            name: None,
            ..peers[0].clone()
        };
        assert!(
            Session::coordinate(
                shape(2, 8),
                &[stranger],
                &Security::Plain,
                &Settings::default(),
                unexpected
            )
            .is_err()
        );
        let session = lead(shape(2, 8), &peers, &security(&keys, "west"), unexpected);
        let job = Job::Add { page: 7, millis: 50 };
        let answers = session.run_all(&[job.clone(), job]).unwrap();
        let counts = answers.iter().map(|answer| match answer {
            JobResult::Count(count) => *count,
            _ => panic!("{answer:?}"),
        });
        assert_eq!(word(session.node(), 7, 0).load(SeqCst), counts.sum::<u64>());
        session.close();
        others.end();
    });
}

#[test]
fn node_that_dies_is_named_by_all_others() {
    static LOST: Mutex<Option<String>> = Mutex::new(None);
    let _alone = alone();
    within(LIMIT, || {
        let (mut others, peers) = ChildNodes::start(2, "");
        let dead = format!("node 1 ({}) is gone", peers[0].address);
        let session = lead(shape(3, 16), &peers, &Security::Plain, |end| {
            *LOST.lock().unwrap() = Some(end.to_string());
        });
        others.0[0].kill().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while LOST.lock().unwrap().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let reason = LOST.lock().unwrap().clone().expect("node 0 noticed nothing");
        assert!(reason.starts_with(&dead), "{reason}");
        // Node 2 ends too, and prints why.
        let mut said = String::new();
        others.0[1]
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        assert!(said.contains(&format!("lost: {dead}")), "{said}");
        assert_eq!(others.0[1].wait().unwrap().code(), Some(3));
        drop(session);
    });
}

/// Three processes whose page servers poll a while and then sleep.
#[test]
fn no_addition_is_lost_by_shared_memory_until_a_node_dies() {
    static LOST: Mutex<Option<String>> = Mutex::new(None);
    let _alone = alone();
    within(LIMIT, || {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let memory = folder.path().join("memory");
        let (mut others, peers) = ChildNodes::start_on(&[None; 2], "", Some(&memory));
        let options = StreamOptions {
            security: &Security::Plain,
            memory: Some(&memory),
        };
        let shape = Shape {
            lanes: 2,
            ..shape(3, 64)
        };
        let lost = |end: &End| *LOST.lock().unwrap() = Some(end.to_string());
        let session = Session::coordinate(shape, &peers, options, &Settings::default(), lost).unwrap();
        for page in [40, 3] {
            additions_count(&session, page, 300);
        }
        others.0[1].kill().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while LOST.lock().unwrap().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let reason = LOST.lock().unwrap().clone().expect("node 0 noticed nothing");
        assert!(
            reason.starts_with(&format!("node 2 ({}) is gone", peers[1].address)),
            "{reason}"
        );
        drop(session);
    });
}

#[test]
fn memory_that_not_all_nodes_share_is_refused() {
    let _alone = alone();
    within(LIMIT, || {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let [memory, other] = ["memory", "other"].map(|name| folder.path().join(name));
        for theirs in [None, Some(&other)] {
            let (_others, peers) = ChildNodes::start_on(&[None], "", theirs.map(PathBuf::as_path));
            let options = StreamOptions {
                security: &Security::Plain,
                memory: Some(&memory),
            };
            let met = Session::coordinate(shape(2, 8), &peers, options, &Settings::default(), unexpected);
            assert!(met.is_err(), "{theirs:?}");
        }
    });
}

#[test]
fn unreachable_node_is_an_error() {
    let nobody: Peer = "127.0.0.1:1".parse().unwrap();
    let error = Session::coordinate(
        shape(2, 8),
        &[nobody],
        &Security::Plain,
        &Settings::default(),
        unexpected,
    )
    .unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}
