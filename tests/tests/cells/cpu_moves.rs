//! vCPUs that are moved to CPUs by command, in their cell and to another one of the host.

use std::fs;

use guest_tests::cluster::allowed_cpus;
use guest_tests::command::Call;
use guest_tests::fault_points::FaultPoints;
use guest_tests::halting::spinning_guest;
use guest_tests::{Scratch, host, wait};
use serde_json::{Value, json};

use super::{BY_COMMAND, Cells, NAME, SMALL, SOON, as_pid};

const GANGS: &str = "[scheduling]\ncpus = \"gangs\"\n";
/// Exit status of a VM that has ended with a cell on which it depended.
const LOST: i32 = 73;
/// Points of a vCPU's way to another cell's CPU, and of its way back, in their order.
const OUT: [&str; 4] = ["cpu_agreed", "cpu_recorded", "cpu_announced", "cpu_reached"];
const BACK: [&str; 2] = ["cpu_left", "cpu_returned"];

/// The two CPUs of the tests.
#[track_caller]
fn two_cpus() -> [usize; 2] {
    let cpus: Vec<usize> = allowed_cpus().take(2).collect();
    cpus.try_into().expect("two CPUs")
}

/// Two cells of a CPU each, with this table besides.
#[track_caller]
pub(super) fn cells_of_a_cpu(test: &str, table: &str) -> (Cells, [usize; 2]) {
    let cpus = two_cpus();
    let cells = cpus.map(|cpu| format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"192M\"\n"));
    let text = format!("{}{BY_COMMAND}{table}", cells.concat());
    let cells = Cells::up_of(Scratch::new(test), &text, &spinning_guest());
    (cells, cpus)
}

impl Cells {
    fn move_to(&self, vcpu: u8, cpu: usize) -> Call {
        let (vcpu, cpu) = (vcpu.to_string(), cpu.to_string());
        self.call(["move", NAME, "--vcpu", &vcpu, "--cpu", &cpu])
    }

    /// Starts the VM in cell 0, and waits until that serves it.
    #[track_caller]
    fn start(&self, keys: &str) {
        let file = self.vm_file(NAME, &format!("{SMALL}cell = 0\n{keys}"), None);
        self.call(["run", "-d", &file]).ok();
        self.wait_until_home_serves();
    }

    #[track_caller]
    fn wait_until_home_serves(&self) {
        wait::until("a VM that cell 0 serves", SOON, || {
            let status = self.call(["cluster", "status", "--json"]).run();
            let pid = (status.status == 0).then(|| as_pid(&status.json()[0]["pid"]))??;
            let vm = self.inspect(NAME)?;
            (vm["monitor_pid"] == pid && vm["state"] == "running").then_some(())
        });
    }

    /// Has the vCPU run on a CPU of either cell, both of which serve requests then.
    #[track_caller]
    fn begin_at(&self, cpu: usize) {
        let [_, other] = two_cpus();
        wait::until("a lender that has met its cluster", SOON, || {
            (self.move_to(0, other).run().status == 0).then_some(())
        });
        self.move_to(0, cpu).ok();
    }

    /// The process of cell 0, with breakpoints at its fault points. They are set in a while in which it does
    /// not answer, so that its guard may take it for hung and replace it.
    #[track_caller]
    fn traced_home(&self) -> (u32, FaultPoints) {
        wait::until("a process that is traced", SOON, || {
            let [_, home] = self.processes(0);
            let points = FaultPoints::of(&[home]);
            if self.processes(0)[1] == home {
                return Some((home, points));
            }
            points.wait();
            self.wait_until_home_serves();
            None
        })
    }

    /// The CPUs that the host lets the thread of a vCPU use.
    fn allowed(&self, vcpu: u64) -> Option<String> {
        let vm = self.inspect(NAME)?;
        let all = vm["status"]["vcpus"].as_array()?;
        let known = all.iter().find(|known| known["vcpu"] == vcpu)?;
        let path = format!("/proc/{}/task/{}/status", known["shard_pid"], known["thread_id"]);
        let status = fs::read_to_string(path).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some(line.trim().to_owned())
    }

    #[track_caller]
    fn expect_on(&self, vcpu: u64, cpu: usize) {
        wait::until(&format!("vCPU {vcpu} on CPU {cpu}"), SOON, || {
            (self.allowed(vcpu)? == cpu.to_string()).then_some(())
        });
    }

    /// The cell of the VM's vCPU by its record, by the list of vCPUs and by the table of the cells.
    #[track_caller]
    fn cell_of_vcpu(&self, cpu: usize) -> u64 {
        let vm = self.inspect(NAME).expect("it runs");
        let lent = self.status()[1]["lent_cpus"].clone();
        let listed = self.call(["cluster", "vcpus", "--json"]).ok().json();
        let cell = listed[0]["cell"].as_u64().expect("a cell");
        let shown = &vm["status"]["vcpus"][0]["cell"];
        match cell {
            0 => {
                assert_eq!(
                    (&vm["borrowed_cpus"], &lent),
                    (&Value::Null, &Value::Null),
                    "{vm}"
                );
                assert_eq!(shown, &Value::Null);
            }
            _ => {
                assert_eq!(vm["borrowed_cpus"], json!([{"vcpu": 0, "cell": 1, "cpu": cpu}]));
                assert_eq!(lent, json!([{"cpu": cpu, "cell": 0, "vm": NAME, "vcpu": 0}]));
                assert_eq!(shown, 1);
            }
        }
        cell
    }
}

#[test]
fn driver_takes_a_vcpu_by_command_or_refuses_with_the_reason() {
    let cpus = two_cpus();
    let list = format!("{},{}", cpus[0], cpus[1]);
    let text = format!("[[cells]]\ncpus = \"{list}\"\nmemory = \"256M\"\n{GANGS}");
    let cells = Cells::up_of(Scratch::new("driven-move"), &text, &spinning_guest());
    cells.start("");
    for cpu in [cpus[1], cpus[0], cpus[0]] {
        let said = cells.move_to(0, cpu).ok().text();
        let expected = format!("vCPU 0 of {NAME} runs on CPU {cpu}; drivers may move it again\n");
        assert_eq!(said, expected);
        cells.expect_on(0, cpu);
    }
    let queues = cells
        .call(["top", "--json", "--count", "1", "--interval", "0.1"])
        .ok()
        .json();
    let queues = queues["cpus"].as_array().expect("CPUs").iter();
    let moved: u64 = queues
        .filter_map(|cpu| cpu["queue"]["moves"]["ordered"].as_u64())
        .sum();
    assert!(moved >= 1, "{moved}");

    let refused = |arguments: &[&str], status: i32, why: &str| {
        let output = cells.call(arguments.iter().copied()).run().expect(status);
        assert!(output.errors().contains(why), "{output}");
    };
    let [first, second] = cpus.map(|cpu| cpu.to_string());
    refused(&["move", "other", "--vcpu", "0", "--cpu", &first], 1, "other");
    refused(
        &["move", NAME, "--vcpu", "1", "--cpu", &first],
        1,
        "no vCPU 1; help: name one of 0",
    );
    refused(
        &["move", NAME, "--vcpu", "0", "--cpu", "1023"],
        1,
        "no cell of this host has CPU 1023",
    );
    refused(&["move", NAME, "--vcpu", "0"], 2, "--cell");
    refused(
        &["move", NAME, "--vcpu", "0", "--cpu", &first, "--cell", "0"],
        2,
        "--cell",
    );
    cells.call(["update", NAME, "--pin", &format!("0={first}")]).ok();
    refused(
        &["move", NAME, "--vcpu", "0", "--cpu", &second],
        1,
        "is pinned to other CPUs",
    );
    cells.call(["update", NAME, "--pin", "0=all"]).ok();
    cells.call(["kill", NAME]).ok();

    cells.start("cpus = 2\n");
    let here = wait::until("a vCPU on a CPU of its own", SOON, || {
        cpus.into_iter()
            .find(|cpu| cells.allowed(0) == Some(cpu.to_string()))
    });
    let there = cpus.into_iter().find(|cpu| *cpu != here).expect("two CPUs");
    let output = cells.move_to(0, there).run().expect(1);
    assert!(output.errors().contains("no two of a VM share one"), "{output}");
    cells.move_to(0, here).ok();
    cells.expect_on(0, here);
}

#[test]
fn vcpu_runs_on_another_cells_cpu_by_command_and_its_vm_depends_on_that_cell_until_it_is_back() {
    for (table, test) in [("", "lent-cpu"), (GANGS, "lent-cpu-of-drivers")] {
        let (cells, [own, other]) = cells_of_a_cpu(test, table);
        cells.start("");
        assert_eq!(cells.cell_of_vcpu(other), 0);
        cells.call(["update", NAME, "--pin", &format!("0={own}")]).ok();
        let said = cells.move_to(0, other).ok().text();
        let expected = format!(
            "vCPU 0 of {NAME} runs on CPU {other} of cell 1; another cell lends it; {NAME} ends with cell 1 \
             from now on; its pin to CPUs {own} is dropped
"
        );
        assert_eq!(said, expected);
        cells.expect_on(0, other);
        assert_eq!(cells.cell_of_vcpu(other), 1);
        let vm = cells.inspect(NAME).expect("it runs");
        assert_eq!(vm["pins"], Value::Null, "{vm}");
        let shown = cells.call(["cluster", "status"]).ok().text();
        let line = format!("cell 1 runs vCPU 0 of {NAME}, a VM of cell 0, on CPU {other}");
        assert!(shown.contains(&line), "{shown}");
        let refused = cells
            .call(["update", NAME, "--pin", &format!("0={own}")])
            .run()
            .expect(1);
        assert!(refused.errors().contains("runs on CPU"), "{refused}");

        // Again is no other move, and a reboot has new threads.
        let again = cells.move_to(0, other).ok().text();
        assert!(!again.contains("from now on"), "{again}");
        cells.call(["reset", NAME]).ok();
        cells.expect_on(0, other);
        assert_eq!(cells.cell_of_vcpu(other), 1);

        let said = cells.move_to(0, own).ok().text();
        assert!(
            said.contains(&format!("{NAME} does not depend on cell 1 any more")),
            "{said}"
        );
        cells.expect_on(0, own);
        assert_eq!(cells.cell_of_vcpu(other), 0);

        // A cordoned cell lends no CPU.
        cells.call(["cluster", "cordon", "1"]).ok();
        let refused = cells.move_to(0, other).run().expect(1);
        assert!(refused.errors().contains("cell 1 is cordoned"), "{refused}");
        assert_eq!(cells.cell_of_vcpu(other), 0);
        cells.expect_on(0, own);
        cells.call(["cluster", "uncordon", "1"]).ok();
        cells.call(["cluster", "fail", "1"]).ok();
        assert!(cells.inspect(NAME).is_some(), "it does not depend on cell 1");
    }
}

#[test]
fn vm_with_a_vcpu_on_another_cells_cpu_ends_with_that_cell_and_not_with_its_process() {
    let (cells, [_, other]) = cells_of_a_cpu("lender-fails", "");
    let file = cells.vm_file(NAME, &format!("{SMALL}cell = 0\ncells = [0]\n"), None);
    cells.call(["run", "-d", &file]).ok();
    cells.wait_until_home_serves();
    let refused = cells.move_to(0, other).run().expect(1);
    assert!(
        refused.errors().contains("may depend on cells 0 only"),
        "{refused}"
    );
    assert_eq!(cells.cell_of_vcpu(other), 0);
    cells.call(["kill", NAME]).ok();

    let file = cells.vm_file(NAME, &format!("{SMALL}cell = 0\n"), None);
    let run = cells.follow(&file);
    cells.wait_until_home_serves();
    cells.move_to(0, other).ok();
    let [_, lender] = cells.processes(1);
    host::kill9(lender);
    wait::until("the lender's next process", SOON, || {
        let pid = as_pid(&cells.status()[1]["pid"])?;
        (pid != lender && host::is_running(pid)).then_some(())
    });
    assert_eq!(cells.cell_of_vcpu(other), 1);
    cells.expect_on(0, other);
    cells.call(["cluster", "fail", "1"]).ok();
    let end = run.wait().expect(LOST);
    assert!(end.errors().contains("cell 1"), "{end}");
    assert!(cells.inspect(NAME).is_none());
}

/// Moves the vCPU to `target`, a CPU of this cell, and kills the process of the cell `killed` while the VM's
/// cell stands at a point.
#[track_caller]
fn move_while_one_dies(
    cells: &Cells,
    killed: usize,
    point: &str,
    target: (usize, u64),
    points: &FaultPoints,
) {
    let (target, cell) = target;
    let [_, home] = cells.processes(0);
    let [_, victim] = cells.processes(killed);
    let held = points.hold(point);
    let moving = cells.move_to(0, target).limit(2 * SOON).spawn();
    assert_eq!(held.reached(SOON), home);
    host::kill9(victim);
    drop(held);
    let moved = moving.wait();
    let [_, next] = cells.processes(killed);
    assert_ne!(next, victim);
    cells.wait_until_home_serves();
    let [own, other] = two_cpus();
    if moved.status != 0 {
        // The lender was missing when the VM's cell recorded its CPU.
        let may_fail = killed == 1 && moved.errors().contains("cell 1 does not run");
        assert!(moved.status == 1 && may_fail, "{point}: {moved}");
        assert_eq!(cells.cell_of_vcpu(other), 0, "{point}");
        cells.expect_on(0, own);
        wait::until("a move to the lender's next process", SOON, || {
            (cells.move_to(0, target).run().status == 0).then_some(())
        });
    }
    assert_eq!(cells.cell_of_vcpu(other), cell, "{point} of {killed}");
    cells.expect_on(0, target);
}

/// The next process of the VM's cell completes the move, or the command does, which asks again.
#[test]
fn move_between_cells_is_completed_whichever_process_dies_at_whichever_point() {
    let (cells, [own, other]) = cells_of_a_cpu("move-points", "");
    cells.start("");
    let out = OUT.map(|point| (point, (other, 1), own));
    let back = BACK.map(|point| (point, (own, 0), other));
    let all: Vec<_> = out.into_iter().chain(back).collect();
    for (point, target, from) in &all {
        cells.begin_at(*from);
        let (_, points) = cells.traced_home();
        assert_eq!(points.names("cpu_").len(), all.len());
        move_while_one_dies(&cells, 0, point, *target, &points);
        points.wait();
    }
    let (home, points) = cells.traced_home();
    for (point, target, from) in &all {
        cells.begin_at(*from);
        move_while_one_dies(&cells, 1, point, *target, &points);
    }
    host::kill9(home);
    points.wait();
    cells.wait_until_home_serves();
    assert_eq!(cells.cell_of_vcpu(other), 0);
}

#[test]
fn next_process_goes_on_from_the_record_though_the_command_is_killed_too() {
    let (cells, [own, other]) = cells_of_a_cpu("move-records", "");
    cells.start("");
    // Nothing has changed before the record; on the way back it is the last to know that the vCPU has left.
    let to_other = [OUT[1], OUT[2], OUT[3]].map(|point| (point, own, (other, other, 1)));
    let stays = [(OUT[0], own, (other, own, 0)), (BACK[0], other, (own, other, 1))];
    let comes_back = (BACK[1], other, (own, own, 0));
    for (point, from, (target, expected, cell)) in stays.into_iter().chain(to_other).chain([comes_back]) {
        cells.begin_at(from);
        let (home, points) = cells.traced_home();
        let held = points.hold(point);
        let moving = cells.move_to(0, target).spawn();
        assert_eq!(held.reached(SOON), home);
        host::kill9(moving.pid());
        drop(moving.wait());
        host::kill9(home);
        drop(held);
        points.wait();
        cells.wait_until_home_serves();
        cells.expect_on(0, expected);
        assert_eq!(cells.cell_of_vcpu(other), cell, "{point}");
    }
}
