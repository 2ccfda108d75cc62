//! What is told of the two hosts. Each story is a process of its own, whose runtime directory is alpha's.

use std::fs::File;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cell::cluster::client;
use cell::cluster::files::Files;
use cell::cluster::hosts::Hosts;
use cell::handle::{Handle, QUIT_LIMIT};
use cell::remote::connections::connect;
use cell::remote::talk::{Ends, FromPart, Role, Token};
use cell::runtime::VARIABLE;
use cell::spanning::{Boot, Span};
use cell::vm;
use config::cluster::SpanWay;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shard::launch::{Ending, Order, Report};

use super::etcd::Etcd;
use super::two::{SOON, Two, end, gone, remote, started, wait};
use super::{deaf, site};

/// As the cluster's file says; more where the machine is busy with other tests.
const SILENCE_MS: u64 = 4000;

/// Longer where cells watch one another, too, and whoever takes another for dead is right for good.
const REAL_SILENCE_MS: u64 = 20_000;
/// The story with real cells.
const REAL: &str = "real_cells_hold_the_places_and_their_next_processes_find_them";

type Story = (&'static str, SpanWay, fn(&Two));

const STORIES: [Story; 15] = [
    (
        "all_but_the_memory_is_there_and_then_it_is_refused",
        SpanWay::Tls,
        refused_at_last,
    ),
    (
        "a_part_runs_again_and_again_and_leaves_nothing",
        SpanWay::Tls,
        again_and_again,
    ),
    (
        "its_connections_are_plain_where_the_file_says_so",
        SpanWay::Plain,
        again_and_again,
    ),
    ("a_shard_that_is_killed_is_told_of", SpanWay::Tls, killed_shard),
    (
        "an_order_to_end_that_comes_too_late_ends_no_later_boot",
        SpanWay::Tls,
        late_order,
    ),
    (
        "who_breaks_the_rules_ends_the_part_and_only_then_its_place_is_free",
        SpanWay::Tls,
        second_start,
    ),
    (
        "a_monitor_that_is_killed_is_told_of_and_leaves_nothing",
        SpanWay::Tls,
        killed_monitor,
    ),
    (
        "a_host_that_falls_silent_is_lost_to_its_home",
        SpanWay::Tls,
        silent_host,
    ),
    (
        "a_home_that_falls_silent_leaves_nothing_on_other_hosts",
        SpanWay::Tls,
        silent_home,
    ),
    (
        "a_home_that_dies_leaves_nothing_on_other_hosts",
        SpanWay::Tls,
        dead_home,
    ),
    (
        "a_lost_link_ends_the_shard_with_the_reason",
        SpanWay::Tls,
        lost_link,
    ),
    (
        "who_has_no_business_there_is_not_let_in_and_no_room_is_no_place",
        SpanWay::Tls,
        strangers,
    ),
    (REAL, SpanWay::Tls, real_cells),
    ("two_parts_are_linked_to_one_another_too", SpanWay::Tls, two_parts),
    (
        "a_part_that_dies_while_its_home_is_loaded_ends_the_vm",
        SpanWay::Tls,
        deaf_home,
    ),
];

/// Tells all stories, or those whose names have `part` in them.
pub fn tell_all(part: Option<&str>) -> ExitCode {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        println!("test result: left out, all of them: /dev/kvm: {error}");
        return ExitCode::SUCCESS;
    }
    let own = std::env::current_exe().expect("this program");
    let mut failed = 0;
    let chosen = STORIES
        .iter()
        .filter(|(name, _, _)| part.is_none_or(|part| part.starts_with('-') || name.contains(part)));
    for (name, spans, _) in chosen {
        let folder = tempfile::tempdir().expect("a directory");
        let etcd = (*name == REAL).then(|| Etcd::start(folder.path()));
        let urls: Vec<String> = etcd.iter().map(|etcd| etcd.url.clone()).collect();
        let silence_ms = if etcd.is_some() {
            REAL_SILENCE_MS
        } else {
            SILENCE_MS
        };
        site::write(folder.path(), *spans, silence_ms, &urls).expect("files of two hosts");
        let status = Command::new(&own)
            .args(["story", name])
            .env(VARIABLE, folder.path().join("alpha"))
            .status();
        let is_good = status.is_ok_and(|status| status.success());
        println!("test {name} ... {}", if is_good { "ok" } else { "FAILED" });
        failed += usize::from(!is_good);
    }
    println!("test result: {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// Tells one of them, in a process that has alpha's runtime directory.
pub fn tell(name: &str) -> ExitCode {
    let Some((_, _, story)) = STORIES.iter().find(|story| story.0 == name) else {
        return ExitCode::FAILURE;
    };
    story(&Two::up(name == REAL));
    ExitCode::SUCCESS
}

fn refused_at_last(two: &Two) {
    let span = two.span();
    assert_eq!(two.at_beta(), ["big/1"]);
    let handle = Handle::default();
    let ran = vm::run(
        two.opened(),
        "big",
        &two.folder.join("big"),
        &handle,
        Some(&span),
        |_| {
            panic!("it runs");
        },
    );
    let why = ran.expect_err("no memory").to_string();
    assert!(
        why.starts_with("the memory of a VM over several hosts is not kept coherent yet"),
        "{why}"
    );
    span.leave();
    assert!(two.at_beta().is_empty());
    two.wait_until_free();
}

fn again_and_again(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    for _ in 0..3 {
        let _boot = started(two, &span, &opened);
        let remote = remote(&span);
        remote.order(&Order::Status).expect("an order");
        match remote.next(Some(SOON)) {
            Some(FromPart::Report(Report::Status(status))) => {
                assert!(status["exits"].is_array(), "{status}")
            }
            other => panic!("{other:?}"),
        }
        remote.order(&Order::Quit).expect("an order");
        let ended = remote.next(Some(SOON));
        assert!(
            matches!(ended, Some(FromPart::Report(Report::Ended(Ending::Quit)))),
            "{ended:?}"
        );
        assert_eq!(gone(remote), "its process left with status 0");
    }
    assert_eq!(two.at_beta(), ["big/1"]);
    assert_eq!(span.lost(), None);
    span.leave();
    // At once: its name is free when this returns.
    assert!(two.at_beta().is_empty());
    two.wait_until_free();
}

fn two_parts(two: &Two) {
    let mut spec = two.spec.clone();
    spec.cpus = 3;
    spec.span = Some(config::SpanSpec::Cells(vec![0, 1, 2]));
    let span = Span::begin("big", &spec).expect("places").expect("a span");
    let opened = two.opened();
    let boot = Boot::new(&span, &opened.launch.memory, None).expect("memory and links");
    let parts = [1, 2].map(|shard| span.remote(shard).expect("on beta"));
    for (shard, part) in (1..).zip(parts) {
        part.start(boot.remote(&span, shard, &opened.launch))
            .expect("an order");
        let said = part.next(Some(SOON));
        assert!(
            matches!(said, Some(FromPart::Report(Report::Running { .. }))),
            "{said:?}"
        );
    }
    // The first ends, and the second misses it, though the home has a link to each.
    parts[0].order(&Order::Quit).expect("an order");
    match parts[1].next(Some(SOON)) {
        Some(FromPart::Report(Report::Ended(Ending::ShardFailed { detail }))) => {
            assert_eq!(
                detail,
                "the connection to its shard in cell 1 on host beta is lost"
            );
        }
        other => panic!("{other:?}; lost: {:?}", span.lost()),
    }
    assert!(gone(parts[1]).starts_with("its process left with status 1"));
    span.leave();
    two.wait_until_free();
}

fn real_cells(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(two, &span, &opened);
    let vms = |files: &Files| -> Vec<String> {
        let status = client::status(files).expect("an answer").expect("a cluster");
        status.cells.into_iter().flat_map(|cell| cell.vms).collect()
    };
    let all = ["big", "big/1"];
    assert_eq!(vms(&two.beta_files()), all);
    // Both cells have the name: nobody gets it again, on either host.
    let twice = Span::begin("big", &two.spec)
        .expect_err("it is taken")
        .to_string();
    assert!(twice.starts_with("a VM named big is running already"), "{twice}");
    two.kill("1");
    two.start("1", &["cell", "1"], &site::beta(&two.folder), Stdio::null());
    wait(|| two.both_live());
    // Longer than orphans may take to be found by their monitors.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(vms(&two.beta_files()), all);
    assert_eq!(span.lost(), None);
    let remote = remote(&span);
    remote.order(&Order::Quit).expect("an order");
    let ended = remote.next(Some(SOON));
    assert!(
        matches!(ended, Some(FromPart::Report(Report::Ended(Ending::Quit)))),
        "{ended:?}"
    );
    gone(remote);
    span.leave();
    assert!(vms(&two.beta_files()).is_empty());
    two.wait_until_free();
}

fn killed_shard(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(two, &span, &opened);
    two.processes("shard").into_iter().for_each(end);
    let why = gone(remote(&span));
    assert!(why.starts_with("its process was ended by SIGKILL"), "{why}");
    drop(span);
    two.wait_until_free();
}

fn late_order(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    two.processes("shard").into_iter().for_each(end);
    gone(remote(&span));
    drop(boot);
    // As the home's monitor tells all parts at the end of each boot.
    remote(&span).order(&Order::Quit).expect("an order");
    let _boot = started(two, &span, &opened);
    let said = remote(&span).next(Some(QUIT_LIMIT + Duration::from_secs(2)));
    assert!(said.is_none(), "{said:?}");
    assert_eq!(span.lost(), None);
    assert_eq!(two.processes("shard").len(), 1);
    span.leave();
    two.wait_until_free();
}

fn second_start(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    let shards = two.processes("shard");
    remote(&span)
        .start(boot.remote(&span, 1, &opened.launch))
        .expect("an order");
    wait(|| two.at_beta().is_empty());
    for pid in shards {
        assert_eq!(
            kill(Pid::from_raw(pid), None),
            Err(Errno::ESRCH),
            "it is still there"
        );
    }
    wait(|| span.lost().is_some());
    drop(span);
    two.wait_until_free();
}

fn killed_monitor(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(two, &span, &opened);
    two.processes("part-monitor").into_iter().for_each(end);
    wait(|| span.lost().is_some());
    let why = "cell 1 on host beta, which it spans, is gone: its monitor has ended";
    assert_eq!(span.lost().as_deref(), Some(why));
    assert!(remote(&span).next(Some(SOON)).is_none());
    wait(|| two.at_beta().is_empty());
    wait(|| two.processes("shard").is_empty());
    // A name that was not given back is free all the same.
    drop(span);
    two.span().leave();
    two.wait_until_free();
}

fn silent_host(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(two, &span, &opened);
    let monitors = two.processes("part-monitor");
    let signal = |signal| {
        monitors
            .iter()
            .for_each(|pid| kill(Pid::from_raw(*pid), signal).expect("a signal"))
    };
    signal(Signal::SIGSTOP);
    let since = Instant::now();
    wait(|| span.lost().is_some());
    assert!(since.elapsed() < Duration::from_millis(3 * SILENCE_MS));
    let why = span.lost().expect("lost");
    assert!(
        why.contains("cell 1 on host beta") && why.contains("has said nothing"),
        "{why}"
    );
    signal(Signal::SIGCONT);
    drop(span);
    two.wait_until_free();
}

fn silent_home(two: &Two) {
    two.start_home();
    assert_eq!(two.at_beta(), ["big/1"]);
    two.signal("home", Signal::SIGSTOP);
    // It has ended nothing and closed nothing.
    two.wait_until_free();
    two.kill("home");
}

fn dead_home(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    drop(span);
    two.wait_until_free();
    drop(boot);
}

fn lost_link(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    drop(started(two, &span, &opened));
    match remote(&span).next(Some(SOON)) {
        Some(FromPart::Report(Report::Ended(Ending::ShardFailed { detail }))) => {
            assert_eq!(
                detail,
                "the connection to its shard in cell 0 on host alpha is lost"
            );
        }
        other => panic!("{other:?}"),
    }
    let why = gone(remote(&span));
    assert!(why.starts_with("its process left with status 1"), "{why}");
    span.leave();
    two.wait_until_free();
}

fn strangers(two: &Two) {
    let span = two.span();
    let files = Files::open().expect("files");
    let hosts = Hosts::open(files.site().expect("files").expect("hosts")).expect("keys");
    let known = remote(&span).reach();
    let mut unknown = known.clone();
    unknown.token = Token::new().expect("random bytes");
    let ends = |from, to| Ends { boot: 0, from, to };
    let link = Role::Link(ends(0, 1));
    for (reach, role) in [
        (&unknown, link),
        (known, Role::Control),
        (known, Role::Link(ends(0, 2))),
        (known, Role::Link(ends(1, 1))),
        (known, Role::Coherence(ends(0, 1))),
        (known, Role::Pages(ends(0, 1))),
    ] {
        assert!(connect(&hosts, reach, role).is_err(), "{role:?}");
    }
    let first = connect(&hosts, known, link).expect("a link");
    assert!(connect(&hosts, known, link).is_err(), "there is one already");
    drop(first);
    span.leave();
    let mut coherent = two.spec.clone();
    coherent.span = Some(config::SpanSpec::Coherent(vec![0, 1]));
    let why = Span::begin("big", &coherent).expect_err("two hosts").to_string();
    assert!(
        why.starts_with("coherent memory is kept between cells of one host"),
        "{why}"
    );
    let mut large = two.spec.clone();
    large.memory = config::Size(2 * site::CELL_BYTES + (2 << 20));
    let why = Span::begin("big", &large).expect_err("no room").to_string();
    assert!(why.contains("of its own memory"), "{why}");
    // Half of it is alpha's: nothing is kept there, either.
    large.memory = config::Size(2 * site::CELL_BYTES);
    Span::begin("big", &large)
        .expect("places")
        .expect("a span")
        .leave();
    two.wait_until_free();
}

fn deaf_home(two: &Two) {
    let mut spec = two.spec.clone();
    spec.span = Some(config::SpanSpec::Coherent(site::ALPHA.to_vec()));
    // The part is gone before there is a home, or after.
    for life_ms in [0, 1000] {
        let name = deaf::name(life_ms);
        let span = Span::begin(&name, &spec).expect("places").expect("a span");
        let (opened, folder) = (two.opened_as(&name, &spec), two.folder.join(&name));
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let handle = Handle::default();
            let ran = vm::run(opened, &name, &folder, &handle, Some(&span), |_| {
                panic!("it runs")
            });
            span.leave();
            let _ = tell.send(ran.map_err(|error| error.to_string()));
        });
        match told.recv_timeout(SOON).expect("it ends") {
            Ok(Ending::ShardFailed { detail }) => {
                assert_eq!(detail, "in cell 3: its process left with status 7")
            }
            other => panic!("{other:?}"),
        }
    }
}
