//! Programs that are held at home while CPUs come online. The events of new CPUs wake a system's services.
//! The scheduler, before the cost of moves is configured, would move the woken programs, and all their pages
//! would be fetched after them.
//!
//! A held program looks like one that was bound to the home before. The difference is therefore recorded
//! before the first one is held, and the successor of an agent that is killed meanwhile reads the record.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::housekeeping::{self, threads};

/// File of the record. The directory is cleared at each boot (Filesystem Hierarchy Standard 3.0, section
/// 3.15).
const RECORD: &str = "/run/mirrorball-agent.waiting";

/// Record of held programs, until they are released.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPrograms {
    /// CPUs of programs that may run on any, and CPUs of the home, in the kernel's format.
    anywhere: String,
    home: String,
    /// Threads that were bound to the home before.
    stay: HashSet<Thread>,
}

/// A thread, identified so that a later thread with the same number differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Thread {
    number: usize,
    /// Start time since the kernel's start, in ticks of its clock.
    started: u64,
}

impl HeldPrograms {
    /// Holds all programs at home that may run on the same CPUs as the first process; processes that they
    /// start meanwhile inherit it. Returns none if that is impossible.
    pub fn at_home() -> Option<HeldPrograms> {
        let anywhere = allowed("/proc/1")?;
        // Programs with CPUs of their own keep them; this thread is at home already.
        let home = allowed("/proc/thread-self").filter(|home| *home != anywhere)?;
        let cpus = housekeeping::home()?;
        let stay = threads()
            .filter_map(Thread::at)
            .filter(|thread| thread.has(&home));
        let held_programs = HeldPrograms {
            stay: stay.collect(),
            anywhere,
            home,
        };
        // The programs are held without a record as well: it is for an agent that is killed, which is rare.
        let _ = held_programs.write(Path::new(RECORD));
        let anyone = threads().filter_map(Thread::at);
        for thread in anyone.filter(|thread| thread.has(&held_programs.anywhere)) {
            thread.keep_to(&cpus);
        }
        Some(held_programs)
    }

    /// Releases the held programs, and those that they have started meanwhile.
    pub fn release(self) {
        self.release_among(threads());
        let _ = fs::remove_file(RECORD);
    }

    /// Releases the programs that a killed agent held, and those that they have started since. Returns false
    /// if there was no record.
    pub fn release_leftover() -> bool {
        let left = HeldPrograms::read(Path::new(RECORD));
        let is_left = left.is_some();
        match left {
            Some(held_programs) => held_programs.release(),
            // An incomplete record: no program was held yet.
            None => drop(fs::remove_file(RECORD)),
        }
        is_left
    }

    fn release_among(&self, numbers: impl Iterator<Item = usize>) {
        let Some(cpus) = cpus(&self.anywhere) else {
            return;
        };
        for thread in numbers.filter_map(Thread::at) {
            if !self.stay.contains(&thread) && thread.has(&self.home) {
                thread.keep_to(&cpus);
            }
        }
    }

    fn write(&self, record: &Path) -> std::io::Result<()> {
        fs::write(record, serde_json::to_vec(self)?)
    }

    fn read(record: &Path) -> Option<HeldPrograms> {
        serde_json::from_slice(&fs::read(record).ok()?).ok()
    }
}

impl Thread {
    /// Returns the thread that has this number now.
    fn at(number: usize) -> Option<Thread> {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let started = housekeeping::number(&stat, 22)?;
        Some(Thread { number, started })
    }

    fn has(self, cpus: &str) -> bool {
        allowed(&format!("/proc/{}", self.number)).as_deref() == Some(cpus)
    }

    fn keep_to(self, cpus: &CpuSet) {
        // A thread that has ended needs no CPUs, and some threads of the kernel have fixed ones.
        let _ = sched_setaffinity(Pid::from_raw(self.number as i32), cpus);
    }
}

/// Returns the CPUs of the thread with that folder, including offline ones.
fn allowed(folder: &str) -> Option<String> {
    let status = fs::read_to_string(format!("{folder}/status")).ok()?;
    list(&status).map(str::to_owned)
}

fn list(status: &str) -> Option<&str> {
    let mut lines = status.lines();
    let list = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(list.trim())
}

/// Returns the CPUs in a list such as `0,2-5`.
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
    use std::process::{Child, Command};

    use super::*;

    /// A program that does nothing until the test ends.
    struct Idle(Child);

    impl Idle {
        fn on(cpus: &CpuSet) -> (Idle, Thread) {
            let child = Command::new("sleep").arg("60").spawn().expect("a program");
            let thread = Thread::at(child.id() as usize).expect("it runs");
            thread.keep_to(cpus);
            (Idle(child), thread)
        }
    }

    impl Drop for Idle {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn cpus_are_read_in_the_kernels_format() {
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

    #[test]
    fn next_agent_releases_all_held_programs_but_those_that_stay() {
        let anywhere = allowed("/proc/thread-self").expect("this thread has some");
        let all = cpus(&anywhere).expect("a list");
        let first = (0..CpuSet::count()).find(|cpu| all.is_set(*cpu) == Ok(true));
        let home = first.expect("a CPU").to_string();
        let at_home = cpus(&home).expect("a list");
        let [(_held, held), (_stays, stays), (_other, other)] = [(); 3].map(|()| Idle::on(&at_home));
        // A number that belonged to another thread when programs were held.
        let earlier = Thread {
            started: other.started - 1,
            ..other
        };
        let folder = tempfile::tempdir().expect("a directory");
        let record = folder.path().join("waiting");
        let killed = HeldPrograms {
            anywhere: anywhere.clone(),
            home: home.clone(),
            stay: [stays, earlier].into(),
        };
        killed.write(&record).expect("it can be written");
        let next = HeldPrograms::read(&record).expect("whole");
        assert_eq!(next, killed);
        next.release_among([held, stays, other].map(|thread| thread.number).into_iter());
        assert!(held.has(&anywhere));
        assert!(stays.has(&home));
        assert!(other.has(&anywhere));
    }

    #[test]
    fn incomplete_record_is_ignored() {
        let folder = tempfile::tempdir().expect("a directory");
        let record = folder.path().join("waiting");
        assert_eq!(HeldPrograms::read(&record), None);
        let whole = HeldPrograms {
            anywhere: "0-1".into(),
            home: "0".into(),
            stay: Thread::at(std::process::id() as usize).into_iter().collect(),
        };
        whole.write(&record).expect("it can be written");
        let written = fs::read(&record).expect("a file");
        for end in 0..written.len() {
            fs::write(&record, &written[..end]).expect("a file");
            assert_eq!(HeldPrograms::read(&record), None, "{end} bytes");
        }
    }
}
