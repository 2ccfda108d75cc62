//! Requests to the hosts before anything runs: places, names, and the admission of connections.

use std::process::Stdio;
use std::time::Duration;

use cell::cluster::hosts::Hosts;
use cell::handle::VmHandle;
use cell::remote::connections::connect;
use cell::remote::protocol::{Ends, LaneEnds, Role, Token};
use cell::spanning::Span;
use cell::spanning::boot::Boot;
use cell::vm::{self, Vm};
use registry::cluster::client;
use registry::cluster::files::Files;

use crate::hosts::site;
use crate::hosts::two::{Two, programs, quit, remote, started, wait};

pub fn not_coherent(two: &Two) {
    let mut shared = two.spec.clone();
    shared.span = Some(config::SpanSpec::Cells(vec![0, 1]));
    let why = Span::begin("big", &shared, shard::PLATFORM)
        .expect_err("two hosts")
        .to_string();
    assert!(
        why.starts_with("it spans cell 1 on host beta") && why.contains("write `memory = \"coherent\"`"),
        "{why}"
    );
    assert!(!why.contains('\n'), "{why}");
    assert!(two.at_beta().is_empty());
    // No place was requested: no monitor has ever been there.
    assert!(!site::beta(&two.folder).join("parts").exists());
}

pub fn no_kernel(two: &Two) {
    let span = two.span();
    assert_eq!(two.at_beta(), ["big/1"]);
    let handle = VmHandle::default();
    let vm = Vm {
        name: "big",
        folder: &two.folder.join("big"),
        programs: &programs(),
        handle: &handle,
        span: Some(&span),
        monitor: None,
    };
    let keeper = vm::start_keeper(vm.programs, vm.name).expect("a keeper");
    let ran = vm::run(vm, two.opened(), vm::Adopted::New(keeper), |_| panic!("it runs"));
    let why = ran.expect_err("no kernel").to_string();
    assert!(why.starts_with("the VM cannot start with the kernel"), "{why}");
    span.leave();
    assert!(two.at_beta().is_empty());
    two.wait_until_free();
}

pub fn strangers(two: &Two) {
    let span = two.span();
    let files = Files::open().expect("files");
    let hosts = Hosts::open(files.site().expect("files").expect("hosts")).expect("keys");
    let known = remote(&span).endpoint();
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
    // Each lane has its own connections.
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
    let why = Span::begin("big", &large, shard::PLATFORM)
        .expect_err("no room")
        .to_string();
    assert!(why.contains("of its own memory"), "{why}");
    // Alpha's cell received a request first: nothing is kept there, either.
    large.memory = config::Size(site::CELL_BYTES);
    let held = Span::begin("big", &large, shard::PLATFORM)
        .expect("places")
        .expect("a span");
    // Cell 3 has room, and cell 1 has none: all, or none.
    large.span = Some(config::SpanSpec::Coherent(vec![3, 1]));
    let why = Span::begin("late", &large, shard::PLATFORM)
        .expect_err("no room")
        .to_string();
    assert!(
        why.starts_with("host beta: cell 1 has 0 MiB of its own memory, and 512 MiB are needed there"),
        "{why}"
    );
    large.span = Some(config::SpanSpec::Coherent(vec![3, 2]));
    let late = Span::begin("late", &large, shard::PLATFORM)
        .expect("places")
        .expect("a span");
    late.leave();
    held.leave();
    two.wait_until_free();
}

pub fn real_cells(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(two, &span, &opened);
    let vms = |files: &Files| -> Vec<String> {
        let status = client::status(files).expect("an answer").expect("a cluster");
        status.cells.into_iter().flat_map(|cell| cell.vms).collect()
    };
    let all = ["big", "big/1"];
    assert_eq!(vms(&two.beta_files()), all);
    // Both cells have the name: no other VM gets it, on either host.
    let twice = Span::begin("big", &two.spec, shard::PLATFORM)
        .expect_err("it is taken")
        .to_string();
    assert!(twice.starts_with("a VM named big is running already"), "{twice}");
    two.kill("1");
    two.start("1", &["cell", "1"], &site::beta(&two.folder), Stdio::null());
    wait(|| two.both_live());
    // Longer than the time limit for monitors to find orphans.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(vms(&two.beta_files()), all);
    assert_eq!(span.lost(), None);
    let remote = remote(&span);
    quit(remote);
    span.leave();
    assert!(vms(&two.beta_files()).is_empty());
    two.wait_until_free();
}

/// Two VMs over the same cells; the second one works without shared memory, until the first one is gone from
/// both hosts.
pub fn one_vm_at_a_time(two: &Two) {
    let opened = two.opened();
    let boot_of = |span: &Span| Boot::new(span, &opened.launch.memory, Some(0..0)).expect("links and lanes");
    let told = |boot: &Boot| {
        let mut files = Vec::new();
        let launch = boot.launch(0, &mut files).coherence.expect("coherent memory");
        (launch.shared[1].is_some(), launch.notes)
    };
    let first = two.span();
    let second = Span::begin("second", &two.spec, shard::PLATFORM)
        .expect("places")
        .expect("a span");
    let boot = boot_of(&first);
    assert_eq!(told(&boot), (true, Vec::new()));
    let (is_shared, notes) = told(&boot_of(&second));
    assert!(!is_shared);
    let why = ": another VM of these two cells uses it";
    assert!(notes.len() == 1 && notes[0].ends_with(why), "{notes:?}");
    drop(boot);
    first.leave();
    wait(|| told(&boot_of(&second)).0);
    second.leave();
    two.wait_until_free();
}
