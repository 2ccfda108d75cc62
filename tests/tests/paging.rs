//! Risk: a paged guest reads other bytes than it wrote, or goes on with a damaged paging file.
//!
//! The guest is a few instructions. Paged Linux guests are in `memory`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use guest_tests::halting::{NUMBERED_BYTES, numbering_guest_of};
use guest_tests::repetitions::in_campaign;
use guest_tests::{Scratch, mirrorball, wait};

const MIB: u64 = 1 << 20;
/// Time limit of a round of the guest, on an emulated host.
const LIMIT: Duration = Duration::from_secs(240);

fn number(counters: &serde_json::Value, name: &str) -> u64 {
    let value = counters.pointer(name).and_then(serde_json::Value::as_u64);
    value.unwrap_or_else(|| panic!("no {name} in {counters:#}"))
}

/// The paper's stressMem (Cellular Disco, section 5.3) with a changed limit, and up to a damaged paging file.
#[test]
fn guest_reads_only_what_it_wrote_and_ends_when_its_paging_file_is_damaged() {
    let scratch = Scratch::new("paging");
    let (bytes, raised) = match in_campaign() {
        true => (NUMBERED_BYTES, 32 * MIB),
        false => (NUMBERED_BYTES / 2, 20 * MIB),
    };
    let (guest, file) = (
        scratch.write("guest", numbering_guest_of(bytes)),
        scratch.join("paging-file"),
    );
    let call = |words: &[&str]| {
        let call = mirrorball(words.iter().copied());
        call.limit(LIMIT)
            .env("MIRRORBALL_RUNTIME", scratch.join("runtime"))
            .env("MIRRORBALL_DATA", scratch.join("data"))
    };
    let options = "run --net none --memory 96M --resident 16M --paging-disk 64M --name n";
    let run = call(&options.split(' ').collect::<Vec<_>>());
    let run = run
        .args([Path::new("--paging-file"), &file, Path::new("--kernel"), &guest])
        .spawn();
    let rounds = |least: usize| {
        wait::until(&format!("{least} rounds"), LIMIT, || {
            let logs = call(&["logs", "n"]).run().text();
            assert!(!logs.contains('B'), "a wrong number: {logs}");
            (logs.matches('r').count() >= least).then_some(logs.matches('r').count())
        })
    };
    let paging = || {
        let vm = call(&["inspect", "n"]).ok().json();
        vm["status"]["paging"].clone()
    };
    let done = rounds(2);
    let counted = paging();
    for counter in ["/written_bytes", "/read_bytes"] {
        assert!(number(&counted, counter) >= bytes / 2, "{counted:#}");
    }
    assert!(number(&counted, "/paged_out_bytes") >= bytes / 4, "{counted:#}");
    // The guest has no driver for the disk, which is there.
    assert_eq!(number(&counted, "/disk/bytes"), 64 * MIB);
    assert_eq!(number(&counted, "/disk/used_bytes"), 0);
    let vm = call(&["inspect", "n"]).ok().json();
    let devices = vm["status"]["devices"].as_array().expect("devices");
    assert!(devices.iter().any(|device| device["name"] == "paging"), "{vm:#}");
    call(&["update", "n", "--resident", &format!("{}M", raised / MIB)]).ok();
    assert_eq!(number(&paging(), "/limit_bytes"), raised);
    rounds(done + 1);
    // A byte of each page.
    let paging_file = fs::File::options().write(true).open(&file).expect("it");
    let length = paging_file.metadata().expect("it").len();
    for page in (4096..length).step_by(4096) {
        paging_file.write_all_at(&[0x5a], page + 77).expect("a write");
    }
    let ended = run.wait();
    assert_eq!(ended.status, 73, "{ended}");
    let errors = ended.errors();
    let reason = format!("the paging file {} cannot be read at byte ", file.display());
    assert!(errors.contains(&reason), "{errors}");
    assert!(errors.contains("not those that were written"), "{errors}");
    assert!(!ended.text().contains('B'), "a wrong number: {ended}");
}
