//! Risk: shards that each have a copy of the memory see different ones, or one that is gone leaves the others waiting.
//!
//! The counting kernel again (`moves`), whose CPUs leave things in memory for each other. Linux takes too long yet: its page tables
//! are merged, and it reached user space in one of two tries, after 119 s (docs/coherence.md).

use std::time::Duration;

use guest_tests::host::{self, Traces};
use guest_tests::span::cells_are_empty;
use guest_tests::storm::{Extent, Storm};
use guest_tests::{Cluster, Scratch, VmFile, mirrorball};

const SOON: Duration = Duration::from_secs(20);
const LIMIT: Duration = Duration::from_secs(200);
const COHERENT: [&str; 4] = ["--span", "0,1", "--span-memory", "coherent"];
/// Emulated, a page takes milliseconds to come.
const SMALL: Extent = Extent {
    cpus: 2,
    epochs: 1,
    sweeps: 4,
};

#[test]
fn copies_of_the_memory_are_one_memory() {
    let scratch = Scratch::new("coherent");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let storm = Storm::start(&scratch, "coherent", SMALL, &COHERENT);
    let counted = storm.vm.inspect();
    let told = &counted["status"]["span"]["coherence"];
    let shards = told["shards"].as_array().expect("a list of shards");
    assert_eq!(shards.len(), 2, "{told:#}");
    for shard in shards {
        let waits = ["read", "write", "upgrade"].map(|kind| shard["faults"][kind]["count"].as_u64());
        assert!(waits.iter().flatten().sum::<u64>() > 0, "nobody waited: {told:#}");
        assert!(shard["pages"].as_u64() > Some(0), "no page was sent: {told:#}");
    }
    assert!(!told["heat"].as_array().expect("pages").is_empty(), "{told:#}");
    let counts = storm.counts(LIMIT);
    println!("{}", counts.line());
    counts.expect_nothing_wrong();
    assert_eq!(counts.of("restarts"), 1);
    cells_are_empty(&cluster);
    drop(cluster);
    before.expect_unchanged("a VM with copies of its memory");
}

#[test]
fn the_vm_ends_with_any_of_its_shards_and_says_which() {
    let scratch = Scratch::new("coherent-killed");
    let cluster = Cluster::up(&scratch);
    let endless = Extent { epochs: 0, ..SMALL };
    for killed in [1, 0] {
        let storm = Storm::start(&scratch, "coherent-killed", endless, &COHERENT);
        let shards = storm.vm.shards();
        assert_eq!(shards.len(), 2, "{shards:?}");
        host::kill9(shards[killed]);
        let (status, told) = storm.ended(SOON);
        assert_eq!(status, 73, "exit status; the terminal:\n{told}");
        // Who saw the home's end knows less of it than its process.
        let reasons = match killed {
            0 => vec!["SIGKILL".to_owned()],
            _ => vec![
                format!("cell {killed} is gone"),
                format!("cell {killed}: its process"),
            ],
        };
        assert!(
            reasons.iter().any(|reason| told.contains(reason)),
            "which shard it was is not told:\n{told}"
        );
        host::wait_gone(&shards, SOON);
        cells_are_empty(&cluster);
    }
}

#[test]
fn one_cell_is_enough_and_nonsense_is_refused() {
    let scratch = Scratch::new("coherent-one");
    let cluster = Cluster::up(&scratch);
    let one = ["--span", "0", "--span-memory", "coherent"];
    let counts = Storm::start(&scratch, "coherent-one", SMALL, &one).counts(LIMIT);
    counts.expect_nothing_wrong();
    cells_are_empty(&cluster);
    for (span, words) in [
        ("{ cells = [0, 1], memory = \"magic\" }", ["magic", "coherent"]),
        ("{ cells = [0, 1], memory = 1 }", ["memory", "coherent"]),
    ] {
        let file = VmFile::new("nonsense").cpus(2).memory("256M").key("span", span);
        let output = mirrorball(["run", "-d"])
            .args([file.write(&scratch)])
            .limit(SOON)
            .run();
        let said = output.expect(1).errors();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
}
