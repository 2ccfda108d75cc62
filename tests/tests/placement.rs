//! Risk: `run` places VMs by other facts or rules than `mirrorball knowledge place` shows.
//!
//! The guests halt at once; cells, keepers and shards are real. Each test has directories of its own.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use guest_tests::cluster::allowed_cpus;
use guest_tests::command::Call;
use guest_tests::halting::{end_cells, halting_guest};
use guest_tests::{Scratch, host, mirrorball, wait};
use serde_json::Value;

/// Time limit of a short step on an emulated host.
const SOON: Duration = Duration::from_secs(60);

/// Two cells of a CPU and 768 MiB each. They and their VMs end when this is dropped.
struct Cells {
    scratch: Scratch,
    guest: PathBuf,
}

impl Cells {
    #[track_caller]
    fn up(test: &str) -> Self {
        let cells = Self::down(test);
        cells.bring_up().ok();
        cells
    }

    /// Cells that are not up.
    #[track_caller]
    fn down(test: &str) -> Self {
        let scratch = Scratch::new(test);
        let cells = allowed_cpus().map(|cpu| format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"768M\"\n"));
        let cells: Vec<String> = cells.take(2).collect();
        assert_eq!(cells.len(), 2, "two cells need two CPUs");
        scratch.write("cluster.toml", cells.concat());
        fs::create_dir(scratch.join("data")).expect("our own directory");
        // Ended even if they come up half.
        Self {
            guest: scratch.write("guest", halting_guest()),
            scratch,
        }
    }

    fn bring_up(&self) -> Call {
        let file = self.scratch.join("cluster.toml");
        self.call(["cluster", "up", file.to_str().expect("UTF-8"), "--lab", "never"])
    }

    fn call<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Call {
        mirrorball(arguments)
            .limit(SOON)
            .env("MIRRORBALL_IN_LAB", "1")
            .env("MIRRORBALL_RUNTIME", self.scratch.join("runtime"))
            .env("MIRRORBALL_DATA", self.scratch.join("data"))
            .env("MIRRORBALL_USERS", self.scratch.join("users"))
    }

    /// Replaces the facts that the user asserts.
    fn assert(&self, facts: &str) {
        self.scratch.write("data/asserted.facts", facts);
    }

    /// All cells as `knowledge place` ranks them for a VM of one vCPU and 64 MiB.
    #[track_caller]
    fn ranked(&self) -> Vec<Value> {
        let call = self.call(["knowledge", "place", "--memory", "64M", "--json"]);
        call.ok().json().as_array().expect("an array").clone()
    }

    /// Starts such a VM, and returns the cell that it got.
    #[track_caller]
    fn run(&self, name: &str) -> Value {
        let file = self.vm_file(name, "");
        self.call(["run", "-d", &file]).ok();
        self.call(["inspect", name]).ok().json()["cell"].clone()
    }

    fn vm_file(&self, name: &str, keys: &str) -> String {
        let kernel = format!("kernel = {{ path = {:?} }}", self.guest);
        let text = format!("name = \"{name}\"\n{kernel}\nnets = []\nmemory = \"64M\"\ncpus = 1\n{keys}");
        let path = self.scratch.write(&format!("{name}.toml"), text);
        path.into_os_string().into_string().expect("UTF-8")
    }

    /// Starts a VM, and expects it in the cell that `knowledge place` shows.
    #[track_caller]
    fn expect_placed(&self, name: &str, cell: u64) {
        let ranked = self.ranked();
        assert_eq!(ranked[0]["cell"], cell, "{ranked:?}");
        assert_eq!(self.run(name), cell, "{ranked:?}");
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        end_cells(&self.scratch.join("runtime"), |words| {
            drop(self.call(words.iter().copied()).run())
        });
    }
}

#[test]
fn one_asserted_fact_has_run_place_the_next_vm_elsewhere_while_the_cells_run() {
    let cells = Cells::up("asserted-fact");
    cells.expect_placed("a", 0);
    // Cell 0 has a VM more.
    cells.expect_placed("b", 1);
    cells.expect_placed("c", 0);
    cells.assert("cell_vcpus(0, 0)  # the user asserts that nothing runs there\n");
    cells.expect_placed("d", 0);
    cells.assert("cell_cpus(1, 9)\n");
    cells.expect_placed("e", 1);
    cells.assert("cell_free_bytes(1, 1048576)\n");
    cells.expect_placed("f", 0);
    let ranked = cells.ranked();
    assert_eq!(ranked[1]["why"], "has 1 MiB", "{ranked:?}");
    // Without the file the cells use their own facts: four VMs in cell 0, two in cell 1.
    fs::remove_file(cells.scratch.join("data/asserted.facts")).expect("our own file");
    cells.expect_placed("g", 1);
}

#[test]
fn asserted_cordon_is_shown_kept_and_refused_by_its_fact() {
    let cells = Cells::up("asserted-cordon");
    cells.assert("cell_cordoned(0)\n");
    cells.expect_placed("a", 1);
    cells.expect_placed("b", 1);
    let text = cells.call(["knowledge", "place", "--memory", "64M"]).ok().text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        [
            "CELL    FREE MIB WITH THE VM, THE CELL",
            "1            640 would have 3.000 vCPUs on each CPU",
            "0            768 is cordoned",
        ]
    );
    let asked = |question: &str| {
        let wants = cells.scratch.write("wants.facts", "wants(1, 67108864)\n");
        let call = cells.call(["knowledge", "query", question, "--json", "--assert"]);
        call.args([&wants]).ok().json()
    };
    assert_eq!(asked("place(C)"), serde_json::json!([[1]]));
    assert_eq!(
        asked("q(C, Why) <- no_room(C, Why)"),
        serde_json::json!([[0, "is cordoned"]])
    );
    let named = cells.vm_file("named", "cell = 0\n");
    let refused = cells.call(["run", "-d", &named]).run().expect(1);
    let why = "cell 0 is cordoned and takes no new VM; \
               name another cell, or remove `cell_cordoned(0)` from asserted.facts";
    assert!(refused.errors().contains(why), "{refused}");
    // No cell fits: the same reasons by both ways.
    cells.assert("cell_cordoned(0)\ncell_free_bytes(1, 1048576)\n");
    let why = "for it: cell 0 is cordoned, cell 1 has 1 MiB";
    let nowhere = cells
        .call(["knowledge", "place", "--memory", "64M"])
        .run()
        .expect(1);
    assert!(nowhere.errors().contains(why), "{nowhere}");
    let file = cells.vm_file("nowhere", "");
    let nowhere = cells.call(["run", "-d", &file]).run().expect(1);
    assert!(nowhere.errors().contains(why), "{nowhere}");
}

#[test]
fn wrong_line_of_asserted_facts_leaves_the_former_ones_in_force() {
    let cells = Cells::up("asserted-wrong");
    cells.assert("cell_cordoned(0)\n");
    cells.expect_placed("a", 1);
    cells.assert("cell_cordoned(0)\ncell_cpus(1)\n");
    assert_eq!(cells.run("b"), 1);
    let said = "asserted.facts: line 2: cell_cpus has 1 terms instead of 2; write `cell_cpus(Cell, Count)`";
    let wrong = cells.call(["knowledge", "place"]).run().expect(1);
    assert!(wrong.errors().contains(said), "{wrong}");
    let logs = [0, 1].map(|number| {
        fs::read_to_string(cells.scratch.join(&format!("runtime/cells/{number}/log"))).expect("a log")
    });
    assert!(logs.iter().any(|log| log.contains(said)), "{logs:?}");

    // The cells' next processes go by the former ones, too.
    let pids = |cells: &Cells| -> Vec<Value> {
        let status = cells.call(["cluster", "status", "--json"]).ok().json();
        let status = status.as_array().expect("an array").iter();
        status.map(|cell| cell["pid"].clone()).collect()
    };
    let before = pids(&cells);
    for pid in &before {
        host::kill9(
            pid.as_u64()
                .and_then(|pid| u32::try_from(pid).ok())
                .expect("a process"),
        );
    }
    wait::until("the next processes of both cells", SOON, || {
        let status = cells.call(["cluster", "status", "--json"]).run();
        let runs = |cell: &Value| cell["life"].is_u64() && !before.contains(&cell["pid"]);
        (status.status == 0 && status.json().as_array()?.iter().all(runs)).then_some(())
    });
    assert_eq!(cells.run("c"), 1);
}

#[test]
fn cluster_is_refused_whose_asserted_facts_are_wrong_from_the_start() {
    let cells = Cells::down("asserted-refused");
    cells.assert("cell_cordoned(0)\ncell_cpus(1)\n");
    let refused = cells.bring_up().run().expect(1);
    let said = "data/asserted.facts: line 2: cell_cpus has 1 terms instead of 2";
    let errors = refused.errors();
    let lines: Vec<&str> = errors.lines().filter(|line| line.contains(said)).collect();
    assert_eq!(lines.len(), 1, "{refused}");
    assert!(!cells.scratch.join("runtime/cells/plan.json").exists());
    cells.assert("cell_cordoned(0)\n");
    cells.bring_up().ok();
    assert_eq!(cells.run("a"), 1);
}
