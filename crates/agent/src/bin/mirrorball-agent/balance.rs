//! Rate at which the scheduler moves programs to other nodes. Where each node's memory is another host's, a
//! program that has moved fetches every page that it uses. A program of a shell's pipe would take a hundred
//! times as long on the idle CPU. A program that works for seconds still moves.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MsFlags, mount};

/// Directory of the kernel's debugging interface.
const DEBUG: &str = "/sys/kernel/debug";
/// Directory in it with a folder per CPU, each with a folder per domain over which its scheduler balances
/// (`kernel/sched/debug.c`).
const DOMAINS: &str = "sched/domains";

/// The kernel's name of a domain of several nodes (`kernel/sched/topology.c`).
const NODES: &str = "NUMA";

/// Number of times that the balance finds more work on one node than on another before it moves a program
/// that has run recently (`nr_balance_failed` in `kernel/sched/fair.c`).
const TRIES: u32 = 20;
/// Time within which a program counts as having run recently, nanoseconds. It is one value for all domains;
/// in those of one node two tries suffice.
const LATE_NS: &str = "1000000000";

/// Interval of the balance between nodes, milliseconds. The kernel's own is at least 2 ms, and at most 0.1 s
/// per CPU.
const INTERVAL_MS: std::ops::RangeInclusive<u64> = 2..=200;

/// Makes the kernel move programs between nodes only if a node has too much work for about as long as a move
/// takes. A CPU that comes online fetches about as many pages as a program that moves, and `move_takes` is
/// the time of that. Must be called again after a CPU has come online or gone offline, which creates new
/// domains. A kernel without these settings balances as before.
pub fn match_move_time(move_takes: Duration) {
    let debug = Path::new(DEBUG);
    if !debug.join("sched").exists() {
        let _ = mount(
            Some("debugfs"),
            debug,
            Some("debugfs"),
            MsFlags::empty(),
            None::<&str>,
        );
    }
    let _ = fs::write(debug.join("sched/migration_cost_ns"), LATE_NS);
    let interval = interval_ms(move_takes);
    for domain in of_nodes(&debug.join(DOMAINS)) {
        // The longest interval first: none may be below the shortest.
        for (file, value) in [
            ("max_interval", 2 * interval),
            ("min_interval", interval),
            ("cache_nice_tries", TRIES.into()),
        ] {
            let _ = fs::write(domain.join(file), value.to_string());
        }
    }
}

/// Returns the interval at which the tries take as long together.
fn interval_ms(move_takes: Duration) -> u64 {
    let apart = move_takes / TRIES;
    u64::try_from(apart.as_millis())
        .unwrap_or(u64::MAX)
        .clamp(*INTERVAL_MS.start(), *INTERVAL_MS.end())
}

/// Returns the folders of domains of several nodes.
fn of_nodes(domains: &Path) -> Vec<PathBuf> {
    let cpus = entries(domains);
    let mut found: Vec<_> = cpus
        .flat_map(|cpu| entries(&cpu))
        .filter(|domain| fs::read_to_string(domain.join("name")).is_ok_and(|name| name.trim() == NODES))
        .collect();
    found.sort_unstable();
    found
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_take_as_long_as_a_move_within_the_kernels_limits() {
        for (takes_ms, interval) in [(0, 2), (60, 3), (1_000, 50), (4_000, 200), (60_000, 200)] {
            assert_eq!(
                interval_ms(Duration::from_millis(takes_ms)),
                interval,
                "{takes_ms} ms"
            );
        }
        assert_eq!(interval_ms(Duration::MAX), 200);
    }

    #[test]
    fn domains_of_several_nodes_are_found_by_name() {
        let root = tempfile::tempdir().expect("a directory");
        for (domain, name) in [
            ("cpu0/domain0", "MC"),
            ("cpu0/domain1", "NUMA"),
            ("cpu1/domain0", "NUMA"),
        ] {
            let folder = root.path().join(domain);
            fs::create_dir_all(&folder).expect("a directory");
            fs::write(folder.join("name"), format!("{name}\n")).expect("a file");
        }
        let expected = ["cpu0/domain1", "cpu1/domain0"].map(|domain| root.path().join(domain));
        assert_eq!(of_nodes(root.path()), expected);
        assert!(of_nodes(&root.path().join("none")).is_empty());
    }
}
