//! Risk: a VM ends, or notices, when the process of its cell dies or hangs.

mod fault_points;
mod upgrades;

use std::time::{Duration, Instant};

use guest_tests::host::{self, Traces};
use guest_tests::load::Load;
use guest_tests::span::two_cells;
use guest_tests::{Cluster, Scratch, Vm, VmFile, mirrorball, net, repetitions, wait};

/// Processes of cells that are killed in a campaign, and those that are stopped: two in each round.
const ENDS: usize = 100;
/// Time that the next processes have to serve all VMs, after a stop too, on a host in software.
const NEXT_LIMIT: Duration = Duration::from_secs(60);
/// The longest that the work goes on.
const WORK_LIMIT: Duration = Duration::from_secs(3 * 3600);

/// How a process of a cell ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    /// The cell hangs until its guard kills it.
    Stopped,
}

/// Ends the processes of both cells, and waits until their next ones serve the VMs, each in its home's cell.
/// Returns how long that took.
#[track_caller]
fn end_processes(cluster: &Cluster, vms: &[(&Vm, usize)], how: End) -> Duration {
    let before = [0, 1].map(|cell| cluster.pid(cell));
    for pid in before {
        match how {
            End::Killed => host::kill9(pid),
            End::Stopped => host::stop(pid),
        }
    }
    let ended = Instant::now();
    wait::until("the next processes and their VMs", NEXT_LIMIT, || {
        let status = mirrorball(["cluster", "status", "--json"]).run();
        let cells = (status.status == 0).then(|| status.json())?;
        let is_next = |cell: usize| !cells[cell]["life"].is_null() && cells[cell]["pid"] != before[cell];
        let is_served = |&(vm, cell): &(&Vm, usize)| {
            let record = vm.listed()?;
            (record["monitor_pid"] == cells[cell]["pid"]).then_some(())
        };
        (is_next(0) && is_next(1) && vms.iter().all(|vm| is_served(vm).is_some())).then_some(())
    });
    ended.elapsed()
}

/// Promise HOSTILE-17.
#[test]
fn vms_run_on_while_the_processes_of_their_cells_are_killed_and_stopped() {
    let scratch = Scratch::new("restarts");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let disk = scratch.sparse("restarts.raw", 16 << 20);
    let busy = VmFile::new("restarts-disk")
        .key("cell", "0")
        .memory("256M")
        .net("kind = \"user\"")
        .disk(&disk, "mode = \"exclusive\"\npersistent = true")
        .start(&scratch);
    let parent = VmFile::new("restarts-parent").key("cell", "1").start(&scratch);
    let wide = two_cells("restarts-wide").start(&scratch);
    net::lease(&busy, &scratch);
    let shards = [busy.shard(), parent.shard(), wide.shard()];
    let load = [(&busy, true), (&parent, false), (&wide, false)];
    let load = load.map(|(vm, writes)| Load::start(vm, writes, WORK_LIMIT));
    let vms = [(&busy, 0), (&parent, 1), (&wide, 0)];

    let (mut took, mut clones) = (Vec::new(), 0);
    for round in 0..repetitions(ENDS) {
        let how = if round % 2 == 0 { End::Killed } else { End::Stopped };
        // A clone is whole or refused.
        let clone = (how == End::Killed).then(|| mirrorball(["clone", parent.name()]).spawn());
        std::thread::sleep(Duration::from_millis(37 * (round as u64 % 20)));
        took.push((how, end_processes(&cluster, &vms, how)));
        if let Some(clone) = clone.map(guest_tests::command::Running::wait)
            && clone.status == 0
        {
            let clone = Vm::named(clone.text().trim());
            assert_eq!(clone.boot_id(), parent.boot_id(), "it goes on from its parent");
            clone.kill();
            clones += 1;
        }
        let now = [busy.shard(), parent.shard(), wide.shard()];
        assert_eq!(now, shards, "the VMs are the same after round {round}");
    }
    for how in [End::Killed, End::Stopped] {
        let mut took: Vec<Duration> = took
            .iter()
            .filter(|(was, _)| *was == how)
            .map(|(_, took)| *took)
            .collect();
        took.sort();
        println!(
            "{how:?} {} times: the next processes served all VMs within {:?} (median), {:?} (longest)",
            took.len(),
            took[took.len() / 2],
            took[took.len() - 1]
        );
    }
    println!("{clones} clones were made meanwhile");
    let seen = load.map(Load::end);
    println!("{seen:?}");
    // A process that is killed loses at most what it has just read from the guest.
    assert!(
        seen[0].console_gaps <= repetitions(ENDS),
        "lines of the console were lost: {seen:?}"
    );
    for vm in [&busy, &parent, &wide] {
        vm.stop();
    }
    wait::until("the empty cells", NEXT_LIMIT, || {
        [0, 1]
            .iter()
            .all(|cell| cluster.vms(*cell).is_empty())
            .then_some(())
    });
    drop((busy, parent, wide, cluster));
    before.expect_unchanged("VMs whose cells' processes were killed and stopped");
}
