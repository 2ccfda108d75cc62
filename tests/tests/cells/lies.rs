//! A shard that lies: its VM ends alone, with a reason of one line and in time, or gains nothing.
//!
//! The tests' tool takes the place of the program of shards (`tests/src/bin/guest-tool/shard.rs`). Each VM is
//! named after its lie.

use std::time::{Duration, Instant};

use guest_tests::command::{Call, Output, Running};
use guest_tests::{host, wait};

use super::{Cells, END_LIMIT, SMALL, SOON, as_pid};

/// A shard that ignores its end is gone by then. A host in software gets more.
const GONE_LIMIT: Duration = Duration::from_secs(1);
/// Time for a cell's process to be found hanging, killed and started again.
const AGAIN_LIMIT: Duration = Duration::from_secs(30);
/// Time limit of a person's order, whatever another VM's shard does.
const ORDER_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of a shard's log that are kept, with a line about the part that is left out.
const LOG_BYTES_MAX: u64 = (64 + 16 + 4) << 10;
/// Growth of a cell's process, at most, while a shard floods it.
const GROWTH_BYTES_MAX: u64 = 48 << 20;
/// The name of a VM that does not lie, in the same cell.
const BYSTANDER: &str = "bystander";

/// Cells with a VM that does not lie, and a command whose program of shards does.
struct Lies {
    cells: Cells,
    command: std::path::PathBuf,
    cell: u32,
    bystander: u32,
}

impl Lies {
    #[track_caller]
    fn up(test: &str) -> Self {
        let cells = Cells::up(test);
        let folder = cells.scratch.join("lies");
        std::fs::create_dir(&folder).expect("a new directory");
        let command = folder.join("mirrorball");
        guest_tests::command::copy_binary(&command).expect("room for the command");
        let shard = folder.join("mirrorball-shard");
        std::fs::remove_file(&shard).expect("just copied");
        let tool = guest_tests::command::built("guest-tool");
        std::fs::copy(tool, &shard).expect("room for the tool");
        let file = cells.vm_file(BYSTANDER, &format!("{SMALL}cell = 1\n"), None);
        cells.call(["run", "-d", &file]).ok();
        cells.wait_served(&[BYSTANDER]);
        let cell = cells.processes(1)[1];
        let bystander = cells.inspect(BYSTANDER).and_then(|vm| as_pid(&vm["shard_pid"]));
        let bystander = bystander.expect("a shard that runs");
        Self {
            cells,
            command,
            cell,
            bystander,
        }
    }

    fn run(&self, name: &str) -> Running {
        let file = self.cells.vm_file(name, &format!("{SMALL}cell = 1\n"), None);
        let call = Call::new(&self.command).args(["run", &file]);
        self.cells.with_settings(call).spawn()
    }

    /// The shard of a VM that its cell serves.
    #[track_caller]
    fn served(&self, name: &str) -> u32 {
        wait::until("a lying VM that its cell serves", ORDER_LIMIT, || {
            let vm = self.cells.inspect(name)?;
            let is_served = vm["monitor_pid"] == self.cell && vm["state"] == "running";
            as_pid(&vm["shard_pid"]).filter(|_| is_served)
        })
    }

    /// The keeper and the shard of a VM that its cell serves, by its record. The shard gets no request.
    #[track_caller]
    fn recorded(&self, name: &str) -> [u32; 2] {
        let file = self.cells.scratch.join(&format!("runtime/vms/{name}/vm.json"));
        wait::until("a record of a VM that its cell serves", ORDER_LIMIT, || {
            let record = std::fs::read_to_string(&file).ok()?;
            let vm: serde_json::Value = serde_json::from_str(&record).ok()?;
            let is_served = vm["monitor_pid"] == self.cell && vm["state"] == "running";
            Some([as_pid(&vm["keeper_pid"])?, as_pid(&vm["shard_pid"])?]).filter(|_| is_served)
        })
    }

    /// Checks that the other VM and the cell's process are unchanged, and answer.
    #[track_caller]
    fn expect_nothing_else(&self, after: &str) {
        let begun = Instant::now();
        let vm = self.cells.inspect(BYSTANDER).expect("the other VM answers");
        assert_eq!(vm["shard_pid"], self.bystander, "after {after}: {vm:#}");
        assert_eq!(vm["state"], "running", "after {after}: {vm:#}");
        assert_eq!(vm["monitor_pid"], self.cell, "after {after}: {vm:#}");
        let status = self.cells.status();
        assert_eq!(status[1]["pid"], self.cell, "after {after}: {status:?}");
        assert!(
            begun.elapsed() < ORDER_LIMIT,
            "after {after}: {:?}",
            begun.elapsed()
        );
    }

    /// Checks that a VM of this name ends in time, with this reason in one line.
    #[track_caller]
    fn expect_end(&self, name: &str, reason: &str) {
        let begun = Instant::now();
        let ended = self.run(name).wait().expect(73);
        let took = begun.elapsed();
        assert!(took < ORDER_LIMIT, "{name} took {took:?}");
        expect_one_line(&ended, reason);
        assert!(self.cells.inspect(name).is_none(), "{name} is still there");
        self.expect_nothing_else(name);
    }

    /// Kills a VM, whose command then reports that. Its shard is gone in time.
    #[track_caller]
    fn kill(&self, name: &str, run: Running, shard: u32) {
        let begun = Instant::now();
        self.cells.call(["kill", name]).ok();
        host::wait_gone(&[shard], gone_limit());
        run.wait().expect(74);
        assert!(begun.elapsed() < gone_limit() + END_LIMIT, "{name}");
        self.expect_nothing_else(name);
    }
}

fn gone_limit() -> Duration {
    if host::in_lab() {
        GONE_LIMIT * 5
    } else {
        GONE_LIMIT
    }
}

#[track_caller]
fn expect_one_line(output: &Output, reason: &str) {
    let errors = output.errors();
    let lines: Vec<&str> = errors.lines().filter(|line| line.contains(reason)).collect();
    assert_eq!(lines.len(), 1, "{reason}: {output}");
    assert!(!errors.contains('\u{1b}'), "{output}");
}

#[test]
fn shard_whose_reports_make_no_sense_ends_alone_with_a_reason() {
    let lies = Lies::up("lies-reports");
    lies.expect_end("lie-bytes", "sent what is no report and was killed");
    lies.expect_end("lie-empty", "sent what is no report and was killed");
    lies.expect_end("lie-unlike", "sent what is no report and was killed");
    lies.expect_end("lie-count", "sent what is no report and was killed");
    lies.expect_end("lie-twice", "sent what is no report and was killed");
    lies.expect_end("lie-closed", "closed its control socket and was killed");
}

#[test]
fn shard_that_reports_its_end_and_stays_is_killed_in_time() {
    let lies = Lies::up("lies-end");
    // It reports a power-off before it has run, which ends its VM as a power-off does.
    let begun = Instant::now();
    lies.run("lie-early").wait().expect(0);
    assert!(
        begun.elapsed() < gone_limit() + ORDER_LIMIT,
        "{:?}",
        begun.elapsed()
    );
    lies.expect_nothing_else("lie-early");

    let run = lies.run("lie-undead");
    let shard = lies.served("lie-undead");
    lies.kill("lie-undead", run, shard);
}

/// State of the cell's process while a VM is to end.
#[derive(Clone, Copy, Debug)]
enum CellProcess {
    Runs,
    /// Its guard starts it again at once.
    Killed,
    /// Its guard was killed before, and starts nothing.
    KilledWithGuard,
    /// Its guard takes 4 s to notice it.
    Stopped,
}

/// Cause of a VM's end.
#[derive(Clone, Copy, Debug)]
enum End {
    Kill,
    Lease,
    Keeper,
}

#[test]
fn shard_that_ignores_its_end_is_gone_within_a_second_whatever_its_cell_does() {
    use CellProcess::{Killed, KilledWithGuard, Runs, Stopped};
    let mut lies = Lies::up("lies-deaf");
    for process in [Runs, Killed, KilledWithGuard, Stopped] {
        for end in [End::Kill, End::Lease, End::Keeper] {
            // It reads no orders.
            let run = lies.run("lie-deaf");
            let [keeper, shard] = lies.recorded("lie-deaf");
            let [guard, cell] = lies.cells.processes(1);
            match process {
                Runs => {}
                Killed => host::kill9(cell),
                KilledWithGuard => [guard, cell].into_iter().for_each(host::kill9),
                Stopped => host::stop(cell),
            }
            let begun = Instant::now();
            match end {
                End::Kill => drop(lies.cells.call(["kill", "lie-deaf"]).ok()),
                End::Lease => host::kill9(run.pid()),
                End::Keeper => host::kill9(keeper),
            }
            host::wait_gone(&[shard], gone_limit());
            assert!(
                begun.elapsed() < gone_limit(),
                "{process:?}, {end:?}: {:?}",
                begun.elapsed()
            );
            drop(run);
            if let KilledWithGuard = process {
                // It starts the missing cell alone.
                lies.cells.up_again();
            }
            lies.cell = wait::until("a cell that runs again", AGAIN_LIMIT, || {
                let status = lies.cells.call(["cluster", "status", "--json"]).run();
                let again = (status.status == 0).then(|| as_pid(&status.json()[1]["pid"]))??;
                (host::is_running(again) && (again == cell) == matches!(process, Runs)).then_some(again)
            });
            lies.cells.wait_served(&[BYSTANDER]);
            lies.expect_nothing_else("lie-deaf");
        }
    }
}

#[test]
fn shard_that_floods_its_cell_or_answers_without_a_request_gains_nothing() {
    let lies = Lies::up("lies-flood");
    let run = lies.run("lie-order");
    let shard = lies.served("lie-order");
    let status = lies.cells.call(["inspect", "lie-order"]).run();
    assert!(!status.text().contains('\u{1b}'), "{status}");
    lies.expect_nothing_else("lie-order");
    lies.kill("lie-order", run, shard);

    let before = host::proportional_bytes(lies.cell);
    let run = lies.run("lie-flood");
    let shard = lies.served("lie-flood");
    // Its first answer comes after the flood.
    wait::until("the end of a flood", SOON, || {
        lies.expect_nothing_else("a flood");
        let status = lies.cells.call(["inspect", "lie-flood"]).run();
        status.text().contains(&u64::MAX.to_string()).then_some(())
    });
    let log = lies.cells.scratch.join("runtime/vms/lie-flood/shard.log");
    let bytes = std::fs::metadata(&log).expect("a log").len();
    assert!(bytes < LOG_BYTES_MAX, "{bytes} bytes of log");
    let grown = host::proportional_bytes(lies.cell).saturating_sub(before);
    assert!(grown < GROWTH_BYTES_MAX, "the cell has grown by {grown} bytes");
    lies.kill("lie-flood", run, shard);
}
