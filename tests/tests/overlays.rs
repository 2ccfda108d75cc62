//! Risk: a VM's writes in its overlay are lost, or reach its base, when a command works on the disk between
//! its runs.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use guest_tests::pattern::{DiskWrites, Numbers, digest};
use guest_tests::{Output, Scratch, Vm, VmFile, mirrorball};
use serde_json::Value;

const DISK_BYTES: usize = 16 << 20;
const WRITES: u32 = 150;
const SECTOR: usize = 512;

fn disk(arguments: &[&str]) -> Output {
    mirrorball(["disk"]).args(arguments).run()
}

fn listed(vm: &str) -> Option<Value> {
    let all: Value = serde_json::from_str(&disk(&["ls", "--json"]).expect(0).text()).expect("JSON");
    let list = all.as_array().expect("a list");
    list.iter().find(|overlay| overlay["vm"] == *vm).cloned()
}

#[track_caller]
fn expect_digest(vm: &Vm, wanted: &[u8], what: &str) {
    vm.add_tool();
    let found = vm.tool(&["disk-digest", "/dev/vda"]).ok().text();
    assert_eq!(found.trim(), digest(wanted), "{what}");
}

fn end(vm: Vm) {
    vm.stop();
    vm.wait_ended(Duration::from_secs(10));
}

/// Removes the VM's overlays with the test, in any case.
struct Kept(String);

impl Drop for Kept {
    fn drop(&mut self) {
        // There are none when the test came to its end.
        let _ = disk(&["rm", &self.0]);
    }
}

#[test]
fn an_overlay_is_compared_compacted_committed_and_removed_between_runs() {
    let scratch = Scratch::new("overlays");
    let mut base = vec![0; DISK_BYTES];
    Numbers::new(21).fill(&mut base);
    let path = scratch.write("base", &base);
    let mut written = base.clone();
    DiskWrites::new(22, WRITES, DISK_BYTES as u64).apply(&mut written);
    let file = VmFile::new("overlays").disk(&path, "persistent = true");
    let name = file.name();
    let kept = Kept(name.to_owned());
    let text = |path: &PathBuf| path.to_str().expect("ASCII").to_owned();

    let vm = file.start(&scratch);
    expect_digest(&vm, &base, "first sight");
    vm.tool(&["disk-write", "/dev/vda", "22", &WRITES.to_string()])
        .ok();
    for command in ["diff", "compact", "check", "commit", "rm"] {
        let refused = disk(&[command, name]).expect(1);
        let message = refused.errors();
        assert!(
            message.contains(&format!("VM {name} (process {})", vm.monitor())),
            "{command} does not name the VM:\n{refused}"
        );
    }
    let overlay = listed(name).expect("the overlay is listed");
    assert_eq!(overlay["used_by"][0], vm.monitor(), "{overlay}");
    end(vm);

    disk(&["check", name]).expect(0);
    let diff: Value = serde_json::from_str(&disk(&["diff", name, "--json"]).expect(0).text()).expect("JSON");
    let changed = base
        .chunks(SECTOR)
        .zip(written.chunks(SECTOR))
        .filter(|(old, new)| old != new)
        .count();
    assert_eq!(
        diff["changed_bytes"],
        changed * SECTOR,
        "not what was written: {}",
        diff["held_bytes"]
    );
    let copy = scratch.join("copy");
    disk(&["commit", name, "--to", &text(&copy)]).expect(0);
    assert_eq!(
        digest(&fs::read(&copy).expect("the copy")),
        digest(&written),
        "the copy"
    );
    disk(&["compact", name]).expect(0);
    assert_eq!(
        digest(&fs::read(&path).expect("the base")),
        digest(&base),
        "the base was written"
    );

    let vm = file.start(&scratch);
    expect_digest(&vm, &written, "after compacting");
    end(vm);
    disk(&["commit", name]).expect(0);
    assert_eq!(
        digest(&fs::read(&path).expect("the base")),
        digest(&written),
        "the base after the commit"
    );
    disk(&["rm", name]).expect(0);
    assert!(listed(name).is_none(), "the overlay is gone from the list");

    let vm = file.start(&scratch);
    expect_digest(&vm, &written, "over the base with the changes");
    end(vm);
    drop(kept);
}
