//! Programs that wait at home while CPUs come online: the news of them wakes a system's services, and before
//! the scheduler is told how dear moves are it would move what wakes there, and all that it uses would have
//! to be fetched after it.
//!
//! Who waits looks like one that wants to be at home. So what tells them apart is written down before the
//! first one is held, and an agent that is killed meanwhile leaves it to the next one.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::housekeeping::{self, threads};

/// Where that is, while they wait. Whatever is in this directory ends with the boot (Filesystem Hierarchy
/// Standard 3.0, section 3.15).
const RECORD: &str = "/run/mirrorball-agent.waiting";

/// They wait until they are let go.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// The CPUs of who may run anywhere, and those at home, as the kernel tells them.
    anywhere: String,
    home: String,
    /// Who may run at home alone by itself.
    stay: HashSet<Thread>,
}

/// A thread that no later one is taken for, whose number may be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Thread {
    number: usize,
    /// Since the kernel's start, in ticks of its clock.
    started: u64,
}

impl Waiting {
    /// Keeps all at home that may run wherever the first process may; what they start meanwhile inherits it.
    /// None where that can't be.
    pub fn at_home() -> Option<Waiting> {
        let anywhere = allowed("/proc/1")?;
        // Who says what its own CPUs are keeps them; this thread is at home already.
        let home = allowed("/proc/thread-self").filter(|home| *home != anywhere)?;
        let cpus = housekeeping::home()?;
        let stay = threads()
            .filter_map(Thread::at)
            .filter(|thread| thread.has(&home));
        let waiting = Waiting {
            stay: stay.collect(),
            anywhere,
            home,
        };
        // They wait without it as well: it is for an agent that is killed, which is rare.
        let _ = waiting.write(Path::new(RECORD));
        let anyone = threads().filter_map(Thread::at);
        for thread in anyone.filter(|thread| thread.has(&waiting.anywhere)) {
            thread.keep_to(&cpus);
        }
        Some(waiting)
    }

    /// They may run where they could, and so may what they have started meanwhile.
    pub fn let_go(self) {
        self.let_go_among(threads());
        let _ = fs::remove_file(RECORD);
    }

    /// Lets go of those whom an agent left waiting that was killed, and of what they have started since.
    /// False if there was none.
    pub fn let_go_of_left() -> bool {
        let left = Waiting::read(Path::new(RECORD));
        let is_left = left.is_some();
        match left {
            Some(waiting) => waiting.let_go(),
            // One that was not written to its end: nobody was held yet.
            None => drop(fs::remove_file(RECORD)),
        }
        is_left
    }

    fn let_go_among(&self, numbers: impl Iterator<Item = usize>) {
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

    fn read(record: &Path) -> Option<Waiting> {
        serde_json::from_slice(&fs::read(record).ok()?).ok()
    }
}

impl Thread {
    /// The one that has this number now.
    fn at(number: usize) -> Option<Thread> {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let started = housekeeping::number(&stat, 22)?;
        Some(Thread { number, started })
    }

    fn has(self, cpus: &str) -> bool {
        allowed(&format!("/proc/{}", self.number)).as_deref() == Some(cpus)
    }

    fn keep_to(self, cpus: &CpuSet) {
        // One that has ended needs none, and of some threads of the kernel nobody may choose them.
        let _ = sched_setaffinity(Pid::from_raw(self.number as i32), cpus);
    }
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

    #[test]
    fn the_next_agent_lets_go_of_all_but_those_that_stay() {
        let anywhere = allowed("/proc/thread-self").expect("this thread has some");
        let all = cpus(&anywhere).expect("a list");
        let first = (0..CpuSet::count()).find(|cpu| all.is_set(*cpu) == Ok(true));
        let home = first.expect("a CPU").to_string();
        let at_home = cpus(&home).expect("a list");
        let [(_held, held), (_stays, stays), (_other, other)] = [(); 3].map(|()| Idle::on(&at_home));
        // A number that was another thread's when programs were held.
        let earlier = Thread {
            started: other.started - 1,
            ..other
        };
        let folder = tempfile::tempdir().expect("a directory");
        let record = folder.path().join("waiting");
        let killed = Waiting {
            anywhere: anywhere.clone(),
            home: home.clone(),
            stay: [stays, earlier].into(),
        };
        killed.write(&record).expect("it can be written");
        let next = Waiting::read(&record).expect("whole");
        assert_eq!(next, killed);
        next.let_go_among([held, stays, other].map(|thread| thread.number).into_iter());
        assert!(held.has(&anywhere));
        assert!(stays.has(&home));
        assert!(other.has(&anywhere));
    }

    #[test]
    fn a_record_that_was_not_written_to_its_end_is_none() {
        let folder = tempfile::tempdir().expect("a directory");
        let record = folder.path().join("waiting");
        assert_eq!(Waiting::read(&record), None);
        let whole = Waiting {
            anywhere: "0-1".into(),
            home: "0".into(),
            stay: Thread::at(std::process::id() as usize).into_iter().collect(),
        };
        whole.write(&record).expect("it can be written");
        let written = fs::read(&record).expect("a file");
        for end in 0..written.len() {
            fs::write(&record, &written[..end]).expect("a file");
            assert_eq!(Waiting::read(&record), None, "{end} bytes");
        }
    }
}
