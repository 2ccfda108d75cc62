//! vCPUs that their cell moves to an idle CPU of another one, by its own decision.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use guest_tests::command::{Call, binary, built};
use guest_tests::wait;
use nix::sys::signal::Signal;
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

    /// The metrics of the cells, as the API formats them.
    #[track_caller]
    fn metrics(&self) -> String {
        let socket = self.scratch.join("api.sock");
        let call = self.with_settings(Call::new(built("mirrorball-api")));
        let api = call.args([Path::new("--socket"), &socket, Path::new("--program"), &binary()]);
        let api = api.spawn();
        let mut stream = wait::until("the API serves", SOON, || UnixStream::connect(&socket).ok());
        let request = "GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.set_read_timeout(Some(SOON)).expect("a socket");
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer in time");
        api.signal(Signal::SIGTERM);
        api.wait().expect(0);
        answer
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
    assert!(cells.lending(0, "sought") >= 1);
    // Promise CELL-57.
    let top = cells
        .call(["top", "--batch", "--count", "1", "--interval", "0.1"])
        .ok()
        .text();
    let away = top
        .lines()
        .find(|line| line.starts_with("moves ") && line.contains("by decision"));
    let away: Vec<&str> = away.unwrap_or_default().split_whitespace().collect();
    let at = format!("0 1 {other} {other} by decision");
    assert_eq!(away.get(1..7).map(|words| words.join(" ")), Some(at), "{top}");
    let shown = cells.call(["cluster", "status"]).ok().text();
    assert!(
        shown.contains("cell 0 has moved 1 vCPUs to other cells"),
        "{shown}"
    );
    let metrics = cells.metrics();
    let moved = "mirrorball_cell_vcpus_moved_total{cell=\"0\"} 1\n";
    assert!(metrics.contains(moved), "{metrics}");

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
