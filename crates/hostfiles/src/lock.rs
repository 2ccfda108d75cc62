//! Locks between processes, with a time limit on the wait.
//!
//! The lock is `flock`: it belongs to an open file, and a crash releases it.

pub mod table;

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
pub use nix::fcntl::Flock;
use nix::fcntl::FlockArg;

use table::LockEntry;

/// Time limit for a lock that every process holds only briefly.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Maximum pause between two attempts. The first pause is a fortieth of it.
const PAUSE_MAX: Duration = Duration::from_millis(40);

/// Number of simultaneous holders of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Any number of shared holders, while none holds it exclusively.
    Shared,
    /// One exclusive holder.
    Exclusive,
}

/// A lock was not acquired within the limit.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} has been locked for more than {} s by {holder}; help: wait until that process has ended, or end \
     it, and try again",
    path.display(),
    limit.as_secs_f32()
)]
struct TimedOut {
    path: PathBuf,
    limit: Duration,
    holder: Holders,
}

/// Processes that hold a lock, formatted for people.
#[derive(Debug)]
struct Holders(Vec<u32>);

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("a process that this host does not name");
        }
        for (index, pid) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            match program(*pid) {
                Some(program) => write!(f, "{comma}process {pid} ({program})")?,
                None => write!(f, "{comma}a process that process {pid} started")?,
            }
        }
        Ok(())
    }
}

/// Returns the name of a process's program; none when the process has ended.
fn program(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.chars().filter(|c| !c.is_control()).collect())
}

/// Acquires the lock of `file`, which is at `path`.
///
/// # Errors
/// `TimedOut` if the lock is not acquired within `limit`; the error names the holder.
pub fn within(path: &Path, mut file: File, share: Share, limit: Duration) -> io::Result<Flock<File>> {
    let start = Instant::now();
    let mut pause = PAUSE_MAX / 40;
    loop {
        match attempt(file, share)? {
            Attempt::Locked(lock) => return Ok(lock),
            Attempt::Held(back) => file = back,
        }
        if start.elapsed() >= limit {
            let error = TimedOut {
                path: path.to_owned(),
                limit,
                holder: Holders(holders(&file)),
            };
            return Err(io::Error::new(io::ErrorKind::TimedOut, error));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Acquires the lock of `file` if no other process holds it now.
pub fn at_once(file: File, share: Share) -> io::Result<Option<Flock<File>>> {
    match attempt(file, share)? {
        Attempt::Locked(lock) => Ok(Some(lock)),
        Attempt::Held(_) => Ok(None),
    }
}

enum Attempt {
    Locked(Flock<File>),
    Held(File),
}

fn attempt(mut file: File, share: Share) -> io::Result<Attempt> {
    let how = match share {
        Share::Shared => FlockArg::LockSharedNonblock,
        Share::Exclusive => FlockArg::LockExclusiveNonblock,
    };
    loop {
        match Flock::lock(file, how) {
            Ok(lock) => return Ok(Attempt::Locked(lock)),
            Err((back, Errno::EWOULDBLOCK)) => return Ok(Attempt::Held(back)),
            Err((back, Errno::EINTR)) => file = back,
            Err((_, error)) => return Err(error.into()),
        }
    }
}

/// Returns the processes that hold locks of a file, as far as the kernel's table names them.
pub fn holders(file: &File) -> Vec<u32> {
    let Ok(about) = file.metadata() else {
        return Vec::new();
    };
    let table = table::of_host().unwrap_or_default();
    let file = (libc::major(about.dev()), libc::minor(about.dev()), about.ino());
    holders_in(&table, file)
}

/// Returns the processes in a lock table that hold locks of the file with this device and inode.
fn holders_in(table: &str, (major, minor, inode): (u32, u32, u64)) -> Vec<u32> {
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    let of_file = LockEntry::all(table).filter(|lock| lock.file == file);
    let mut pids: Vec<u32> = of_file.filter_map(|lock| lock.pid).collect();
    pids.dedup();
    pids
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::private::lock_file;

    #[test]
    fn a_held_lock_is_an_error_within_the_limit_that_names_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = within(&path, lock_file(&path).unwrap(), Share::Shared, LIMIT).unwrap();
        let start = Instant::now();
        let limit = Duration::from_millis(200);
        let error = within(&path, lock_file(&path).unwrap(), Share::Exclusive, limit).unwrap_err();
        assert!(start.elapsed() >= limit && start.elapsed() < LIMIT);
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let text = error.to_string();
        let holder = format!(
            "process {} ({})",
            std::process::id(),
            program(std::process::id()).unwrap()
        );
        assert!(text.starts_with(&path.display().to_string()), "{text}");
        assert!(text.contains(&holder) && text.contains("help: "), "{text}");
        drop(held);
        within(&path, lock_file(&path).unwrap(), Share::Exclusive, limit).unwrap();
    }

    #[test]
    fn a_lock_that_becomes_free_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = at_once(lock_file(&path).unwrap(), Share::Exclusive)
            .unwrap()
            .unwrap();
        assert!(
            at_once(lock_file(&path).unwrap(), Share::Shared)
                .unwrap()
                .is_none()
        );
        let holder = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(held);
        });
        within(&path, lock_file(&path).unwrap(), Share::Exclusive, LIMIT).unwrap();
        holder.join().unwrap();
    }

    #[test]
    fn holders_are_those_of_the_file_and_not_those_that_wait() {
        let table = "1: FLOCK  ADVISORY  WRITE 700 00:1a:55 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 701 00:1a:55 0 EOF\n\
                     2: FLOCK  ADVISORY  READ 702 00:1a:556 0 EOF\n\
                     3: FLOCK  ADVISORY  READ 0 00:1a:55 0 EOF\n\
                     4: POSIX  ADVISORY  READ 703 103:02:55 0 EOF\n";
        assert_eq!(holders_in(table, (0, 0x1a, 55)), [700]);
        assert_eq!(holders_in(table, (0x103, 2, 55)), [703]);
        assert_eq!(holders_in(table, (0, 0x1a, 5)), []);
    }

    #[test]
    fn a_holder_that_has_ended_is_not_given_a_name() {
        assert_eq!(
            Holders(vec![u32::MAX]).to_string(),
            format!("a process that process {} started", u32::MAX)
        );
        assert!(Holders(Vec::new()).to_string().contains("does not name"));
    }

    #[test]
    fn all_holders_are_listed_with_their_programs() {
        let own = std::process::id();
        let name = fs::read_to_string("/proc/self/comm").unwrap();
        let named = format!("process {own} ({})", name.trim());
        assert_eq!(
            Holders(vec![own, u32::MAX, own]).to_string(),
            format!("{named}, a process that process {} started, {named}", u32::MAX)
        );
    }

    #[test]
    fn a_file_that_no_process_locked_has_no_holders() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let file = lock_file(&path).unwrap();
        assert_eq!(holders(&file), []);
        let _held = at_once(file, Share::Shared).unwrap().unwrap();
        let _second = at_once(lock_file(&path).unwrap(), Share::Shared)
            .unwrap()
            .unwrap();
        assert_eq!(holders(&lock_file(&path).unwrap()), [std::process::id()]);
    }
}
