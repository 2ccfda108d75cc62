//! Ends of shards, monitors, homes and hosts: the reports of their reasons, and their remains.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use cell::handle::VmHandle;
use cell::remote::protocol::FromPart;
use cell::spanning::Span;
use cell::vm::{self, Vm};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shard::launch::{Ending, Report};

use super::SILENCE_MS;
use crate::hosts::two::{SOON, Two, gone, kill_process, programs, remote, started, wait};
use crate::hosts::{deaf, site};

pub fn killed_shard(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(two, &span, &opened);
    two.shards().into_iter().for_each(kill_process);
    let why = gone(remote(&span));
    assert!(why.starts_with("its process was ended by SIGKILL"), "{why}");
    drop(span);
    two.wait_until_free();
}

pub fn second_start(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    let shards = two.shards();
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

pub fn killed_monitor(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(two, &span, &opened);
    two.processes("part-monitor").into_iter().for_each(kill_process);
    wait(|| span.lost().is_some());
    let why = "cell 1 on host beta, which it spans, is gone: its monitor has ended";
    assert_eq!(span.lost().as_deref(), Some(why));
    assert!(remote(&span).next(Some(SOON)).is_none());
    wait(|| two.at_beta().is_empty());
    wait(|| two.shards().is_empty());
    // A name that was not given back is free when alpha's cell has read the end of the connection.
    drop(span);
    wait(|| two.at_alpha().is_empty());
    two.span().leave();
    two.wait_until_free();
}

pub fn silent_host(two: &Two) {
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

pub fn silent_home(two: &Two) {
    two.start_home();
    assert_eq!(two.at_beta(), ["big/1"]);
    two.signal("home", Signal::SIGSTOP);
    // It has ended nothing and closed nothing.
    two.wait_until_free();
    two.kill("home");
}

pub fn dead_home(two: &Two) {
    let (span, opened) = (two.span(), two.opened());
    let boot = started(two, &span, &opened);
    drop(span);
    two.wait_until_free();
    drop(boot);
}

pub fn lost_connections(two: &Two) {
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
    assert_eq!(gone(remote(&span)), "its process left with status 73");
    span.leave();
    two.wait_until_free();
}

pub fn deaf_home(two: &Two) {
    // The part is gone before there is a home, or after.
    for life_ms in [0, 1000] {
        let name = deaf::name(deaf::Home::Deaf, life_ms);
        let why = failure(two, &name, &site::ALPHA, |_| panic!("it runs"));
        assert!(why.starts_with("in cell 3: its process"), "{why}");
    }
}

pub fn witness_home(two: &Two) {
    let name = deaf::name(deaf::Home::Witness, 400);
    let why = failure(two, &name, &[0, 1], |_| {});
    assert!(
        why.starts_with("in cell 1 on host beta: its process was ended by"),
        "{why}"
    );
    two.wait_until_free();
}

/// The reason for the end of a VM that spans these cells.
fn failure(two: &Two, name: &str, cells: &[u16], progress: fn(vm::Progress<'_>)) -> String {
    let mut spec = two.spec.clone();
    spec.span = Some(config::SpanSpec::Coherent(cells.to_vec()));
    let span = Span::begin(name, &spec, shard::PLATFORM)
        .expect("places")
        .expect("a span");
    let opened = two.opened_as(name, &spec);
    let (folder, name) = (two.folder.join(name), name.to_owned());
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let handle = VmHandle::default();
        let vm = Vm {
            name: &name,
            folder: &folder,
            programs: &programs(),
            handle: &handle,
            span: Some(&span),
            monitor: None,
        };
        let keeper = vm::start_keeper(vm.programs, vm.name).expect("a keeper");
        let ran = vm::run(vm, opened, vm::Adopted::New(keeper), progress);
        span.leave();
        let _ = tell.send(ran.map_err(|error| error.to_string()));
    });
    match told.recv_timeout(SOON).expect("it ends") {
        Ok(Ending::ShardFailed { detail }) => detail,
        other => panic!("{other:?}"),
    }
}
