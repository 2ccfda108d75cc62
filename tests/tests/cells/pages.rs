//! The map of a VM's pages beside the host's count of its memory.

use guest_tests::cluster::allowed_cpus;
use guest_tests::halting::{NUMBERED_BYTES, numbering_guest};
use guest_tests::{Scratch, wait};
use serde_json::Value;

use super::{BY_COMMAND, Cells, NAME, SOON};

const MIB: u64 = 1 << 20;

fn bytes(value: &Value, pointer: &str) -> u64 {
    let number = value.pointer(pointer).and_then(Value::as_u64);
    number.unwrap_or_else(|| panic!("no {pointer} in {value:#}"))
}

/// One cell with VMs that number 64 MiB of their pages.
#[track_caller]
fn up(test: &str) -> Cells {
    let cpu = allowed_cpus().next().expect("a CPU");
    let text = format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"192M\"\n{BY_COMMAND}");
    Cells::up_of(Scratch::new(test), &text, &numbering_guest())
}

/// Waits until the guest has written all its pages.
#[track_caller]
fn wait_numbered(cells: &Cells) {
    wait::until("a round of the guest", SOON, || {
        cells
            .call(["logs", NAME])
            .run()
            .text()
            .contains('r')
            .then_some(())
    });
}

#[test]
fn map_of_a_guest_without_an_agent_has_the_memory_that_the_host_counts() {
    let cells = up("pages");
    let file = cells.vm_file(NAME, "memory = \"96M\"\n", None);
    cells.call(["run", "-d", &file]).ok();
    wait_numbered(&cells);
    let map = cells
        .call(["mem", NAME, "--explain", "--json"])
        .limit(2 * SOON)
        .ok()
        .json();
    let table = cells.call(["mem", "--json"]).ok().json();
    let report = format!("{map:#}\n{table:#}");
    let row = "/vms/0";
    assert_eq!(table.pointer(row).expect("a VM")["name"], NAME, "{report}");
    assert_eq!(bytes(&map, "/total/bytes"), 96 * MIB, "{report}");
    let counted = bytes(&table, "/vms/0/private_bytes") + bytes(&table, "/vms/0/copied_bytes");
    let mapped = bytes(&map, "/total/private_bytes");
    assert!(
        counted.abs_diff(mapped) <= MIB,
        "{mapped} and {counted} bytes: {report}"
    );
    // The guest numbers its pages, and no image brought them.
    let unknown = bytes(&map, "/total/origins/unknown");
    assert!(
        (NUMBERED_BYTES..NUMBERED_BYTES + MIB).contains(&unknown),
        "{report}"
    );
    assert_eq!(
        bytes(&map, "/total/origins/absent") + mapped,
        96 * MIB,
        "no page is shared: {report}"
    );
    // The guest is none that has an agent: the table says so, and has the rest.
    let reason = map["unread"].as_str().expect("a reason");
    assert!(reason.contains("no agent answers"), "{report}");
    assert_eq!(map["uses"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!(map["uses"][0]["use"], "unknown", "{report}");
}

#[test]
fn map_of_a_vm_without_shared_pages_is_refused_with_the_reason() {
    let cells = up("pages-paged");
    let file = cells.vm_file(NAME, "memory = \"96M\"\nresident = \"32M\"\n", None);
    cells.call(["run", "-d", &file]).ok();
    let errors = cells.call(["mem", NAME, "--explain"]).run().expect(1).errors();
    assert!(
        errors.contains(&format!("{NAME}: the origins of its pages are not recorded")),
        "{errors}"
    );
    assert!(errors.contains("is paged"), "{errors}");
    // The name alone is no request.
    cells.call(["mem", NAME]).run().expect(2);
    cells.call(["mem", "--explain"]).run().expect(2);
}
