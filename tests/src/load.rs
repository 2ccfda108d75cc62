//! Work in a guest that detects a lost write, a long pause or a restart of its VM.

use std::time::Duration;

use crate::Vm;
use crate::command::Running;

/// Lines of the guest's uptime, in seconds, a tenth of a second apart.
const PRINTS: &str = "while [ ! -e /tmp/stop ]; do cut -d' ' -f1 /proc/uptime; sleep 0.1; done";
/// Lines on the console. Each number is written to the disk, and read back from it.
const WRITES: &str = "i=0; while [ ! -e /tmp/stop ]; do i=$((i + 1)); echo writes $i > /dev/ttyS0; \
                      echo $i | dd of=/dev/vda bs=4096 count=1 conv=sync,fsync 2>/dev/null; \
                      echo 3 > /proc/sys/vm/drop_caches; \
                      [ \"$(head -n 1 /dev/vda)\" = $i ] || echo wrong >> /tmp/wrong; done";
/// Lines that count as work.
const LINES_MIN: usize = 10;

/// Work in a guest, until it is ended.
pub struct Load<'a> {
    vm: &'a Vm,
    session: Running,
    boot: String,
    writes: bool,
}

/// Results of the work.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// The longest time between two lines of the session, in seconds.
    pub longest_gap_s: f64,
    /// Places where lines of the console are missing.
    pub console_gaps: usize,
}

impl<'a> Load<'a> {
    /// Starts a session of `exec` that goes on for `limit` at most, and where the VM has a disk that may be
    /// overwritten, a program that writes to it and to the console.
    #[track_caller]
    pub fn start(vm: &'a Vm, writes: bool, limit: Duration) -> Self {
        let boot = vm.boot_id();
        if writes {
            vm.background(&format!("sh -c '{WRITES}'"));
        }
        let session = vm.exec(["sh", "-c", PRINTS]).limit(limit).spawn();
        Self {
            vm,
            session,
            boot,
            writes,
        }
    }

    /// Ends the work; fails if the guest has booted again, lost a write, or a line of its session.
    #[track_caller]
    pub fn end(self) -> Seen {
        self.vm.sh("touch /tmp/stop; sleep 2; test ! -e /tmp/wrong");
        let printed = self.session.wait().expect(0).text();
        let times: Vec<f64> = printed.lines().filter_map(|line| line.parse().ok()).collect();
        assert_eq!(times.len(), printed.lines().count(), "whole lines:\n{printed}");
        assert!(times.len() > LINES_MIN, "the session of exec:\n{printed}");
        assert_eq!(self.vm.boot_id(), self.boot, "the guest has not booted again");
        let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
        Seen {
            longest_gap_s: gaps.fold(0.0, f64::max),
            console_gaps: if self.writes { console_gaps(self.vm) } else { 0 },
        }
    }
}

/// Places where lines of the console are missing.
#[track_caller]
fn console_gaps(vm: &Vm) -> usize {
    let logs = vm.logs();
    let numbers = logs
        .lines()
        .filter_map(|line| line.trim().strip_prefix("writes "));
    let numbers: Vec<u64> = numbers.filter_map(|number| number.parse().ok()).collect();
    assert!(numbers.len() > LINES_MIN, "the console:\n{logs}");
    numbers.windows(2).filter(|pair| pair[1] != pair[0] + 1).count()
}
