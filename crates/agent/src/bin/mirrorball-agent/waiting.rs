//! Programs that wait at home while CPUs come online: the news of them wakes a system's services, and before the scheduler is told how
//! dear moves are it would move what wakes there, and all that it uses would have to be fetched after it.

use std::collections::HashSet;
use std::fs;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::housekeeping::{self, threads};

/// They wait until they are let go.
pub struct Waiting {
    /// The CPUs of who may run anywhere, and those at home, as the kernel tells them.
    anywhere: String,
    home: String,
    /// Who may run at home alone by itself.
    stay: HashSet<usize>,
}

impl Waiting {
    /// Keeps all at home that may run wherever the first process may; what they start meanwhile inherits it. None where that can't be.
    pub fn at_home() -> Option<Waiting> {
        let anywhere = allowed("/proc/1")?;
        // Who says what its own CPUs are keeps them; this thread is at home already.
        let home = allowed("/proc/thread-self").filter(|home| *home != anywhere)?;
        let of = |thread: &usize| allowed(&format!("/proc/{thread}"));
        let stay = threads()
            .filter(|thread| of(thread).as_ref() == Some(&home))
            .collect();
        let cpus = housekeeping::home()?;
        for thread in threads().filter(|thread| of(thread).as_ref() == Some(&anywhere)) {
            keep(thread, &cpus);
        }
        Some(Waiting { anywhere, home, stay })
    }

    /// They may run where they could, and so may what they have started meanwhile.
    pub fn let_go(self) {
        let Some(cpus) = cpus(&self.anywhere) else {
            return;
        };
        for thread in threads().filter(|thread| !self.stay.contains(thread)) {
            if allowed(&format!("/proc/{thread}")).as_ref() == Some(&self.home) {
                keep(thread, &cpus);
            }
        }
    }
}

fn keep(thread: usize, cpus: &CpuSet) {
    // One that has ended needs none, and of some threads of the kernel nobody may choose them.
    let _ = sched_setaffinity(Pid::from_raw(thread as i32), cpus);
}

/// The CPUs of the thread with that folder, those that are not online among them.
fn allowed(folder: &str) -> Option<String> {
    let status = fs::read_to_string(format!("{folder}/status")).ok()?;
    list(&status).map(str::to_owned)
}

fn list(status: &str) -> Option<&str> {
    let mut lines = status.lines();
    let list = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(list.trim())
}

/// The CPUs in a list such as `0,2-5`.
fn cpus(list: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        for cpu in first.parse().ok()?..=last.parse().ok()? {
            set.set(cpu).ok()?;
        }
    }
    Some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_read_as_the_kernel_tells_them() {
        let status = "Name:\tinit\nCpus_allowed:\t3d\nCpus_allowed_list:\t0,2-5\nMems_allowed:\t1\n";
        assert_eq!(list(status), Some("0,2-5"));
        assert_eq!(list("Name:\tinit\n"), None);
        let set = cpus("0,2-5").expect("a list");
        let inside: Vec<_> = (0..8).filter(|cpu| set.is_set(*cpu) == Ok(true)).collect();
        assert_eq!(inside, [0, 2, 3, 4, 5]);
        for broken in ["", "a", "1-", "0-100000"] {
            assert!(cpus(broken).is_none(), "{broken:?}");
        }
        let own = allowed("/proc/thread-self").expect("this thread has some");
        assert!(cpus(&own).is_some(), "{own}");
    }
}
