//! CPUs that are to come online when the system is up: where each CPU's memory is another host's, a boot that
//! all take part in moves every page to and fro.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::waiting::Waiting;
use crate::{balance, housekeeping};

/// In the kernel's command line, `mirrorball.cpus=late` beside `maxcpus=1`.
const KEY: &str = "mirrorball.cpus=";
const LATE: &str = "late";

/// How long a system may take to start its services before they come all the same.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often systemd is asked, and the time over which the CPUs' rest is measured.
const LOOK: Duration = Duration::from_secs(2);
/// How long a CPU takes to come online where nobody saw one do so.
const UNSEEN: Duration = Duration::from_secs(4);

/// Brings all CPUs online once the system is up, if the command line asks for that, and keeps the kernel's
/// own work at home.
pub fn come_online() {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    if !are_late(&cmdline) {
        return;
    }
    let was_cut_short = Waiting::let_go_of_left();
    // Without services the system is up already.
    if Path::new("/run/systemd/system").exists() {
        let start = Instant::now();
        wait_for_services(start);
        wait_for_rest(start);
    }
    housekeeping::stay_at_home();
    let waiting = Waiting::at_home();
    // With all of them online, an agent that came to its end has told the scheduler.
    if let Some(took) = bring_all().or(was_cut_short.then_some(UNSEEN)) {
        balance::as_slow_as(took);
    }
    if let Some(waiting) = waiting {
        waiting.let_go();
    }
}

/// Brings each CPU online that is not; how long one took at most. None if all are, or stay as they are.
fn bring_all() -> Option<Duration> {
    let mut longest = None;
    for entry in fs::read_dir("/sys/devices/system/cpu")
        .into_iter()
        .flatten()
        .flatten()
    {
        let start = Instant::now();
        match bring(&entry.path().join("online")) {
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

/// Systemd starts them. It is asked again and again: its own way to wait needs a bus, which comes later than
/// this program.
fn wait_for_services(start: Instant) {
    while start.elapsed() < PATIENCE {
        let Ok(told) = Command::new("systemctl").arg("is-system-running").output() else {
            return;
        };
        if are_started(&String::from_utf8_lossy(&told.stdout)) {
            return;
        }
        std::thread::sleep(LOOK);
    }
}

/// What services do at first, such as a login, goes on when all of them count as started. Done by one CPU it
/// takes a tenth of the time that it takes while another comes online and joins in.
fn wait_for_rest(start: Instant) {
    let Some(mut before) = Times::now() else {
        return;
    };
    while start.elapsed() < PATIENCE {
        std::thread::sleep(LOOK);
        let Some(now) = Times::now() else {
            return;
        };
        if now.rested_since(before) {
            return;
        }
        before = now;
    }
}

/// The CPUs' time since the kernel started, in its ticks.
#[derive(Clone, Copy)]
struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    fn now() -> Option<Times> {
        Times::read(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// From the first line of `/proc/stat`: `cpu`, user, nice, system, idle, iowait and so on. Time that its
    /// own guests get is there twice, which does no harm.
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

    /// True if the CPUs had nothing to do for three quarters of the time since.
    fn rested_since(self, before: Times) -> bool {
        let (idle, all) = (
            self.idle.saturating_sub(before.idle),
            self.all.saturating_sub(before.all),
        );
        all > 0 && idle * 4 >= all * 3
    }
}

/// Whether systemd says that all its services have been started, or have failed to.
fn are_started(state: &str) -> bool {
    !matches!(
        state.trim(),
        "" | "initializing" | "starting" | "offline" | "unknown"
    )
}

/// As the last of the kernel's words says that tells of it: the user's come behind the image's.
fn are_late(cmdline: &str) -> bool {
    let words = cmdline.split_ascii_whitespace().take_while(|word| *word != "--");
    words.filter_map(|word| word.strip_prefix(KEY)).last() == Some(LATE)
}

/// True for a CPU that was offline. Other entries, and CPUs that are always online, have no such file.
fn bring(online: &Path) -> std::io::Result<bool> {
    match fs::read_to_string(online) {
        Ok(state) if state.trim() == "0" => fs::write(online, "1").map(|()| true),
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_is_waited_for_until_it_is_done_or_has_failed() {
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
            "who waits for a disk does not work"
        );
        // The line's other words are what was done in the time from nothing at all: 35 ticks.
        let nothing = Times { idle: 0, all: 0 };
        assert!(times(105, 0).expect("times").rested_since(nothing));
        assert!(!times(104, 0).expect("times").rested_since(nothing));
        assert!(!before.rested_since(before), "no time has gone by");
        for broken in ["", "cpu  1 2 3", "cpu0 1 2 3 4 5"] {
            assert!(Times::read(broken).is_none(), "{broken:?}");
        }
    }

    #[test]
    fn only_those_that_were_kept_offline_for_it_are_brought() {
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
            assert_eq!(bring(&online).expect("it can be written"), comes);
            assert_eq!(fs::read_to_string(&online).expect("a file"), then);
        }
        // The file `online` of all CPUs has none below it.
        assert!(!bring(&folder.path().join("online/online")).expect("nothing to do"));
    }
}
