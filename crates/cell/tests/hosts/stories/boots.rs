//! Parts that run, again and again: their launch messages, their reports, and their connections.

use std::fs::File;
use std::time::Duration;

use cell::cluster::hosts::Hosts;
use cell::handle::QUIT_LIMIT;
use cell::remote::connections::connect;
use cell::remote::protocol::{Ends, FromPart, LaneEnds, Role};
use cell::spanning::Span;
use cell::spanning::boot::Boot;
use hostinfo::memory_use;
use nix::sys::resource::{Resource, setrlimit};
use registry::cluster::client;
use registry::cluster::files::Files;
use registry::vms::{Record, Registry};
use shard::launch::{Answer, Ending, Order, Report};

use crate::hosts::two::{SOON, Two, gone, kill_process, quit, remote, started, wait};
use crate::hosts::{herald, site};

pub fn again_and_again(two: &Two) {
    again_and_again_by(two, "streams");
}

/// Each boot finds the slot free again.
pub fn again_and_again_by_memory(two: &Two) {
    again_and_again_by(two, "shared");
}

fn again_and_again_by(two: &Two, way: &str) {
    let (span, opened) = (two.span(), two.opened());
    for _ in 0..3 {
        let boot = started(two, &span, &opened);
        let remote = remote(&span);
        keep_time(&boot);
        let start = boot.remote(&span, 1, &opened.launch).expect("coherent memory");
        // A step forward; then a step back, which is refused.
        for offset in [start.tsc.offset.wrapping_add(1_000), start.tsc.offset] {
            remote.order(&Order::Step { offset }).expect("an order");
        }
        remote.order(&Order::Status).expect("an order");
        match remote.next(Some(SOON)) {
            Some(FromPart::Report(Report::Answer {
                answer: Answer::Status(status),
                ..
            })) => {
                assert!(status["exits"].is_array(), "{status}");
                assert!(status["coherence"]["faults"].is_object(), "{status}");
                assert_eq!(status["clock"]["made"], 1, "{status}");
                assert_eq!(status["coherence"]["ways"][0], way, "{status}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(noted(two)[0].shard_pid, Some(two.shards()[0]));
        let table = memory_use::read(&noted(two)).expect("what beta's part takes");
        assert_eq!(table.vms[0].name, "big/1");
        assert_eq!(table.vms[0].memory_bytes, two.spec.memory.0, "a copy");
        assert!(table.vms[0].host_bytes > 0);
        let said = quit(remote);
        let step_back =
            "its process left with status 74; it said: a step of the guest's clock by -1000 ticks";
        assert!(said.starts_with(step_back), "{said}");
        wait(|| noted(two)[0].shard_pid.is_none());
    }
    assert_eq!(two.at_beta(), ["big/1"]);
    assert_eq!(span.lost(), None);
    span.leave();
    // At once: its name is free when this returns.
    assert!(two.at_beta().is_empty());
    two.wait_until_free();
}

/// Rounds with beta go on after the boot, however long that took, until the clocks are dropped.
fn keep_time(boot: &Boot) {
    let clocks = boot.clocks().expect("those of two hosts");
    let keeper = boot.keep_time(|_| ()).expect("threads").expect("two hosts");
    // Longer than the time limit for a first message.
    std::thread::sleep(Duration::from_millis(2_500));
    let rate_error = || clocks.status()[1]["rate_error_ppb"].as_u64();
    assert_eq!(rate_error(), Some(500_000), "no clock has begun");
    keeper.begin();
    wait(|| rate_error().is_some_and(|ppb| ppb < 500_000));
    let told = clocks.status();
    assert_eq!(
        (&told[1]["refused"], &told[1]["lost"]),
        (&0.into(), &().into()),
        "{told:?}"
    );
}

/// The records of beta's parts, for `mem`.
fn noted(two: &Two) -> Vec<Record> {
    let parts = Registry::at(&site::beta(&two.folder).join("parts")).and_then(|registry| registry.list());
    parts.expect("a directory")
}

pub fn late_order(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    two.shards().into_iter().for_each(kill_process);
    gone(remote(&span));
    drop(boot);
    // As the home's monitor orders all parts at the end of each boot.
    remote(&span).order(&Order::Quit).expect("an order");
    let _boot = started(two, &span, &opened);
    let said = remote(&span).next(Some(QUIT_LIMIT + Duration::from_secs(2)));
    assert!(said.is_none(), "{said:?}");
    assert_eq!(span.lost(), None);
    assert_eq!(two.shards().len(), 1);
    span.leave();
    two.wait_until_free();
}

pub fn two_parts(two: &Two) {
    let mut spec = two.spec.clone();
    spec.cpus = 3;
    spec.span = Some(config::SpanSpec::Coherent(vec![0, 1, 2]));
    let span = Span::begin("big", &spec, shard::PLATFORM)
        .expect("places")
        .expect("a span");
    let opened = two.opened();
    let boot = Boot::new(&span, &opened.launch.memory, Some(0..0)).expect("links and lanes");
    let parts = [1, 2].map(|shard| span.remote(shard).expect("on beta"));
    for (shard, part) in (1..).zip(parts) {
        let told = boot.remote(&span, shard, &opened.launch);
        part.start(told.expect("coherent memory")).expect("an order");
        let said = part.next(Some(SOON));
        assert!(
            matches!(said, Some(FromPart::Report(Report::Running { .. }))),
            "{said:?}"
        );
    }
    // The first ends, and the second loses it, though the home has a link to each.
    parts[0].order(&Order::Quit).expect("an order");
    match parts[1].next(Some(SOON)) {
        Some(FromPart::Report(Report::Ended(Ending::PeerLost { detail }))) => {
            let gone =
                "the shard in cell 1 on host beta is gone (it closed its streams), and its pages with it";
            assert_eq!(detail, gone);
        }
        other => panic!("{other:?}; lost: {:?}", span.lost()),
    }
    assert_eq!(gone(parts[1]), "its process left with status 73");
    span.leave();
    two.wait_until_free();
}

/// Four shards, two on each host in turn, so that there is a pair of each kind.
pub fn all_meet(two: &Two) {
    let mut spec = two.spec.clone();
    spec.cpus = 4;
    spec.span = Some(config::SpanSpec::Coherent(vec![0, 1, 3, 2]));
    let span = Span::begin(herald::NAME, &spec, shard::PLATFORM)
        .expect("places")
        .expect("a span");
    let status = client::status(&two.beta_files())
        .expect("an answer")
        .expect("a cluster");
    let given = status.cells.iter().find(|cell| cell.plan.number == 1);
    assert_eq!(given.map(|cell| cell.given_bytes), Some(spec.memory.0), "a copy");
    let opened = two.opened();
    let names = [
        "the shard in cell 0 on host alpha",
        "the shard in cell 1 on host beta",
        "the shard in cell 3 on host alpha",
        "the shard in cell 2 on host beta",
    ];
    for number in 0..2 {
        let boot = Boot::new(&span, &opened.launch.memory, Some(number..9)).expect("links and lanes");
        let parts = [1, 3].map(|shard| {
            let remote = span.remote(shard).expect("on beta");
            let told = boot.remote(&span, shard, &opened.launch);
            remote.start(told.expect("coherent memory")).expect("an order");
            let said = remote.next(Some(SOON));
            assert!(
                matches!(said, Some(FromPart::Report(Report::Running { .. }))),
                "{said:?}"
            );
            remote
        });
        let here = [0, 2].map(|shard| {
            let mut files = Vec::new();
            let launch = boot.launch(shard, &mut files).coherence.expect("coherent memory");
            assert_eq!(launch.names, names);
            assert_eq!(launch.lanes.len(), 1, "one alone merges page tables");
            let all = herald::connections(&launch, |fd| {
                File::from(files[fd.0].try_clone_to_owned().expect("a file"))
            });
            assert_eq!(all.len(), 2 * 3, "a lane has two to each of three");
            herald::say(number, &all, shard);
            (shard, all)
        });
        for (shard, all) in &here {
            let expected: Vec<String> = all
                .iter()
                .map(|one| herald::expected(number, one, *shard))
                .collect();
            assert_eq!(herald::hear(all), expected);
        }
        for remote in parts {
            let Some(FromPart::Report(Report::Answer {
                answer: Answer::Status(status),
                ..
            })) = remote.next(Some(SOON))
            else {
                panic!("it has not received all texts");
            };
            assert_eq!(status["heard"], status["expected"]);
            assert_eq!(status["heard"].as_array().map(Vec::len), Some(6), "{status}");
            assert_eq!(status["names"], serde_json::json!(names));
            assert_eq!(status["kernel"]["start"], number);
            assert_eq!(status["device"], true, "its host's");
            // Beta's processes have the permissions of this one.
            if setrlimit(Resource::RLIMIT_RTPRIO, 10, 10).is_ok() {
                assert_eq!(status["priority"], 10, "its lanes may have some");
            }
            quit(remote);
        }
    }
    // A connection for a boot that is over comes too late.
    let files = Files::open().expect("files");
    let hosts = Hosts::open(files.site().expect("files").expect("hosts")).expect("keys");
    let of = |boot| LaneEnds {
        ends: Ends { boot, from: 0, to: 1 },
        lane: 0,
    };
    let reach = remote(&span).endpoint();
    assert!(connect(&hosts, reach, Role::Pages(of(0))).is_err());
    assert!(connect(&hosts, reach, Role::Pages(of(2))).is_ok(), "the next one");
    span.leave();
    two.wait_until_free();
}
