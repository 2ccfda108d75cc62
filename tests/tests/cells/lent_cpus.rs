//! vCPUs that their cell moves to an idle CPU of another one, by its own decision.

use std::fs;
use std::time::Duration;

use guest_tests::wait;
use serde_json::{Value, json};

use super::cpu_moves::cells_of_a_cpu;
use super::{Cells, SMALL, SOON};

const LENDING: &str = "[scheduling]\nlend_cpus = true\n";
/// Time in which a vCPU that can't stay would move again: five periods of the balancer.
const STAYS: Duration = Duration::from_secs(5);

impl Cells {
    #[track_caller]
    fn begin(&self, name: &str, keys: &str) {
        let file = self.vm_file(name, &format!("{SMALL}{keys}"), None);
        self.call(["run", "-d", &file]).ok();
    }

    /// Waits until a VM's only vCPU runs on this CPU and no other, which is another cell's if `lender`
    /// has one.
    #[track_caller]
    fn wait_on(&self, name: &str, cpu: usize, lender: Option<u16>) {
        let expected = lender.map_or(
            Value::Null,
            |cell| json!([{"vcpu": 0, "cell": cell, "cpu": cpu, "is_automatic": true}]),
        );
        wait::until(&format!("{name} on CPU {cpu}"), SOON, || {
            let vm = self.inspect(name)?;
            let vcpu = vm["status"]["vcpus"].get(0)?;
            let path = format!("/proc/{}/task/{}/status", vcpu["shard_pid"], vcpu["thread_id"]);
            let status = fs::read_to_string(path).ok()?;
            let allowed = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            (vm["borrowed_cpus"] == expected && allowed.trim() == cpu.to_string()).then_some(())
        });
    }

    /// A count of a cell's decisions, as `top` shows it.
    #[track_caller]
    fn lending(&self, cell: usize, key: &str) -> u64 {
        let options = ["top", "--json", "--count", "1", "--interval", "0.1"];
        // A cell that is slow just now is silent there.
        wait::until(key, SOON, || {
            let sample = self.call(options).ok().json();
            sample["cells"][cell]["cpu_lending"][key].as_u64()
        })
    }
}

/// Promise SCHED-16.
#[test]
fn vcpu_of_a_loaded_cell_moves_to_an_idle_one_by_itself_and_returns_when_that_gets_busy() {
    let (cells, [own, other]) = cells_of_a_cpu("decided-moves", LENDING);
    cells.begin("stays", "cell = 0\ncells = [0]\n");
    cells.begin("moves", "cell = 0\n");
    cells.wait_on("moves", other, Some(1));
    cells.wait_on("stays", own, None);
    let lent = json!([{"cpu": other, "cell": 0, "vm": "moves", "vcpu": 0, "is_automatic": true}]);
    assert_eq!(cells.status()[1]["lent_cpus"], lent);
    let shown = cells.call(["cluster", "status"]).ok().text();
    assert!(shown.contains("by decision of that cell"), "{shown}");
    std::thread::sleep(STAYS);
    assert_eq!(cells.status()[1]["lent_cpus"], lent);
    assert_eq!(cells.lending(0, "moved"), 1);

    // The lender's own VM goes first.
    cells.begin("rival", "cell = 1\n");
    cells.wait_on("moves", own, None);
    // A slow borrower may have answered too late.
    assert!(cells.lending(1, "recalled") + cells.lending(1, "refused") >= 1);
    assert_eq!(cells.status()[1]["lent_cpus"], Value::Null);
    std::thread::sleep(STAYS);
    assert_eq!(cells.lending(0, "moved"), 1, "no cell has an idle CPU");

    // Again when the rival has gone, and home when the other VM of its cell has.
    cells.call(["kill", "rival"]).ok();
    cells.wait_on("moves", other, Some(1));
    cells.call(["kill", "stays"]).ok();
    cells.wait_on("moves", own, None);
    assert_eq!(cells.lending(0, "returned"), 1);

    // A command's move stands, and its VM goes home by command.
    let order = |cpu: usize| cells.call(["move", "moves", "--vcpu", "0", "--cpu", &cpu.to_string()]);
    order(other).ok();
    cells.begin("rival", "cell = 1\n");
    std::thread::sleep(STAYS);
    assert_eq!(cells.status()[1]["lent_cpus"][0]["vm"], "moves");
    order(own).ok();
    assert_eq!(cells.status()[1]["lent_cpus"], Value::Null);
}
