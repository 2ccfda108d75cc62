//! Memory that the host's kernel scans for equal pages, beside the host's count of it.

use std::path::Path;

use guest_tests::Scratch;
use guest_tests::cluster::allowed_cpus;
use guest_tests::command::Call;
use guest_tests::halting::{FILLED_BYTES, filling_guest};
use guest_tests::host::PageScanner;
use guest_tests::vm::{SHARE_BETWEEN_ALL, SHARE_BETWEEN_GROUP};
use guest_tests::wait;
use serde_json::Value;

use super::{BY_COMMAND, Cells, SOON};

const MIB: u64 = 1 << 20;
/// The least part of the filled memory that counts as all of it: KSM skips a page that is in use.
const NEARLY_FILLED: u64 = FILLED_BYTES - 2 * MIB;
const SCAN: &str = "memory = \"96M\"\nshare = \"scan\"\n";

/// Starts a VM under a host's file with this text.
fn run(cells: &Cells, host_file: &str, vm_file: &str) -> Call {
    let call = cells.call(["run", "-d", vm_file]);
    call.env(
        "MIRRORBALL_HOST_FILE",
        cells.scratch.write("host.toml", host_file),
    )
}

/// The row of a VM in the table of memory.
#[track_caller]
fn row<'a>(table: &'a Value, vm: &str) -> &'a Value {
    let rows = table["vms"].as_array().expect("a list of VMs");
    rows.iter()
        .find(|row| row["name"] == vm)
        .unwrap_or_else(|| panic!("no {vm} in {table:#}"))
}

fn number(of: &Value, key: &str) -> u64 {
    of[key]
        .as_u64()
        .unwrap_or_else(|| panic!("no number {key} in {of:#}"))
}

#[test]
fn equal_pages_of_vms_that_ask_for_it_are_in_memory_once() {
    if !Path::new(PageScanner::RUN).exists() {
        println!("left out: this host's kernel has no scanner of memory (KSM)");
        return;
    }
    let cpu = allowed_cpus().next().expect("a CPU");
    let text = format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"384M\"\n{BY_COMMAND}");
    let cells = Cells::up_of(Scratch::new("scan"), &text, &filling_guest());
    let scanner = PageScanner::stopped();
    let file = |name, keys| cells.vm_file(name, keys, None);
    let [one, other] = ["one", "other"].map(|name| file(name, SCAN));
    // Not without the consent of the host's file, nor without root's scanner.
    let refused = run(&cells, SHARE_BETWEEN_GROUP, &one).run().expect(1).errors();
    assert!(refused.contains("share_between = \"all\""), "{refused}");
    let refused = run(&cells, SHARE_BETWEEN_ALL, &one).run().expect(1).errors();
    assert!(refused.contains("KSM, which does not run"), "{refused}");
    assert!(refused.contains("/sys/kernel/mm/ksm/run"), "{refused}");

    scanner.start();
    let apart = file("apart", "memory = \"96M\"\n");
    for vm in [&one, &other, &apart] {
        run(&cells, SHARE_BETWEEN_ALL, vm).ok();
    }
    for vm in ["one", "other", "apart"] {
        wait::until("a guest that has filled its memory", SOON, || {
            cells.call(["logs", vm]).run().text().contains('f').then_some(())
        });
    }
    let mut last = Value::Null;
    let merged = wait::within(2 * SOON, || {
        last = cells.call(["mem", "--json"]).ok().json();
        let all = |vm| number(row(&last, vm), "merged_resident_bytes") >= NEARLY_FILLED;
        (all("one") && all("other")).then_some(())
    });
    assert!(merged.is_some(), "{last:#}");
    let report = format!("{last:#}");
    let (one, other, apart) = (row(&last, "one"), row(&last, "other"), row(&last, "apart"));
    let cost: u64 = [one, other]
        .iter()
        .map(|row| number(row, "private_bytes") + number(row, "merged_bytes"))
        .sum();
    assert!(cost <= FILLED_BYTES + 8 * MIB, "{cost} bytes for both: {report}");
    assert_eq!(number(apart, "merged_resident_bytes"), 0, "{report}");
    assert!(number(apart, "private_bytes") >= FILLED_BYTES, "{report}");
    assert_eq!(last["scanner"]["is_running"], true, "{report}");
    assert!(
        number(&last["scanner"], "saved_bytes") >= NEARLY_FILLED,
        "{report}"
    );
    assert!(number(&last["scanner"], "cpu_ms") > 0, "{report}");

    // The map of the pages has them as shared.
    let map = cells.call(["mem", "one", "--explain", "--json"]).ok().json();
    let origins = &map["total"]["origins"];
    assert!(number(origins, "merged") >= NEARLY_FILLED, "{map:#}");
    let private = number(&map["total"], "private_bytes");
    assert!(
        private.abs_diff(number(one, "private_bytes")) <= MIB,
        "{map:#}\n{report}"
    );
    // That of both together is the sum.
    let both = cells
        .call(["mem", "one", "other", "--explain", "--json"])
        .ok()
        .json();
    assert_eq!(both["vm"], "one, other");
    assert_eq!(number(&both["total"], "bytes"), 2 * 96 * MIB, "{both:#}");
    assert!(
        number(&both["total"]["origins"], "merged") >= 2 * NEARLY_FILLED,
        "{both:#}"
    );
    let people = cells.call(["mem"]).ok().text();
    assert!(
        people.contains("+MERGED") && people.contains("(KSM) runs"),
        "{people}"
    );

    // A copy of a scanned VM has the same memory, and is scanned, too.
    let copy = cells
        .call(["clone", "one"])
        .env("MIRRORBALL_HOST_FILE", cells.scratch.join("host.toml"))
        .ok()
        .text();
    let copy = cells.inspect(copy.trim()).expect("the copy runs");
    assert_eq!(copy["spec"]["share"], "scan", "{copy:#}");
}
