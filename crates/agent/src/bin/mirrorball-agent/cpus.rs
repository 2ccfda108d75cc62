//! CPUs that come online only once the system is up. Where each CPU's memory is another host's, a boot on all
//! CPUs moves every page back and forth.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::held_programs::HeldPrograms;
use crate::{balance, housekeeping};

/// Key in the kernel's command line: `mirrorball.cpus=late` beside `maxcpus=1`.
const KEY: &str = "mirrorball.cpus=";
const LATE: &str = "late";

/// Time limit for the start of a system's services, after which the CPUs come online anyway.
const SERVICES_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval of the requests to systemd, and time over which the CPUs' idle time is measured.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Assumed time that a CPU takes to come online, if none was measured.
const ONLINE_TIME_DEFAULT: Duration = Duration::from_secs(4);

/// Brings all CPUs online once the system is up, if the command line requests it, and keeps the kernel's own
/// work at home.
pub fn come_online() {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    if !are_late(&cmdline) {
        return;
    }
    let was_cut_short = HeldPrograms::release_leftover();
    // Without services the system is up already.
    if Path::new("/run/systemd/system").exists() {
        let start = Instant::now();
        wait_for_services(start);
        wait_for_rest(start);
    }
    housekeeping::stay_at_home();
    let held_programs = HeldPrograms::at_home();
    // If all CPUs are online, an agent that ended has configured the scheduler already.
    if let Some(took) = bring_all().or(was_cut_short.then_some(ONLINE_TIME_DEFAULT)) {
        balance::match_move_time(took);
    }
    if let Some(held_programs) = held_programs {
        held_programs.release();
    }
}

/// Brings each offline CPU online. Returns the longest time that one of them took; none if no CPU changed.
fn bring_all() -> Option<Duration> {
    let mut longest = None;
    for entry in fs::read_dir("/sys/devices/system/cpu")
        .into_iter()
        .flatten()
        .flatten()
    {
        let start = Instant::now();
        match bring_online(&entry.path().join("online")) {
            Ok(true) => longest = longest.max(Some(start.elapsed())),
            Ok(false) => {}
            Err(error) => {
                let cpu = entry.path();
                eprintln!("mirrorball: {} does not come online: {error}", cpu.display());
            }
        }
    }
    longest
}

/// Waits for systemd, which starts the services. It is polled, since its own means to wait needs a bus, which
/// starts later than this program.
fn wait_for_services(start: Instant) {
    while start.elapsed() < SERVICES_TIMEOUT {
        let Ok(told) = Command::new("systemctl").arg("is-system-running").output() else {
            return;
        };
        if are_started(&String::from_utf8_lossy(&told.stdout)) {
            return;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until the CPUs are idle. The first work of services, such as a login, continues after all of them
/// count as started. One CPU does it in a tenth of the time that it takes while another CPU comes online and
/// takes part.
fn wait_for_rest(start: Instant) {
    let Some(mut before) = Times::now() else {
        return;
    };
    while start.elapsed() < SERVICES_TIMEOUT {
        std::thread::sleep(POLL_INTERVAL);
        let Some(now) = Times::now() else {
            return;
        };
        if now.rested_since(before) {
            return;
        }
        before = now;
    }
}

/// Times of all CPUs since the kernel started, in ticks of its clock.
#[derive(Clone, Copy)]
struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    fn now() -> Option<Times> {
        Times::read(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Reads the first line of `/proc/stat`: `cpu`, user, nice, system, idle, iowait and so on. It counts the
    /// time of nested guests twice, which is harmless.
    fn read(stat: &str) -> Option<Times> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let times: Vec<u64> = line
            .split_ascii_whitespace()
            .map_while(|word| word.parse().ok())
            .collect();
        let idle = times.get(3)? + times.get(4)?;
        Some(Times {
            idle,
            all: times.iter().sum(),
        })
    }

    /// Returns whether the CPUs were idle for three quarters of the time since `before`.
    fn rested_since(self, before: Times) -> bool {
        let (idle, all) = (
            self.idle.saturating_sub(before.idle),
            self.all.saturating_sub(before.all),
        );
        all > 0 && idle * 4 >= all * 3
    }
}

/// Returns whether systemd reports that all its services have been started, or have failed to.
fn are_started(state: &str) -> bool {
    !matches!(
        state.trim(),
        "" | "initializing" | "starting" | "offline" | "unknown"
    )
}

/// Returns whether the last word with this key requests it: the user's words follow the image's.
fn are_late(cmdline: &str) -> bool {
    let words = cmdline.split_ascii_whitespace().take_while(|word| *word != "--");
    words.filter_map(|word| word.strip_prefix(KEY)).last() == Some(LATE)
}

/// Brings an offline CPU online and returns true. Other entries, and CPUs that are always online, have no
/// such file.
fn bring_online(online: &Path) -> std::io::Result<bool> {
    match fs::read_to_string(online) {
        Ok(state) if state.trim() == "0" => fs::write(online, "1").map(|()| true),
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_for_systemd_ends_when_it_is_done_or_has_failed() {
        for state in ["initializing\n", "starting\n", "offline\n", ""] {
            assert!(!are_started(state), "{state:?}");
        }
        for state in ["running\n", "degraded\n", "maintenance\n", "stopping\n"] {
            assert!(are_started(state), "{state:?}");
        }
    }

    #[test]
    fn rest_is_three_quarters_of_the_time_without_work() {
        let times = |idle, waits| {
            Times::read(&format!(
                "cpu  10 0 20 {idle} {waits} 0 5 0 0 0\ncpu0 1 2 3 4 5\n"
            ))
        };
        let before = times(100, 0).expect("times");
        assert!(times(130, 0).expect("times").rested_since(before));
        assert!(
            times(100, 30).expect("times").rested_since(before),
            "a CPU that waits for a disk is idle"
        );
        // The line's other words are the work since time zero: 35 ticks.
        let nothing = Times { idle: 0, all: 0 };
        assert!(times(105, 0).expect("times").rested_since(nothing));
        assert!(!times(104, 0).expect("times").rested_since(nothing));
        assert!(!before.rested_since(before), "no time has gone by");
        for broken in ["", "cpu  1 2 3", "cpu0 1 2 3 4 5"] {
            assert!(Times::read(broken).is_none(), "{broken:?}");
        }
    }

    #[test]
    fn only_offline_cpus_are_brought_online_if_requested() {
        assert!(are_late("quiet maxcpus=1 mirrorball.cpus=late"));
        assert!(!are_late("quiet maxcpus=1"));
        assert!(!are_late("xmirrorball.cpus=late mirrorball.cpus=later"));
        assert!(!are_late("mirrorball.cpus=late mirrorball.cpus=early"));
        assert!(are_late("mirrorball.cpus=early mirrorball.cpus=late"));
        assert!(!are_late("quiet -- mirrorball.cpus=late"));
        let folder = tempfile::tempdir().expect("a directory");
        for (state, then, comes) in [("0\n", "1", true), ("1\n", "1\n", false)] {
            let online = folder.path().join("online");
            fs::write(&online, state).expect("a file");
            assert_eq!(bring_online(&online).expect("it can be written"), comes);
            assert_eq!(fs::read_to_string(&online).expect("a file"), then);
        }
        // The file `online` of all CPUs is no directory.
        assert!(!bring_online(&folder.path().join("online/online")).expect("nothing to do"));
    }
}
