//! Parses the kernel's lock table, `/proc/locks`, and the same lines for an open file in `/proc/self/fdinfo`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Maximum readings of the host's table for one query. Our choice: a second reading rarely misses the same
/// lock.
const READINGS_MAX: u32 = 8;

/// A lock held by a process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LockEntry<'a> {
    /// Whether `flock` took the lock. File systems that keep locks on a server (9p, NFS) turn such a lock
    /// into a POSIX lock of the whole file.
    pub is_flock: bool,
    /// Process that holds the lock; none for an open file description's lock, or for a process of another PID
    /// namespace.
    pub pid: Option<u32>,
    /// Device and inode of the file.
    pub file: &'a str,
    /// First locked byte.
    pub start: u64,
}

impl<'a> LockEntry<'a> {
    /// Parses a line. Returns none for a process that waits for a lock: its line has an arrow.
    pub fn parse(line: &'a str) -> Option<Self> {
        let words: Vec<_> = line.split_whitespace().collect();
        let kind = words
            .iter()
            .position(|word| matches!(*word, "FLOCK" | "POSIX" | "OFDLCK" | "LEASE"))?;
        if words[..kind].contains(&"->") {
            return None;
        }
        let (start, end) = (words.get(kind + 5)?, words.get(kind + 6)?);
        let is_whole = (*start, *end) == ("0", "EOF");
        Some(Self {
            is_flock: words[kind] == "FLOCK" || words[kind] == "POSIX" && is_whole,
            pid: words.get(kind + 3)?.parse().ok().filter(|pid| *pid > 0),
            file: words.get(kind + 4)?,
            start: start.parse().ok()?,
        })
    }

    /// Yields the locks in a text of such lines.
    pub fn all(text: &'a str) -> impl Iterator<Item = Self> {
        text.lines().filter_map(Self::parse)
    }
}

/// Returns all locks of the host that this process may see, one per line, without the leading numbers.
///
/// The kernel returns the table page by page and finds its position by counting. A lock released between two
/// pages therefore hides another lock from that reading. The table is read until a reading adds no lock, at
/// most [`READINGS_MAX`] times. A lock released meanwhile may still be listed.
///
/// # Errors
/// If there is no `/proc`.
pub fn of_host() -> io::Result<String> {
    union_of(|| fs::read_to_string("/proc/locks"))
}

/// The union of the tables that `read` returns, until one adds nothing. Locks of open files are alike where
/// two have the same range of one file: each reading has as many lines.
fn union_of(mut read: impl FnMut() -> io::Result<String>) -> io::Result<String> {
    let mut locks: BTreeMap<String, usize> = BTreeMap::new();
    for reading in 0..READINGS_MAX {
        let table = read()?;
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        // The number is a position, which changes with every release.
        let unnumbered = table.lines().filter_map(|line| line.split_once(": "));
        unnumbered.for_each(|(_, lock)| *counts.entry(lock).or_default() += 1);
        let mut has_added = false;
        for (lock, count) in counts {
            let most = locks.entry(lock.to_owned()).or_default();
            has_added |= count > *most;
            *most = count.max(*most);
        }
        if reading > 0 && !has_added {
            break;
        }
    }
    let lines = locks
        .iter()
        .flat_map(|(lock, count)| std::iter::repeat_n(lock.as_str(), *count));
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// Returns the locks of an open file of this process, among other lines. They name the file as the host's
/// table does. `stat` may name it differently, as on btrfs and overlayfs.
///
/// # Errors
/// If there is no `/proc`.
pub fn of_open_file(file: impl AsFd) -> io::Result<String> {
    fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Option<(bool, Option<u32>, &str, u64)> {
        LockEntry::parse(line).map(|lock| (lock.is_flock, lock.pid, lock.file, lock.start))
    }

    #[test]
    fn lines_of_the_kernels_lock_table_are_parsed() {
        let line = "6: FLOCK  ADVISORY  READ 27614 fe:00:9978029 0 EOF";
        assert_eq!(parsed(line), Some((true, Some(27614), "fe:00:9978029", 0)));
        assert_eq!(
            parsed(&format!("lock:\t{line}")),
            Some((true, Some(27614), "fe:00:9978029", 0))
        );
        let line = "7: POSIX  ADVISORY  WRITE 12 00:2f:7 128 128";
        assert_eq!(parsed(line), Some((false, Some(12), "00:2f:7", 128)));
        // `flock` on 9p.
        let line = "1: POSIX  ADVISORY  READ 107 00:17:20070521 0 EOF";
        assert_eq!(parsed(line), Some((true, Some(107), "00:17:20070521", 0)));
        let line = "8: OFDLCK ADVISORY  READ -1 fe:00:9 4611686018427387904 4611686018427387904";
        assert_eq!(parsed(line), Some((false, None, "fe:00:9", 1 << 62)));
        // A process of another PID namespace.
        let line = "3: FLOCK  ADVISORY  READ 0 00:1a:55 0 EOF";
        assert_eq!(parsed(line), Some((true, None, "00:1a:55", 0)));
        // A process that waits, and lines that are no lock.
        assert_eq!(parsed("6: -> FLOCK  ADVISORY  WRITE 30 fe:00:9 0 EOF"), None);
        assert_eq!(parsed("ino:\t9978029"), None);
        assert_eq!(parsed("9: FLOCK"), None);
    }

    #[test]
    fn lock_that_one_reading_misses_is_found_by_another() {
        let (first, second) = (
            "FLOCK  ADVISORY  READ 7 00:1a:55 0 EOF",
            "FLOCK  ADVISORY  READ 8 00:1a:56 0 EOF",
        );
        let mut readings = 0;
        let table = union_of(|| {
            readings += 1;
            Ok(match readings {
                1 => format!("1: {first}\n"),
                // The number of a lock changes when another is released.
                _ => format!("1: {second}\n2: {first}\n"),
            })
        });
        assert_eq!(table.unwrap(), format!("{first}\n{second}"));
        assert_eq!(readings, 3);
        let mut endless = 0;
        union_of(|| {
            endless += 1;
            Ok(format!("1: FLOCK  ADVISORY  READ {endless} 00:1a:55 0 EOF\n"))
        })
        .unwrap();
        assert_eq!(endless, READINGS_MAX);
    }

    #[test]
    fn locks_that_are_alike_are_listed_as_often_as_they_are_held() {
        let lock = "OFDLCK ADVISORY  READ -1 fe:00:9 7 7";
        let mut readings = 0;
        let table = union_of(|| {
            readings += 1;
            Ok(match readings {
                1 => format!("1: {lock}\n"),
                _ => format!("1: {lock}\n2: {lock}\n"),
            })
        });
        assert_eq!(table.unwrap(), format!("{lock}\n{lock}"));
    }

    #[test]
    fn a_lock_of_this_process_is_in_both_texts_under_one_name() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let lock = nix::fcntl::Flock::lock(named.reopen().unwrap(), nix::fcntl::FlockArg::LockShared);
        let lock = lock.map_err(|(_, error)| error).unwrap();
        let about = of_open_file(&*lock).unwrap();
        let own = LockEntry::all(&about).next().unwrap();
        let table = of_host().unwrap();
        assert!(own.is_flock && own.pid == Some(std::process::id()));
        assert!(LockEntry::all(&table).any(|lock| lock == own), "{table}");
    }
}
