//! Risk: each VM leaves a process, a descriptor, a file or memory behind.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use guest_tests::host::{self, Traces};
use guest_tests::{Scratch, VmFile, mirrorball, repetitions};

const CYCLES: usize = 30;
/// As many at a time as a lab host has CPUs: most of a cycle is the guest's boot.
const LANES: usize = 2;
const MIB: u64 = 1 << 20;
/// Change of the host's caches in a few minutes.
const MEMORY_SLACK_BYTES: u64 = 24 * MIB;
/// The kernel's caches grow once, and a leak takes memory in each round: one round below the slack is enough.
const ROUNDS: usize = 3;

/// Drops pages that only cache files, which are not leaked memory.
fn drop_caches() {
    nix::unistd::sync();
    // Needs root; without it the slack has to do.
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
}

/// Runs one VM from start to end, in one of three ways; half of them are killed as soon as they run.
fn cycle(round: usize, scratch: &Scratch) {
    let disk = scratch.sparse(&format!("disk{round}"), 4 << 20);
    let mut file = VmFile::new(&format!("cycle{round}")).disk(&disk, "");
    if round % 4 < 2 {
        file = file.net("kind = \"user\"");
    }
    match round % 4 {
        0 | 2 => {
            let vm = file.start_only(scratch);
            vm.kill();
            vm.wait_ended(Duration::from_secs(15));
        }
        1 => {
            let path = file.write(scratch);
            mirrorball(["run"])
                .args([path.as_os_str(), "--".as_ref(), "true".as_ref()])
                .ok();
        }
        _ => {
            let vm = file.start(scratch);
            vm.stop();
            vm.wait_ended(Duration::from_secs(15));
        }
    }
}

/// Stops the other cycles after a failed one: their time would hide the cause from a test with a limit.
struct LastOnPanic<'a>(&'a AtomicUsize);

impl Drop for LastOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(usize::MAX / 2, Ordering::Relaxed);
        }
    }
}

/// Runs `count` VMs, [`LANES`] at a time.
fn cycles(count: usize, scratch: &Scratch) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                let _last = LastOnPanic(&next);
                loop {
                    let round = next.fetch_add(1, Ordering::Relaxed);
                    if round >= count {
                        return;
                    }
                    cycle(round, scratch);
                }
            });
        }
    });
}

/// Runs `count` cycles. Returns the bytes of available memory that are gone since.
fn memory_lost_by(count: usize, scratch: &Scratch) -> u64 {
    drop_caches();
    let (available, shared) = (host::available_bytes(), host::shared_bytes());
    let files = host::open_descriptors();
    cycles(count, scratch);
    drop_caches();
    let shared_later = host::shared_bytes();
    assert!(
        shared_later < shared + 2 * MIB,
        "shared memory grew from {shared} to {shared_later} bytes"
    );
    let files_later = host::open_descriptors();
    assert!(
        files_later < files + count,
        "open descriptors of all processes grew from {files} to {files_later}"
    );
    let lost = available.saturating_sub(host::available_bytes());
    println!("{count} cycles: {lost} of {available} bytes of available memory are gone");
    lost
}

#[test]
fn thirty_cycles_leave_nothing_behind() {
    let scratch = Scratch::new("cycles");
    // The first cycle of each way may fill caches permanently.
    cycles(4, &scratch);
    let traces = Traces::now();
    let count = repetitions(CYCLES);
    let mut lost = Vec::new();
    while lost.len() < ROUNDS {
        lost.push(memory_lost_by(count, &scratch));
        traces.expect_unchanged("cycles");
        if lost[lost.len() - 1] < MEMORY_SLACK_BYTES {
            return;
        }
    }
    panic!("available memory fell in each round: by {lost:?} bytes");
}
