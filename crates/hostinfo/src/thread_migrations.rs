//! Moves of a thread between CPUs, as the host's scheduler counts them.

use std::fs;

/// Name of the counter in `/proc/PID/task/TID/sched`.
const COUNTER: &str = "se.nr_migrations";

/// Returns the number of times that the host's scheduler moved the thread to another CPU, since the thread's
/// start. None if the thread has ended, or the host's kernel does not show the counter (`CONFIG_SCHED_DEBUG`
/// before Linux 6.15).
pub fn read(process: i32, thread: i32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{thread}/sched")).ok()?;
    parse(&text)
}

fn parse(text: &str) -> Option<u64> {
    let (_, value) = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.trim_end() == COUNTER)?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_is_found_among_others() {
        let text = "vcpu0 (4711, #threads: 9)\n-----\nse.exec_start   :   12.5\n\
                    se.nr_migrations                             :                  217\n\
                    nr_switches : 3\n";
        assert_eq!(parse(text), Some(217));
        assert_eq!(parse("se.nr_migrations_cold : 3\n"), None);
        assert_eq!(parse("se.nr_migrations : many\n"), None);
    }

    #[test]
    fn thread_that_has_ended_has_no_counter() {
        assert_eq!(read(i32::MAX, i32::MAX), None);
    }
}
