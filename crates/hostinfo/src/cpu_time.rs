//! Time of each CPU of the host, from `/proc/stat` (proc_stat(5)).

use std::fs;
use std::io;

/// Fields of a CPU's line, in the kernel's order.
const FIELDS: usize = 8;
const IDLE: usize = 3;
const IO_WAIT: usize = 4;
const STEAL: usize = 7;

/// Time of one CPU since the host's boot, in ticks of the kernel's `USER_HZ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTime {
    /// The CPU's number.
    pub cpu: usize,
    /// Time that it worked, guests and interrupts included.
    pub busy_ticks: u64,
    /// All time: busy, idle, and given to others by a hypervisor below this host.
    pub total_ticks: u64,
}

/// Reads the times of the CPUs that are online.
///
/// # Errors
/// If the file can't be read.
pub fn read() -> io::Result<Vec<CpuTime>> {
    fs::read_to_string("/proc/stat").map(|text| parse(&text))
}

/// Parses the file; lines of another form are skipped.
pub fn parse(text: &str) -> Vec<CpuTime> {
    text.lines().filter_map(line).collect()
}

fn line(line: &str) -> Option<CpuTime> {
    let mut words = line.strip_prefix("cpu")?.split_ascii_whitespace();
    // The line of all CPUs together has no number.
    let cpu = words.next().filter(|_| !line.starts_with("cpu "))?.parse().ok()?;
    let ticks: Vec<u64> = words.take(FIELDS).map_while(|word| word.parse().ok()).collect();
    let total = |skipped: &[usize]| {
        let counted = ticks
            .iter()
            .enumerate()
            .filter(|(field, _)| !skipped.contains(field));
        counted.fold(0_u64, |sum, (_, ticks)| sum.saturating_add(*ticks))
    };
    (ticks.len() == FIELDS).then(|| CpuTime {
        cpu,
        busy_ticks: total(&[IDLE, IO_WAIT, STEAL]),
        total_ticks: total(&[]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_and_stolen_time_are_no_work_and_guests_count_once() {
        // The last two fields are guests' time, which the first two include.
        let text = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 20 30 400 5 6 7 8 90 10\n\
                    cpu12 1 2 3 4 5 6 7 8 0 0\nintr 5 6\n";
        let time = |cpu, busy_ticks, total_ticks| CpuTime {
            cpu,
            busy_ticks,
            total_ticks,
        };
        assert_eq!(parse(text), [time(0, 163, 576), time(12, 19, 36)]);
    }

    #[test]
    fn line_of_another_form_is_skipped() {
        for wrong in [
            "",
            "cpu 1 2 3 4 5 6 7 8",
            "cpu1 1 2",
            "cpux 1 2 3 4 5 6 7 8",
            "cpu1",
        ] {
            assert_eq!(parse(wrong), [], "{wrong}");
        }
    }

    #[test]
    fn this_host_has_a_cpu() {
        let all = read().unwrap();
        assert!(
            all.iter().any(|time| time.total_ticks > time.busy_ticks),
            "{all:?}"
        );
    }
}
