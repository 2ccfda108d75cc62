//! What is told of the two hosts. Each story is a process of its own, whose runtime directory is alpha's.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use cell::cluster::client;
use cell::cluster::files::Files;
use cell::cluster::hosts::Hosts;
use cell::handle::{Handle, QUIT_LIMIT};
use cell::memory_use;
use cell::registry::{Record, Registry};
use cell::remote::connections::connect;
use cell::remote::talk::{Ends, FromPart, LaneEnds, Role, Token};
use cell::runtime::VARIABLE;
use cell::spanning::{Boot, Span};
use cell::vm;
use config::cluster::SpanWay;
use nix::errno::Errno;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shard::arch::x86_64::layout::Layout;
use shard::ending::EndSignal;
use shard::launch::{Ending, Order, Report, SpanLaunch};
use shard::memory::replica::{Replica, USERFAULT_DEVICE};
use shard::sandbox::Threads;
use vm_memory::{Bytes, GuestAddress};

use super::etcd::Etcd;
use super::two::{SOON, Two, gone, kill_process, quit, remote, started, wait};
use super::{deaf, herald, site};

/// As the cluster's file says; more where the machine is busy with other tests.
const SILENCE_MS: u64 = 4000;

/// Longer where cells watch one another, too, and whoever takes another for dead is right for good.
const REAL_SILENCE_MS: u64 = 20_000;
/// The story with real cells.
const REAL: &str = "real_cells_hold_the_places_and_their_next_processes_find_them";

type Story = (&'static str, SpanWay, fn(&Two));

const STORIES: [Story; 21] = [
    (
        "without_coherent_memory_it_is_refused_before_any_place_is_taken",
        SpanWay::Tls,
        not_coherent,
    ),
    (
        "a_home_that_can_not_start_leaves_nothing_on_other_hosts",
        SpanWay::Tls,
        no_kernel,
    ),
    (
        "all_shards_meet_on_each_lane_at_each_boot",
        SpanWay::Tls,
        all_meet,
    ),
    (
        "all_shards_meet_where_connections_are_plain",
        SpanWay::Plain,
        all_meet,
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
        "lost_connections_end_the_shard_with_the_reason",
        SpanWay::Tls,
        lost_connections,
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
    (
        "pages_come_from_another_host_until_that_is_gone",
        SpanWay::Tls,
        pages_come,
    ),
    ("pages_come_by_plain_connections_too", SpanWay::Plain, pages_come),
    (
        "a_part_that_dies_on_another_host_is_the_reason_and_not_who_saw_it",
        SpanWay::Tls,
        witness_home,
    ),
];

/// Tells all stories, or those whose names have `part` in them.
pub fn tell_all(part: Option<&str>) -> ExitCode {
    for device in ["/dev/kvm", USERFAULT_DEVICE] {
        if let Err(error) = File::options().read(true).write(true).open(device) {
            println!("test result: left out, all of them: {device}: {error}");
            return ExitCode::SUCCESS;
        }
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

fn not_coherent(two: &Two) {
    let mut shared = two.spec.clone();
    shared.span = Some(config::SpanSpec::Cells(vec![0, 1]));
    let why = Span::begin("big", &shared).expect_err("two hosts").to_string();
    assert!(
        why.starts_with("it spans cell 1 on host beta") && why.contains("write `memory = \"coherent\"`"),
        "{why}"
    );
    assert!(!why.contains('\n'), "{why}");
    assert!(two.at_beta().is_empty());
    // Nobody was asked for a place: no monitor has ever been there.
    assert!(!site::beta(&two.folder).join("parts").exists());
}

fn no_kernel(two: &Two) {
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
    let why = ran.expect_err("no kernel").to_string();
    assert!(why.starts_with("the VM cannot start with the kernel"), "{why}");
    span.leave();
    assert!(two.at_beta().is_empty());
    two.wait_until_free();
}

fn again_and_again(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    for _ in 0..3 {
        let boot = started(two, &span, &opened);
        let remote = remote(&span);
        keep_time(&boot);
        let start = boot.remote(&span, 1, &opened.launch).expect("coherent memory");
        // Forward, and what is left out: back.
        for offset in [start.tsc.offset.wrapping_add(1_000), start.tsc.offset] {
            remote.order(&Order::Step { offset }).expect("an order");
        }
        remote.order(&Order::Status).expect("an order");
        match remote.next(Some(SOON)) {
            Some(FromPart::Report(Report::Status(status))) => {
                assert!(status["exits"].is_array(), "{status}");
                assert!(status["coherence"]["faults"].is_object(), "{status}");
                assert_eq!(status["clock"]["made"], 1, "{status}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(noted(two)[0].shard_pid, Some(two.processes("shard")[0]));
        let table = memory_use::read(&noted(two)).expect("what beta's part takes");
        assert_eq!(table.vms[0].name, "big/1");
        assert_eq!(table.vms[0].memory_bytes, two.spec.memory.0, "a copy");
        assert!(table.vms[0].host_bytes > 0);
        let said = quit(remote);
        let step_back = "its process left with status 0; it said: a step of the guest's clock by -1000 ticks";
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

/// Rounds with beta go on after the boot, however long that took, until nobody wants them.
fn keep_time(boot: &Boot) {
    let clocks = boot.clocks().expect("those of two hosts");
    let keeper = boot.keep_time(|_| ()).expect("threads").expect("two hosts");
    // Longer than anybody waits for a first message.
    std::thread::sleep(Duration::from_millis(2_500));
    let rate_error = || clocks.status()[1]["rate_error_ppb"].as_u64();
    assert_eq!(rate_error(), Some(500_000), "nobody has begun");
    keeper.begin();
    wait(|| rate_error().is_some_and(|ppb| ppb < 500_000));
    let told = clocks.status();
    assert_eq!(
        (&told[1]["refused"], &told[1]["lost"]),
        (&0.into(), &().into()),
        "{told:?}"
    );
}

/// What beta's parts say of themselves, for `mem`.
fn noted(two: &Two) -> Vec<Record> {
    let parts = Registry::at(&site::beta(&two.folder).join("parts")).and_then(|registry| registry.list());
    parts.expect("a directory")
}

fn two_parts(two: &Two) {
    let mut spec = two.spec.clone();
    spec.cpus = 3;
    spec.span = Some(config::SpanSpec::Coherent(vec![0, 1, 2]));
    let span = Span::begin("big", &spec).expect("places").expect("a span");
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
    // The first ends, and the second misses it, though the home has a link to each.
    parts[0].order(&Order::Quit).expect("an order");
    match parts[1].next(Some(SOON)) {
        Some(FromPart::Report(Report::Ended(Ending::PeerLost { detail }))) => {
            let gone =
                "the shard in cell 1 on host beta is gone (it closed its streams), and its pages with it";
            assert_eq!(detail, gone);
        }
        other => panic!("{other:?}; lost: {:?}", span.lost()),
    }
    assert_eq!(gone(parts[1]), "its process left with status 0");
    span.leave();
    two.wait_until_free();
}

/// Four shards, two on each host in turn, so that there is a pair of each kind.
fn all_meet(two: &Two) {
    let mut spec = two.spec.clone();
    spec.cpus = 4;
    spec.span = Some(config::SpanSpec::Coherent(vec![0, 1, 3, 2]));
    let span = Span::begin(herald::NAME, &spec).expect("places").expect("a span");
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
            let Some(FromPart::Report(Report::Status(status))) = remote.next(Some(SOON)) else {
                panic!("it has not heard all");
            };
            assert_eq!(status["heard"], status["expected"]);
            assert_eq!(status["heard"].as_array().map(Vec::len), Some(6), "{status}");
            assert_eq!(status["names"], serde_json::json!(names));
            assert_eq!(status["kernel"]["start"], number);
            assert_eq!(status["device"], true, "its host's");
            // Beta's processes may do what this one may.
            if setrlimit(Resource::RLIMIT_RTPRIO, 10, 10).is_ok() {
                assert_eq!(status["priority"], 10, "its lanes may have some");
            }
            quit(remote);
        }
    }
    // Who comes for a boot that is over is too late.
    let files = Files::open().expect("files");
    let hosts = Hosts::open(files.site().expect("files").expect("hosts")).expect("keys");
    let of = |boot| LaneEnds {
        ends: Ends { boot, from: 0, to: 1 },
        lane: 0,
    };
    let reach = remote(&span).reach();
    assert!(connect(&hosts, reach, Role::Pages(of(0))).is_err());
    assert!(connect(&hosts, reach, Role::Pages(of(2))).is_ok(), "the next one");
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
    quit(remote);
    span.leave();
    assert!(vms(&two.beta_files()).is_empty());
    two.wait_until_free();
}

fn killed_shard(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(two, &span, &opened);
    two.processes("shard").into_iter().for_each(kill_process);
    let why = gone(remote(&span));
    assert!(why.starts_with("its process was ended by SIGKILL"), "{why}");
    drop(span);
    two.wait_until_free();
}

fn late_order(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    two.processes("shard").into_iter().for_each(kill_process);
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
    let told = boot.remote(&span, 1, &opened.launch);
    remote(&span)
        .start(told.expect("coherent memory"))
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
    two.processes("part-monitor").into_iter().for_each(kill_process);
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

fn lost_connections(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    drop(started(two, &span, &opened));
    match remote(&span).next(Some(SOON)) {
        Some(FromPart::Report(Report::Ended(Ending::PeerLost { detail }))) => {
            let gone =
                "the shard in cell 0 on host alpha is gone (it closed its streams), and its pages with it";
            assert_eq!(detail, gone);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(gone(remote(&span)), "its process left with status 0");
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
    let lane = |from, to, lane| LaneEnds {
        ends: ends(from, to),
        lane,
    };
    let link = Role::Link(ends(0, 1));
    for (reach, role) in [
        (&unknown, link),
        (known, Role::Control),
        (known, Role::Link(ends(0, 2))),
        (known, Role::Link(ends(1, 1))),
        (known, Role::Coherence(lane(0, 2, 0))),
        (known, Role::Pages(lane(1, 1, 0))),
        (known, Role::Pages(lane(0, 1, 4))),
        (&unknown, Role::Coherence(lane(0, 1, 0))),
    ] {
        assert!(connect(&hosts, reach, role).is_err(), "{role:?}");
    }
    let first = connect(&hosts, known, link).expect("a link");
    assert!(connect(&hosts, known, link).is_err(), "there is one already");
    drop(first);
    // Each lane has its own.
    for role in [
        Role::Coherence(lane(0, 1, 0)),
        Role::Coherence(lane(0, 1, 3)),
        Role::Pages(lane(0, 1, 0)),
    ] {
        connect(&hosts, known, role).expect("a lane");
        assert!(connect(&hosts, known, role).is_err(), "there is one already");
    }
    span.leave();
    let mut large = two.spec.clone();
    large.memory = config::Size(site::CELL_BYTES + (2 << 20));
    let why = Span::begin("big", &large).expect_err("no room").to_string();
    assert!(why.contains("of its own memory"), "{why}");
    // Alpha's cell has been asked first: nothing is kept there, either.
    large.memory = config::Size(site::CELL_BYTES);
    let held = Span::begin("big", &large).expect("places").expect("a span");
    // Cell 3 has room, and cell 1 has none: all, or none.
    large.span = Some(config::SpanSpec::Coherent(vec![3, 1]));
    let why = Span::begin("late", &large).expect_err("no room").to_string();
    assert!(
        why.starts_with("host beta: cell 1 has 0 MiB of its own memory, and 512 MiB are needed there"),
        "{why}"
    );
    large.span = Some(config::SpanSpec::Coherent(vec![3, 2]));
    let late = Span::begin("late", &large).expect("places").expect("a span");
    late.leave();
    held.leave();
    two.wait_until_free();
}

fn deaf_home(two: &Two) {
    // The part is gone before there is a home, or after.
    for life_ms in [0, 1000] {
        let name = deaf::name(deaf::Home::Deaf, life_ms);
        let why = failure(two, &name, &site::ALPHA, |_| panic!("it runs"));
        assert!(why.starts_with("in cell 3: its process"), "{why}");
    }
}

fn witness_home(two: &Two) {
    let name = deaf::name(deaf::Home::Witness, 400);
    let why = failure(two, &name, &[0, 1], |_| {});
    assert!(
        why.starts_with("in cell 1 on host beta: its process was ended by"),
        "{why}"
    );
    two.wait_until_free();
}

/// The home's memory is served by this process.
fn pages_come(two: &Two) {
    /// Pages that are beta's at first.
    const PAGES: u64 = 200;
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    let bytes = opened.launch.memory.bytes;
    let mut files = Vec::new();
    let launch = boot.launch(0, &mut files);
    let (mut near, mut far) = UnixStream::pair().expect("sockets");
    shard::process::send(&mut near, &launch, &files).expect("a message");
    let (launch, mut files) = shard::process::receive::<SpanLaunch>(&mut far).expect("a message");
    drop(boot);
    let replica = Replica::take(&launch, bytes, &mut files)
        .expect("a replica")
        .expect("one of its own");
    let layout = Layout::new(bytes, &[]).expect("a layout");
    let memory = replica.ram(&layout).expect("memory");
    let end = Arc::new(EndSignal::new().expect("an event"));
    let coherence = replica.start(&Threads::open(), &end).expect("lanes");

    // Who waits for a page that never comes waits for ever.
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let since = Instant::now();
        for page in 0..PAGES {
            let place = GuestAddress(bytes / 2 + page * 4096);
            assert_eq!(memory.read_obj::<u64>(place).expect("in memory"), 0);
        }
        let took = since.elapsed();
        println!("  a page in {} us", took.as_micros() / u128::from(PAGES));
        for page in 0..PAGES {
            let place = GuestAddress(bytes / 2 + page * 4096 + 8);
            memory.write_obj(page + 1, place).expect("in memory");
            assert_eq!(memory.read_obj::<u64>(place).expect("in memory"), page + 1);
        }
        let _ = tell.send(());
    });
    told.recv_timeout(SOON).expect("all pages");
    let here = coherence.status();
    assert!(here["faults"]["read"]["count"].as_u64() > Some(0), "{here}");
    assert!(here["faults"]["upgrade"]["count"].as_u64() > Some(0), "{here}");
    let remote = remote(&span);
    remote.order(&Order::Status).expect("an order");
    match remote.next(Some(SOON)) {
        Some(FromPart::Report(Report::Status(status))) => {
            assert!(
                status["coherence"]["messages"].as_u64() >= Some(PAGES),
                "{status}"
            );
        }
        other => panic!("{other:?}"),
    }
    two.processes("shard").into_iter().for_each(kill_process);
    wait(|| end.cause().is_some());
    match end.cause() {
        Some(Ending::PeerLost { detail }) => {
            assert!(
                detail.starts_with("the shard in cell 1 on host beta is gone"),
                "{detail}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert!(!coherence.is_whole());
    span.leave();
    two.wait_until_free();
}

/// Why a VM that spans these cells ended.
fn failure(two: &Two, name: &str, cells: &[u16], booted: fn(vm::Booted<'_>)) -> String {
    let mut spec = two.spec.clone();
    spec.span = Some(config::SpanSpec::Coherent(cells.to_vec()));
    let span = Span::begin(name, &spec).expect("places").expect("a span");
    let opened = two.opened_as(name, &spec);
    let (folder, name) = (two.folder.join(name), name.to_owned());
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let handle = Handle::default();
        let ran = vm::run(opened, &name, &folder, &handle, Some(&span), booted);
        span.leave();
        let _ = tell.send(ran.map_err(|error| error.to_string()));
    });
    match told.recv_timeout(SOON).expect("it ends") {
        Ok(Ending::ShardFailed { detail }) => detail,
        other => panic!("{other:?}"),
    }
}
