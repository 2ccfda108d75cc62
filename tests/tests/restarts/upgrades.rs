//! Risk: a VM ends, or notices, when another program takes the place of its cell's, or fails in that place.

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use guest_tests::command::{Call, built};
use guest_tests::host::Traces;
use guest_tests::load::Load;
use guest_tests::span::{cells_are_empty, two_cells};
use guest_tests::vm::runtime_directory;
use guest_tests::{Cluster, Scratch, Vm, VmFile, mirrorball, net, repetitions, wait};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

/// Upgrades of all cells in a campaign.
const UPGRADES: usize = 40;
/// Time limit of a guard's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time limit until a cell's next process serves a VM.
const SERVE_LIMIT: Duration = Duration::from_secs(30);
/// The longest that the work goes on.
const WORK_LIMIT: Duration = Duration::from_secs(3 * 3600);
/// A guard gives a cell up whose processes live shorter than ten seconds ten times in a row. A replaced
/// process counts as none.
const PAUSE: Duration = Duration::from_secs(1);

/// The program of the release before this one, which a campaign compiles; none in a landing.
fn former() -> Option<PathBuf> {
    let program = built("../../former/mirrorball");
    program.exists().then_some(program)
}

/// Sends the guard of a cell the file at `path` as the cell's next program. Returns the answer.
#[track_caller]
fn ask_guard(cell: usize, path: &str) -> String {
    let socket = runtime_directory().join(format!("cells/{cell}/guard.sock"));
    let guard = UnixStream::connect(socket).expect("the guard listens");
    guard.set_read_timeout(Some(ANSWER_LIMIT)).expect("not zero");
    let program = File::open(path).expect("a program");
    let ask = b"{\"versions\":{\"oldest\":1,\"newest\":1},\"ask\":\"upgrade\",\"program\":0}\n";
    let files = [program.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&files)];
    sendmsg::<()>(
        guard.as_raw_fd(),
        &[IoSlice::new(ask)],
        &rights,
        MsgFlags::empty(),
        None,
    )
    .expect("a request");
    let mut answer = String::new();
    BufReader::new(guard).read_line(&mut answer).expect("an answer");
    answer
}

/// Each VM is served by its cell's process.
#[track_caller]
fn wait_until_served(cluster: &Cluster, vms: &[(&Vm, usize)]) {
    wait::until("VMs that their cells serve", SERVE_LIMIT, || {
        let cells = cluster.cells();
        let is_served = |(vm, cell): &(&Vm, usize)| {
            vm.listed()
                .is_some_and(|vm| vm["monitor_pid"] == cells[*cell]["pid"])
        };
        vms.iter().all(is_served).then_some(())
    });
}

/// Promise HOSTILE-23.
#[test]
fn vms_run_on_while_programs_of_their_cells_are_replaced_and_one_that_fails_is_taken_back() {
    let scratch = Scratch::new("upgrades");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let disk = scratch.sparse("upgrades.raw", 16 << 20);
    let busy = VmFile::new("upgrades-disk")
        .key("cell", "0")
        .memory("256M")
        .net("kind = \"user\"")
        .disk(&disk, "mode = \"exclusive\"\npersistent = true")
        .start(&scratch);
    let plain = VmFile::new("upgrades-plain").key("cell", "1").start(&scratch);
    let wide = two_cells("upgrades-wide").start(&scratch);
    net::lease(&busy, &scratch);
    let vms = [(&busy, 0), (&plain, 1), (&wide, 0)];
    let processes = || vms.map(|(vm, _)| (vm.shard(), vm.keeper()));
    let begun = processes();
    let load = [(&busy, true), (&plain, false), (&wide, false)];
    let load = load.map(|(vm, writes)| Load::start(vm, writes, WORK_LIMIT));

    let former = former();
    if former.is_none() {
        println!(
            "the program of the former release is not compiled: this one takes its own place \
             (`make campaign NAME=restarts` compiles it)"
        );
    }
    for round in 0..repetitions(UPGRADES) {
        let upgrade = match &former {
            // Back, and forth.
            Some(former) if round % 2 == 0 => Call::new(former).args(["cluster", "upgrade"]),
            _ => mirrorball(["cluster", "upgrade"]),
        };
        let pids = [0, 1].map(|cell| cluster.pid(cell));
        let said = upgrade.ok().text();
        assert!(
            said.contains("cell 0: release") && said.contains("cell 1: release"),
            "{said}"
        );
        for cell in [0, 1] {
            assert_ne!(cluster.pid(cell), pids[cell], "{said}");
        }
        wait_until_served(&cluster, &vms);
        assert_eq!(processes(), begun, "the VMs are the same after round {round}");
        std::thread::sleep(PAUSE);
    }

    // Programs that end at once, that are no cell, and that are no program.
    for (path, reason) in [
        ("/bin/false", "had adopted the cell"),
        ("/bin/echo", "had adopted the cell"),
        ("/etc/passwd", "no executable file"),
        ("/dev/null", "no executable file"),
    ] {
        let answer = ask_guard(1, path);
        assert!(
            answer.contains("refused") && answer.contains(reason),
            "{path}: {answer}"
        );
        wait_until_served(&cluster, &vms);
    }
    assert_eq!(processes(), begun);
    plain.sh("true");

    let seen = load.map(Load::end);
    println!("{seen:?}");
    assert!(
        seen[0].console_gaps <= repetitions(UPGRADES),
        "lines of the console were lost: {seen:?}"
    );
    assert_eq!(
        busy.sh("cat /sys/class/net/eth0/carrier").trim(),
        "1",
        "the card's link"
    );
    busy.reboot();
    for vm in [&busy, &plain, &wide] {
        vm.stop();
    }
    cells_are_empty(&cluster);
    drop((busy, plain, wide, cluster));
    before.expect_unchanged("upgrades of cells");
}
