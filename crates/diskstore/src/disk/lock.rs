//! Who uses a disk's file: locks between processes, and the names of the holders.
//!
//! The lock is `flock` on the file itself: it belongs to the open file, so it lasts until the monitor and the shard
//! that got a copy have both closed it, and a crash releases it. The holder's name is that of an abstract unix socket
//! bound for as long as the [`Lock`] lives: it vanishes with the process too, so no record outlives its holder and
//! no file is left over.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::DiskError;

/// How a file is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// With others who only read.
    Shared,
    /// With nobody.
    Exclusive,
}

/// The announcement of a held lock. The lock itself lives as long as the open file and its copies.
#[derive(Debug)]
pub(crate) struct Lock {
    _announcement: Option<UnixDatagram>,
}

/// A VM that holds a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The VM; its first bytes when long, empty when unknown.
    pub vm: String,
    /// The monitor's process.
    pub pid: u32,
}

const PREFIX: &str = "mb-disk/";
/// Bytes of an abstract socket's name.
const NAME_BYTES_MAX: usize = 107;

/// How long a lock may be held by nobody who says so, or by this process. The kernel takes a moment to let go of the
/// files of a ring after its process has ended, and a holder takes one to announce itself. For this process see below.
const UNCLAIMED_MAX: Duration = Duration::from_millis(2000);
/// How long a lock is waited for at all. A process that is being started has copies of its parent's files, lock and
/// announcement among them, until it executes its own program.
const CLAIMED_MAX: Duration = Duration::from_millis(500);
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Takes the lock or says who holds it.
pub(crate) fn take(path: &Path, file: &File, share: Share, vm: &str) -> Result<Lock, DiskError> {
    let operation = match share {
        Share::Shared => libc::LOCK_SH,
        Share::Exclusive => libc::LOCK_EX,
    };
    let start = Instant::now();
    loop {
        // SAFETY: flock touches no memory.
        if unsafe { libc::flock(file.as_raw_fd(), operation | libc::LOCK_NB) } == 0 {
            return Ok(Lock {
                _announcement: announce(file, vm),
            });
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock
                if start.elapsed() < CLAIMED_MAX || start.elapsed() < UNCLAIMED_MAX && unclaimed(file) =>
            {
                std::thread::sleep(RETRY_INTERVAL);
            }
            io::ErrorKind::WouldBlock => return Err(in_use(path, file, share)),
            _ => return Err(DiskError::io(path, "locking it")(error)),
        }
    }
}

/// The VMs that use the file at `path`, as far as they can be seen.
pub fn holders(path: &Path) -> io::Result<Vec<Holder>> {
    Ok(announced(&key(&std::fs::metadata(path)?)))
}

/// Notes that a VM uses a file, for [`Users`], and keeps no other VM from it. Lasts until the file and every copy of it are closed.
pub fn note_use(file: &File) {
    // Without the lock the file has a user less, no more.
    // SAFETY: flock touches no memory.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) };
}

/// Counts the users of files that this process has locked: by the kernel's table of locks, into which no user can write names.
#[derive(Debug)]
pub struct Users {
    /// How the table names each file; none of one that is not locked.
    keys: Vec<Option<String>>,
}

impl Users {
    /// Of these files, in this order.
    pub fn of<'a>(files: impl IntoIterator<Item = BorrowedFd<'a>>) -> Self {
        let key = |file: BorrowedFd<'_>| {
            let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()));
            // What `stat` says of a file is not always what the table has: not on btrfs, nor on overlayfs.
            let about = about.ok()?;
            let lock = about.lines().find_map(Held::parse)?;
            Some(lock.file.to_owned())
        };
        Self {
            keys: files.into_iter().map(key).collect(),
        }
    }

    /// How often each file is used now by processes of this user, or of root: others may lock a file that they can read, too.
    pub fn count(&self) -> io::Result<Vec<u32>> {
        let table = std::fs::read_to_string(LOCKS)?;
        let mut trusted = HashMap::new();
        let mut counts: HashMap<&str, u32> = HashMap::new();
        for lock in table.lines().filter_map(Held::parse) {
            let Some(pid) = lock.pid.filter(|_| lock.is_flock) else {
                continue;
            };
            if *trusted.entry(pid).or_insert_with(|| is_trusted(pid)) {
                *counts.entry(lock.file).or_default() += 1;
            }
        }
        let count = |key: &Option<String>| counts.get(key.as_deref()?).copied();
        Ok(self
            .keys
            .iter()
            .map(|key| count(key).unwrap_or_default())
            .collect())
    }
}

/// The kernel's table of locks.
pub(crate) const LOCKS: &str = "/proc/locks";

/// A lock in the kernel's table, or in what it says of an open file.
pub struct Held<'a> {
    /// Taken by `flock`. File systems that keep locks on a server, as 9p and NFS, turn such a lock into a POSIX lock of the
    /// whole file.
    pub is_flock: bool,
    /// The process that holds it; none for the lock of an open file description.
    pub pid: Option<u32>,
    /// Device and number of the file.
    pub file: &'a str,
    /// The first byte that is locked.
    pub start: u64,
}

impl<'a> Held<'a> {
    /// Reads a line; none of a process that waits for a lock.
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
            pid: words.get(kind + 3)?.parse().ok(),
            file: words.get(kind + 4)?,
            start: start.parse().ok()?,
        })
    }
}

/// Whether a process is this user's or root's.
fn is_trusted(pid: u32) -> bool {
    let owner = std::fs::metadata(format!("/proc/{pid}")).map(|process| process.uid());
    owner.is_ok_and(|owner| owner == 0 || owner == nix::unistd::geteuid().as_raw())
}

fn key(metadata: &std::fs::Metadata) -> String {
    format!("{PREFIX}{:x}:{:x}/", metadata.dev(), metadata.ino())
}

/// Binds the socket that names the holder. Without it (no more sockets, another network namespace) only the message
/// to others is poorer.
fn announce(file: &File, vm: &str) -> Option<UnixDatagram> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let mut name = format!(
        "{}{}/{serial:x}/{vm}",
        key(&file.metadata().ok()?),
        std::process::id()
    );
    while name.len() > NAME_BYTES_MAX {
        name.pop();
    }
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).ok()?).ok()
}

fn announced(key: &str) -> Vec<Holder> {
    let table = std::fs::read("/proc/net/unix").unwrap_or_default();
    let mut holders = listed(&String::from_utf8_lossy(&table), key);
    // Any user may bind a socket of any name.
    holders.retain(|holder| is_trusted(holder.pid));
    holders
}

/// The holders that a table of unix sockets names for the file with this key.
pub fn listed(table: &str, key: &str) -> Vec<Holder> {
    let mut holders: Vec<Holder> = Vec::new();
    for line in table.lines() {
        let Some(rest) = line.split_once('@').and_then(|(_, name)| name.strip_prefix(key)) else {
            continue;
        };
        let mut parts = rest.splitn(3, '/');
        let (Some(pid), Some(_), Some(vm)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let Ok(pid) = pid.parse() else { continue };
        let holder = Holder {
            vm: vm.to_owned(),
            pid,
        };
        if !holders.contains(&holder) {
            holders.push(holder);
        }
    }
    holders
}

fn unclaimed(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| {
        let holders = announced(&key(&metadata));
        holders.iter().all(|holder| holder.pid == std::process::id())
    })
}

fn in_use(path: &Path, file: &File, wanted: Share) -> DiskError {
    let holder = match holders_of(file) {
        holders if holders.is_empty() => "another program".to_owned(),
        holders => holders
            .iter()
            .map(|holder| match holder.vm.as_str() {
                "" => format!("process {}", holder.pid),
                vm => format!("VM {vm} (process {})", holder.pid),
            })
            .collect::<Vec<_>>()
            .join(", "),
    };
    let (how, mend) = match wanted {
        Share::Shared => (" exclusively", "stop that VM, or use a copy"),
        Share::Exclusive => ("", "stop that VM, or use the disk privately in both"),
    };
    DiskError::InUse {
        path: path.to_owned(),
        how,
        holder,
        mend,
    }
}

fn holders_of(file: &File) -> Vec<Holder> {
    let Ok(metadata) = file.metadata() else {
        return Vec::new();
    };
    let announced = announced(&key(&metadata));
    if !announced.is_empty() {
        return announced;
    }
    // Not one of ours, or one in another network namespace: the kernel's table still knows the process.
    let unnamed = |pid| Holder {
        vm: String::new(),
        pid,
    };
    hostfiles::lock::holders(file).into_iter().map(unnamed).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn parsed(line: &str) -> Option<(bool, Option<u32>, &str, u64)> {
        Held::parse(line).map(|lock| (lock.is_flock, lock.pid, lock.file, lock.start))
    }

    #[test]
    fn the_kernels_lines_of_locks_are_understood() {
        let line = "6: FLOCK  ADVISORY  READ 27614 fe:00:9978029 0 EOF";
        assert_eq!(parsed(line), Some((true, Some(27614), "fe:00:9978029", 0)));
        assert_eq!(
            parsed(&format!("lock:\t{line}")),
            Some((true, Some(27614), "fe:00:9978029", 0))
        );
        let line = "7: POSIX  ADVISORY  WRITE 12 00:2f:7 128 128";
        assert_eq!(parsed(line), Some((false, Some(12), "00:2f:7", 128)));
        // What 9p makes of `flock`.
        let line = "1: POSIX  ADVISORY  READ 107 00:17:20070521 0 EOF";
        assert_eq!(parsed(line), Some((true, Some(107), "00:17:20070521", 0)));
        let line = "8: OFDLCK ADVISORY  READ -1 fe:00:9 4611686018427387904 4611686018427387904";
        assert_eq!(parsed(line), Some((false, None, "fe:00:9", 1 << 62)));
        // A process that waits, and what is no lock.
        assert_eq!(parsed("6: -> FLOCK  ADVISORY  WRITE 30 fe:00:9 0 EOF"), None);
        assert_eq!(parsed("ino:\t9978029"), None);
        assert_eq!(parsed("9: FLOCK"), None);
    }

    #[test]
    fn each_locked_copy_of_a_file_is_a_user_until_it_is_closed() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(named.path()).unwrap();
        let (own, unlocked) = (open(), open());
        note_use(&own);
        let users = Users::of([own.as_fd(), unlocked.as_fd()]);
        assert_eq!(users.count().unwrap(), [1, 0]);
        let other = open();
        note_use(&other);
        let copy = other.try_clone().unwrap();
        drop(other);
        assert_eq!(users.count().unwrap(), [2, 0]);
        drop(copy);
        assert_eq!(users.count().unwrap(), [1, 0]);
    }

    #[test]
    fn an_announcement_names_a_holder_only_if_the_process_is_this_users_or_roots() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let key = key(&named.as_file().metadata().unwrap());
        let bind = |pid: u32| {
            let name = format!("{key}{pid}/0/innocent");
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
        };
        // As of another user: no process has this number.
        let _false = bind(u32::MAX);
        assert_eq!(holders(named.path()).unwrap(), []);
        let _true = bind(std::process::id());
        assert_eq!(holders(named.path()).unwrap().len(), 1);
    }
}
