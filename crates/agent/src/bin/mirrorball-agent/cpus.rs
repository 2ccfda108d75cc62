//! CPUs that are to come online when the system is up: where each CPU's memory is another host's, a boot that all take part in
//! moves every page to and fro.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::housekeeping;

/// In the kernel's command line, beside `maxcpus=1`.
const LATE: &str = "mirrorball.cpus=late";

/// How long a system may take to start its services before they come all the same.
const PATIENCE: Duration = Duration::from_secs(120);

/// Brings all CPUs online once the system is up, if the command line asks for that, and keeps the kernel's own work at home.
pub fn come_online() {
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    if !are_late(&cmdline) {
        return;
    }
    wait_for_services();
    housekeeping::stay_at_home();
    for entry in fs::read_dir("/sys/devices/system/cpu")
        .into_iter()
        .flatten()
        .flatten()
    {
        if let Err(error) = bring(&entry.path().join("online")) {
            eprintln!(
                "mirrorball: {} does not come online: {error}",
                entry.path().display()
            );
        }
    }
}

/// Where systemd starts them. It counts this one as started.
fn wait_for_services() {
    if !Path::new("/run/systemd/system").exists() {
        return;
    }
    let mut command = Command::new("systemctl");
    let Ok(mut waiting) = command.args(["is-system-running", "--wait", "--quiet"]).spawn() else {
        return;
    };
    let start = Instant::now();
    while matches!(waiting.try_wait(), Ok(None)) {
        if start.elapsed() > PATIENCE {
            // It may end meanwhile, which is as good.
            let _ = waiting.kill();
            let _ = waiting.wait();
            return;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn are_late(cmdline: &str) -> bool {
    cmdline.split_ascii_whitespace().any(|word| word == LATE)
}

/// A CPU that is offline. Other entries, and CPUs that are always online, have no such file.
fn bring(online: &Path) -> std::io::Result<()> {
    match fs::read_to_string(online) {
        Ok(state) if state.trim() == "0" => fs::write(online, "1"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_that_were_kept_offline_for_it_are_brought() {
        assert!(are_late("quiet maxcpus=1 mirrorball.cpus=late"));
        assert!(!are_late("quiet maxcpus=1"));
        assert!(!are_late("xmirrorball.cpus=late mirrorball.cpus=later"));
        let folder = tempfile::tempdir().expect("a directory");
        for (state, then) in [("0\n", "1"), ("1\n", "1\n")] {
            let online = folder.path().join("online");
            fs::write(&online, state).expect("a file");
            bring(&online).expect("it can be written");
            assert_eq!(fs::read_to_string(&online).expect("a file"), then);
        }
        // The file `online` of all CPUs has none below it.
        bring(&folder.path().join("online/online")).expect("nothing to do");
    }
}
