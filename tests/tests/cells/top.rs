//! `mirrorball top` beside a cell that does not answer.

use guest_tests::{host, wait};
use serde_json::Value;

use super::{Cells, NAME, SMALL, SOON};

/// Promise CMD-30.
#[test]
fn top_shows_vcpus_of_cells_and_a_cell_that_does_not_answer_as_silent_without_waiting_for_it() {
    let cells = Cells::up("top");
    let file = cells.vm_file(NAME, &format!("{SMALL}cell = 1\n"), None);
    let run = cells.follow(&file);
    cells.wait_served(&[NAME]);
    cells.loan("lend", "32M").ok();
    let samples = |count: &str| -> Vec<Value> {
        let options = ["top", "--json", "--interval", "0.2", "--count", count];
        let text = cells.call(options).ok().text();
        let lines = text.lines();
        lines
            .map(|line| serde_json::from_str(line).expect("a line of JSON"))
            .collect()
    };
    let states = |sample: &Value| {
        let cells = sample["cells"].as_array().expect("an array").iter();
        cells.map(|cell| cell["state"].clone()).collect::<Vec<_>>()
    };
    let both_answer = || {
        let sample = samples("1").remove(0);
        let is_whole = states(&sample) == ["runs", "runs"] && sample["vcpus"][0]["run_milli"].is_u64();
        is_whole.then_some(sample)
    };
    let sample = wait::until("cells that answer", SOON, both_answer);
    assert_eq!(sample["cells"][0]["lent"][0]["bytes"], 32 << 20, "{sample}");
    let vcpu = &sample["vcpus"][0];
    assert_eq!(
        (&vcpu["vm"], &vcpu["cell"], &vcpu["shard_pid"]),
        (&NAME.into(), &1.into(), &cells.pid("shard_pid").into())
    );
    assert!(
        vcpu["run_milli"].is_u64() && vcpu["wait_milli"].is_u64(),
        "{vcpu}"
    );
    // The CPU of its cell, the only one on which it may run.
    let bound = &vcpu["cpus"][0];
    let cpus = sample["cpus"].as_array().expect("an array");
    let cpu = cpus.iter().find(|cpu| cpu["cpu"] == *bound).expect("its CPU");
    assert_eq!(
        (&cpu["cells"][0], &cpu["vcpus"][0]["vm"]),
        (&1.into(), &NAME.into())
    );

    // The guard would kill a process that hangs.
    let [guard, cell] = cells.processes(1);
    host::stop(guard);
    host::stop(cell);
    let silent = samples("2");
    for sample in &silent {
        assert_eq!(states(sample), ["runs", "silent"], "{sample}");
        assert_eq!(sample["unknown"][0]["source"], "cell 1", "{sample}");
        assert_eq!(
            (&sample["vms"][0]["vm"], &sample["vms"][0]["run_milli"]),
            (&NAME.into(), &Value::Null)
        );
    }
    // Only the first reading, which is not printed, has waited for it.
    assert!(
        silent[1]["interval_ms"].as_u64().is_some_and(|ms| ms < 2_000),
        "{}",
        silent[1]
    );
    let text = cells
        .call(["top", "--batch", "--count", "1", "--interval", "0.1"])
        .ok()
        .text();
    assert!(
        text.contains("silent") && text.contains("cell 1: no answer within 2 s"),
        "{text}"
    );
    host::go_on(cell);
    host::go_on(guard);
    wait::until("a cell that answers again", SOON, both_answer);
    cells.call(["kill", NAME]).ok();
    run.wait().expect(74);
}
