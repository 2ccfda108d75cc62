//! Locks on disk files between processes, and the names of their holders.
//!
//! The lock is `flock` on the file itself. It belongs to the open file, so it lasts until the monitor and the
//! shard with a copy have both closed it, and a crash releases it. The holder's name is that of an abstract
//! unix socket, bound while the [`Lock`] lives. It disappears with the process too, so no record outlives its
//! holder and no file is left over.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::DiskError;

/// Sharing mode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// Shared with other readers.
    Shared,
    /// The lock excludes all other locks.
    Exclusive,
}

/// Announcement of a held lock. The lock itself lasts as long as the open file and its copies.
#[derive(Debug)]
pub(crate) struct Lock {
    _announcement: Announcement,
}

/// Announcement of a VM as the holder of a file, while this lives (see [`holders`]). It is empty where the
/// host refuses the socket; then only the error of other processes has less detail.
#[derive(Debug)]
pub struct Announcement {
    _socket: Option<UnixDatagram>,
}

/// A VM that holds a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Name of the VM; its first bytes when long, empty when unknown.
    pub vm: String,
    /// The monitor's process.
    pub pid: u32,
}

const PREFIX: &str = "mb-disk/";
/// Bytes of an abstract socket's name.
const NAME_BYTES_MAX: usize = 107;

/// Time limit for a lock whose holder is not announced, or is this process. The kernel releases the files of
/// a ring shortly after its process has ended, and a holder announces itself shortly after it has locked. For
/// this process see below.
const UNCLAIMED_MAX: Duration = Duration::from_millis(2000);
/// Time limit for any lock. A process that is starting has copies of its parent's files, with lock and
/// announcement, until it executes its own program.
const CLAIMED_MAX: Duration = Duration::from_millis(500);
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

impl Lock {
    /// The lock that an open file has, which another process took. It is announced again: that process has
    /// ended, or will soon.
    pub(crate) fn received(file: &File, vm: &str) -> Self {
        Self {
            _announcement: announce_again(file, vm),
        }
    }
}

/// Acquires the lock, or returns an error that names the holder.
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
                _announcement: announce_again(file, vm),
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

/// Returns the VMs that use the file at `path`, as far as they are visible.
pub fn holders(path: &Path) -> io::Result<Vec<Holder>> {
    Ok(announced(&key(&std::fs::metadata(path)?)))
}

/// Announces this process as the monitor of the VM that holds an open file, whose lock the file already has.
/// A monitor that adopts a VM has the files of a dead one, whose announcement is gone.
pub fn announce_again(file: impl AsFd, vm: &str) -> Announcement {
    Announcement {
        _socket: announce(file.as_fd(), vm),
    }
}

/// Whether a process belongs to this user or root.
fn is_trusted(pid: u32) -> bool {
    let owner = std::fs::metadata(format!("/proc/{pid}")).map(|process| process.uid());
    owner.is_ok_and(|owner| owner == 0 || owner == nix::unistd::geteuid().as_raw())
}

fn key(metadata: &std::fs::Metadata) -> String {
    key_of(metadata.dev(), metadata.ino())
}

fn key_of(device: u64, inode: u64) -> String {
    format!("{PREFIX}{device:x}:{inode:x}/")
}

/// Binds the socket that names the holder. Without it (no free sockets, another network namespace) only the
/// error of other processes has less detail.
fn announce(file: BorrowedFd<'_>, vm: &str) -> Option<UnixDatagram> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let stat = nix::sys::stat::fstat(file).ok()?;
    let key = key_of(stat.st_dev, stat.st_ino);
    let mut name = format!("{key}{}/{serial:x}/{vm}", std::process::id());
    while name.len() > NAME_BYTES_MAX {
        name.pop();
    }
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).ok()?).ok()
}

fn announced(key: &str) -> Vec<Holder> {
    let table = std::fs::read("/proc/net/unix").unwrap_or_default();
    let mut holders = listed(&String::from_utf8_lossy(&table), key);
    // Any user can bind a socket of any name.
    holders.retain(|holder| is_trusted(holder.pid));
    holders
}

/// Returns the holders that a table of unix sockets names for the file with this key.
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
    let (how, help) = match wanted {
        Share::Shared => (" exclusively", "stop that VM, or use a copy"),
        Share::Exclusive => ("", "stop that VM, or use the disk privately in both"),
    };
    DiskError::InUse {
        path: path.to_owned(),
        how,
        holder,
        help,
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
    // Not one of ours, or one in another network namespace: the kernel's table still names the process.
    let unnamed = |pid| Holder {
        vm: String::new(),
        pid,
    };
    hostfiles::lock::holders(file).into_iter().map(unnamed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_names_a_holder_only_if_the_process_is_this_users_or_roots() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let key = key(&named.as_file().metadata().unwrap());
        let bind = |pid: u32| {
            let name = format!("{key}{pid}/0/innocent");
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
        };
        // As another user's: no process has this number.
        let _false = bind(u32::MAX);
        assert_eq!(holders(named.path()).unwrap(), []);
        let _true = bind(std::process::id());
        assert_eq!(holders(named.path()).unwrap().len(), 1);
    }
}
