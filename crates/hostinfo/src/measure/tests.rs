//! This machine's own CPUs, as many as there are.

use std::net::TcpListener;

use config::cluster::{HostPlan, Site};
use nix::sched::sched_setaffinity;

use super::*;

const NAME: &str = "here";

/// CPUs of one node without facts of caches.
fn host(cpus: &BTreeSet<i64>) -> Base {
    let mut base = Base::default();
    base.learn([
        Fact::new("host", [NAME.into()]),
        Fact::new("node", [NAME.into(), 0.into()]),
    ]);
    base.learn(
        cpus.iter()
            .map(|cpu| Fact::new("cpu", [NAME.into(), (*cpu).into(), 0.into()])),
    );
    base
}

fn first_cpus(count: usize) -> BTreeSet<i64> {
    allowed().into_iter().take(count).collect()
}

/// A pair may take long on a loaded machine.
const PATIENT: Duration = Duration::from_secs(60);

#[test]
fn every_pair_of_allowed_cpus_is_measured_in_both_directions() {
    let cpus = first_cpus(4);
    let measured: Base = measure(&host(&cpus), &cpus, PATIENT).into_iter().collect();
    for (kind, transport) in [
        ("latency_ns", RING),
        ("send_ns", RING),
        ("bandwidth_mb_s", RING),
        ("bandwidth_mb_s", COPY),
    ] {
        let of_kind = measured
            .named(kind)
            .filter(|fact| fact.text(3) == Some(transport));
        let pairs: Vec<_> = of_kind
            .map(|fact| {
                assert_eq!(fact.text(0), Some(NAME));
                assert!(fact.number(4).is_some_and(|value| value > 0), "{fact}");
                (fact.number(1).unwrap(), fact.number(2).unwrap())
            })
            .collect();
        let all = cpus
            .iter()
            .flat_map(|one| cpus.iter().map(move |other| (*one, *other)));
        let all: Vec<_> = all.filter(|(one, other)| one != other).collect();
        assert_eq!(pairs, all, "{kind} {transport}");
    }
}

/// An expired time limit and unusable CPUs skip pairs without delay.
#[test]
fn unmeasurable_pairs_are_skipped_within_the_limit() {
    let cpus = first_cpus(2);
    assert_eq!(measure(&host(&cpus), &cpus, Duration::ZERO), []);
    let mine = *cpus.first().expect("a CPU");
    // No machine has this CPU.
    let impossible = BTreeSet::from([mine, 8191]);
    let start = Instant::now();
    assert_eq!(measure(&host(&impossible), &impossible, PATIENT), []);
    assert!(start.elapsed() < PATIENT / 2);
    assert_eq!(measure(&Base::default(), &cpus, PATIENT), []);
}

#[test]
fn single_allowed_cpu_yields_no_measurement() {
    let thread = std::thread::spawn(|| {
        let mut one = CpuSet::new();
        let first = *allowed().first().expect("a CPU");
        one.set(first as usize).expect("a CPU");
        sched_setaffinity(Pid::from_raw(0), &one).expect("its own");
        let mine = allowed();
        assert_eq!(mine, BTreeSet::from([first]));
        measure(&host(&(0..4).collect()), &mine, PATIENT)
    });
    assert_eq!(thread.join().expect("no panic"), []);
}

/// Measurement on many CPUs stays within its limit, which the pairs share.
#[test]
fn measurement_stays_within_its_time_limit() {
    let cpus = first_cpus(2);
    let limit = Duration::from_millis(50);
    let start = Instant::now();
    for _ in 0..3 {
        measure(&host(&cpus), &cpus, limit);
    }
    // Additional time for threads that start and end on a busy machine.
    assert!(start.elapsed() < 3 * limit + Duration::from_secs(5));
}

#[test]
fn cached_measurements_are_valid_for_same_boot_host_and_cpus_only() {
    let directory = tempfile::tempdir().expect("a directory");
    let kept = MeasurementCache::at(directory.path());
    let cpus = BTreeSet::from([0, 1, 2, 8]);
    assert_eq!(kept.read(NAME, &cpus), None);
    let latency = |from: i64, ns: i64| {
        Fact::new(
            "latency_ns",
            [NAME.into(), from.into(), 1.into(), RING.into(), ns.into()],
        )
    };
    let of = |cpus: &[i64], facts: &[Fact]| Measurements {
        cpus: cpus.iter().copied().collect(),
        facts: facts.to_vec(),
    };
    let all = of(&[0, 1, 2, 8], &[latency(0, 140), latency(2, 150)]);
    kept.write(NAME, &all).expect("written");
    assert_eq!(kept.read(NAME, &cpus).as_ref(), Some(&all));
    assert_eq!(
        kept.read(NAME, &BTreeSet::from([1])).as_ref(),
        Some(&all),
        "fewer CPUs"
    );
    assert_eq!(kept.read(NAME, &BTreeSet::from([1, 3])), None, "another CPU");
    assert_eq!(kept.read("forward", &cpus), None, "another host");
    // A user with access to a part of them measures again: that part is corrected.
    kept.write(NAME, &of(&[1, 2], &[latency(2, 170)]))
        .expect("written");
    let corrected = of(&[0, 1, 2, 8], &[latency(0, 140), latency(2, 170)]);
    assert_eq!(kept.read(NAME, &cpus), Some(corrected));
    let file = directory.path().join("measured.facts");
    let text = std::fs::read_to_string(&file).expect("kept");
    assert!(text.contains(", CPUs 0-2,8\n"), "{text}");
    let boot = text.split([' ', ',']).nth(3).expect("a boot");
    std::fs::write(&file, text.replace(boot, "another")).expect("written");
    assert_eq!(kept.read(NAME, &cpus), None, "another boot");
    std::fs::write(&file, text + "latency_ns(").expect("written");
    assert_eq!(kept.read(NAME, &cpus), None, "a part of a file");
}

#[test]
fn at_most_one_process_measures() {
    let directory = tempfile::tempdir().expect("a directory");
    let kept = MeasurementCache::at(directory.path());
    let turn = kept.turn(true).expect("a lock").expect("nobody measures");
    assert!(kept.turn(true).expect("a lock").is_none());
    drop(turn);
    assert!(kept.turn(false).expect("a lock").is_some());
}

/// One that listens, one that refuses, and one that there is not.
#[test]
fn only_responding_hosts_are_measured() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let forward = listener.local_addr().expect("an address");
    let free = TcpListener::bind("127.0.0.1:0")
        .and_then(|gone| gone.local_addr())
        .expect("a port");
    let plan = |name: &str, address, cells: &[u16]| HostPlan {
        shared_memory: None,
        remote_paths: Vec::new(),
        name: name.into(),
        address,
        cells: cells.to_vec(),
    };
    let site = Site {
        here: "alpha".into(),
        hosts: vec![
            plan("alpha", forward, &[0]),
            plan("beta", forward, &[0]),
            plan("gamma", free, &[0]),
            plan("nobody", forward, &[]),
        ],
        etcd: Vec::new(),
        runs_etcd: false,
        keys: "keys".into(),
        silence_ms: 200,
        spans: Default::default(),
        on_lost: config::cluster::OnLost::Keep,
        file: None,
    };
    let facts = reach(&site, NAME);
    let names: Vec<_> = facts
        .iter()
        .map(|fact| (fact.text(0), fact.text(1), fact.text(2)))
        .collect();
    let to = |name| (Some(NAME), Some(name), Some("tls"));
    assert_eq!(names, [to("beta"), to("gamma")]);
    assert!(facts.iter().all(|fact| fact.number(3).is_some_and(|ns| ns > 0)));
}
