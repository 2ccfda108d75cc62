//! Risk: bytes of a guest, an agent, a peer or a user's file end Mirrorball by a panic, hang it, or take
//! memory without bound.
//!
//! Each test runs one target of `fuzz/`: first all kept inputs of `fuzz/seeds`, then new ones for some
//! seconds. No test starts a guest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_tests::Scratch;

/// Time for new inputs of each target. With 25 targets, two at a time, it makes 40 s.
const SECONDS: u32 = 3;
/// Limits of one input: seconds on a busy machine, then MiB in all and in one allocation.
const LIMITS: [&str; 4] = [
    "-len_control=0",
    "-timeout=20",
    "-rss_limit_mb=512",
    "-malloc_limit_mb=64",
];
/// Lines of output that a failure shows.
const LINES_SHOWN: usize = 40;

/// The folder `fuzz` of the source tree.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

/// The program with all targets, which `scripts/fuzz.sh --build` makes.
fn program() -> PathBuf {
    let test = std::env::current_exe().expect("/proc/self/exe can be read");
    let mut places = test.ancestors();
    let target_dir = places.nth(4).expect("a test is in target/TRIPLE/release/deps");
    let path = target_dir.join("fuzz/x86_64-unknown-linux-gnu/release/mirrorball-fuzz");
    assert!(
        path.is_file(),
        "{} is missing; help: scripts/fuzz.sh --build",
        path.display()
    );
    path
}

/// The number behind `label` in the first line that has it.
fn number(log: &str, label: &str) -> Option<u64> {
    let (_, rest) = log.split_once(label)?;
    rest.split_whitespace().next()?.parse().ok()
}

fn run(target: &str) {
    let seeds = folder().join("seeds").join(target);
    let kept = fs::read_dir(&seeds).map_or(0, Iterator::count) as u64;
    assert!(kept > 0, "{} has no inputs", seeds.display());
    let artifacts = folder().join("artifacts").join(target);
    fs::create_dir_all(&artifacts).expect("the source tree is writable");
    let found = Scratch::new(&format!("fuzz-{target}"));
    let program = program();
    let output = Command::new(&program)
        .arg(format!("--target={target}"))
        .args([found.path(), &seeds])
        .args(LIMITS)
        .arg(format!("-max_total_time={SECONDS}"))
        .arg("-print_final_stats=1")
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .output()
        .expect("the program starts");
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let lines: Vec<&str> = log.lines().collect();
        let shown = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n");
        let input = log
            .lines()
            .find_map(|line| line.split_once("Test unit written to "));
        panic!(
            "{shown}\nfuzz target {target} failed: {}\nhelp: run it again with {} --target={target} {}",
            output.status,
            program.display(),
            input.map_or("INPUT", |(_, path)| path),
        );
    }
    let runs = number(&log, "stat::number_of_executed_units:").expect("libFuzzer's counts");
    let coverage = number(&log, "INITED cov:").expect("libFuzzer's coverage of the kept inputs");
    assert!(
        runs >= kept && coverage > 0,
        "{runs} runs of {kept} kept inputs cover {coverage} places\n{log}"
    );
    println!("{target}: {kept} kept inputs cover {coverage} places; {runs} runs within {SECONDS} s");
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                run(stringify!($name));
            }
        )*

        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

targets! {
    agent_client
    agent_frames
    apic
    balloon
    block
    cluster_messages
    config
    dns_stream
    dsm_frames
    file_kind
    frames
    fs
    handover
    keeper_messages
    kernel_load
    kernel_payload
    lab_file
    locks
    manifest
    nat
    net
    network
    overlay
    pci
    pmem
    qcow2
    rng
    span_packets
    state
    vcpu_statistics
    vsock
}

#[test]
fn every_fuzz_target_has_a_test() {
    let files = fs::read_dir(folder().join("src/targets")).expect("the targets");
    let mut found: Vec<String> = files
        .map(|file| file.expect("a file").path())
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .filter(|name| name != "mod")
        .collect();
    found.sort();
    assert_eq!(found, NAMES);
}
