//! Claims on files whose pages VMs map: all VMs that map pages of one file belong to one share group.
//!
//! VMs that map a page of a file share that memory: one guest can flush a cache line of it and measure
//! whether another guest has used it since. So a VM maps a file only while it holds a claim on it, and a
//! claim is granted only while no VM of another group holds one. A VM without a claim reads copies.
//!
//! A claim is a read lock of an open file description (`fcntl(2)`) on one byte far behind the file's end; the
//! byte is a hash of the group's name. So claims work across users, need no write permission, and end with
//! the process that holds them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use hostfiles::lock::table::{self, LockEntry};
use sha2::{Digest, Sha256};

/// First byte that represents a group.
const FIRST: u64 = 1 << 62;
/// Number of bytes that represent groups.
const GROUPS: u64 = 1 << 60;
/// Attempts until a claim counts as refused. Two VMs that claim a file simultaneously see each other, and
/// both withdraw. A process that is starting has copies of its parent's locks until it executes its own
/// program.
const TRIES: u32 = 5;
/// Maximum pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// A claim on a file, held until it is dropped.
#[derive(Debug)]
pub struct Claim {
    file: File,
    /// Byte of its group.
    byte: u64,
}

impl Claim {
    /// Claims an open file for a share group. Returns none if a VM of another group maps the file.
    ///
    /// # Errors
    /// If the file can't be opened again, or its file system has no locks.
    pub fn take(file: impl AsFd, group: &str) -> io::Result<Option<Self>> {
        // A separate file description: the shard must not get the lock with a copy of the descriptor.
        let own = File::open(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))?;
        let byte = FIRST + byte_of(group);
        for attempt in 0..TRIES {
            set(&own, libc::F_RDLCK, byte)?;
            if !is_claimed(&own, FIRST..byte)? && !is_claimed(&own, byte + 1..FIRST + GROUPS)? {
                return Ok(Some(Self { file: own, byte }));
            }
            set(&own, libc::F_UNLCK, byte)?;
            if attempt + 1 < TRIES {
                std::thread::sleep(pause(attempt));
            }
        }
        Ok(None)
    }

    /// Takes over a predecessor's claim from the values that [`Claim::left`] returned there.
    pub fn adopt(file: File, byte: u64) -> Self {
        Self { file, byte }
    }

    /// Returns the open file that holds the claim and its byte, for a successor of this process.
    pub fn left(&self) -> (BorrowedFd<'_>, u64) {
        (self.file.as_fd(), self.byte)
    }

    /// Device and inode of the file, as in `stat`.
    ///
    /// # Errors
    /// If the file system does not report them.
    pub fn file_id(&self) -> io::Result<(u64, u64)> {
        self.file.metadata().map(|about| (about.dev(), about.ino()))
    }

    /// Whether another claim of the same group on the file is held. Takes microseconds; reading the kernel's
    /// lock table takes ten milliseconds, during which no process on the host can lock a file.
    ///
    /// # Errors
    /// If the kernel does not report locks.
    pub fn is_shared(&self) -> io::Result<bool> {
        is_claimed(&self.file, self.byte..self.byte + 1)
    }
}

/// Byte that represents the group.
fn byte_of(group: &str) -> u64 {
    let digest = Sha256::digest(group.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(first) % GROUPS
}

/// Pause of a different length in each process, so that two withdrawing processes do not collide again.
fn pause(attempt: u32) -> Duration {
    let spread = std::process::id()
        .wrapping_mul(2_654_435_761)
        .wrapping_add(attempt)
        % 16;
    PAUSE_MAX * (1 + spread) / 16
}

fn range(kind: i32, start: u64, bytes: u64) -> io::Result<libc::flock> {
    let offset = |number: u64| libc::off_t::try_from(number).map_err(io::Error::other);
    // SAFETY: plain old data, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).map_err(io::Error::other)?;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    (lock.l_start, lock.l_len) = (offset(start)?, offset(bytes)?);
    Ok(lock)
}

fn control(file: &File, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    loop {
        // SAFETY: the kernel reads and writes the structure, which lives until the call returns.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut *lock) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn set(file: &File, kind: i32, byte: u64) -> io::Result<()> {
    control(file, libc::F_OFD_SETLK, &mut range(kind, byte, 1)?)
}

/// Whether another open file has a lock on one of these bytes.
fn is_claimed(file: &File, bytes: std::ops::Range<u64>) -> io::Result<bool> {
    if bytes.is_empty() {
        return Ok(false);
    }
    // A write lock conflicts with every lock; it is only tested.
    let mut lock = range(libc::F_WRLCK, bytes.start, bytes.end - bytes.start)?;
    control(file, libc::F_OFD_GETLK, &mut lock)?;
    if i32::from(lock.l_type) == libc::F_UNLCK {
        return Ok(false);
    }
    if u64::try_from(lock.l_start).is_ok_and(|start| bytes.contains(&start)) {
        return Ok(true);
    }
    // A lock of the whole file is no claim, and may hide one: 9p and NFS turn `flock` into such locks.
    Ok(is_listed(&table::of_open_file(file)?, &table::of_host()?, &bytes))
}

/// Whether the kernel's lock table has a lock that begins at one of `bytes`, on the file that `about`
/// describes, other than the lock in `about`.
fn is_listed(about: &str, table: &str, bytes: &std::ops::Range<u64>) -> bool {
    let Some(own) = LockEntry::all(about).next() else {
        return true;
    };
    let locks = LockEntry::all(table);
    let claims = locks.filter(|lock| lock.file == own.file && bytes.contains(&lock.start));
    // The table contains the lock of `about`, too.
    claims.count() > usize::from(bytes.contains(&own.start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn take(path: &std::path::Path, group: &str) -> Option<Claim> {
        Claim::take(File::open(path).unwrap(), group).unwrap()
    }

    #[test]
    fn claim_lasts_until_the_successor_drops_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let claim = take(file.path(), "one").unwrap();
        let (left, byte) = claim.left();
        let successor = Claim::adopt(left.try_clone_to_owned().unwrap().into(), byte);
        drop(claim);
        assert!(take(file.path(), "other").is_none());
        let second = take(file.path(), "one").unwrap();
        assert!(successor.is_shared().unwrap());
        drop((successor, second));
        assert!(take(file.path(), "other").is_some());
    }

    #[test]
    fn a_lock_of_the_whole_file_is_no_claim_and_hides_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let whole = File::options().read(true).open(file.path()).unwrap();
        // As 9p and NFS turn `flock`.
        let mut lock = range(libc::F_RDLCK, 0, 0).unwrap();
        control(&whole, libc::F_OFD_SETLK, &mut lock).unwrap();
        let one = take(file.path(), "run:1").expect("nobody else maps it");
        assert!(!one.is_shared().unwrap());
        let same = take(file.path(), "run:1").expect("the same group");
        assert!(one.is_shared().unwrap() && same.is_shared().unwrap());
        assert!(take(file.path(), "run:2").is_none());
        drop((one, same));
        take(file.path(), "run:2").expect("nobody maps it any more");
    }

    #[test]
    fn a_file_is_claimed_by_vms_of_one_group_at_a_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // Read permission suffices.
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o444)).unwrap();
        let one = take(file.path(), "run:1").expect("nobody else maps it");
        let same = take(file.path(), "run:1").expect("the same group");
        assert!(take(file.path(), "run:2").is_none());
        assert!(take(file.path(), "user:1000").is_none());
        drop(one);
        assert!(
            take(file.path(), "run:2").is_none(),
            "one VM of the first group is left"
        );
        drop(same);
        let other = take(file.path(), "run:2").expect("all VMs of the first group have ended");
        assert!(take(file.path(), "run:1").is_none());
        drop(other);
    }

    #[test]
    fn a_claim_is_shared_while_another_of_its_group_is_held() {
        let (file, other) = (
            tempfile::NamedTempFile::new().unwrap(),
            tempfile::NamedTempFile::new().unwrap(),
        );
        let one = take(file.path(), "run:1").unwrap();
        let _elsewhere = take(other.path(), "run:1").unwrap();
        assert!(!one.is_shared().unwrap());
        let same = take(file.path(), "run:1").unwrap();
        assert_eq!(one.file_id().unwrap(), same.file_id().unwrap());
        assert!(one.is_shared().unwrap() && same.is_shared().unwrap());
        drop(one);
        assert!(!same.is_shared().unwrap());
    }

    #[test]
    fn claims_on_other_files_do_not_count() {
        let (one, other) = (
            tempfile::NamedTempFile::new().unwrap(),
            tempfile::NamedTempFile::new().unwrap(),
        );
        let _one = take(one.path(), "run:1").unwrap();
        assert!(take(other.path(), "run:2").is_some());
    }

    #[test]
    fn a_claim_does_not_go_with_a_copy_of_the_files_descriptor() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = File::open(file.path()).unwrap();
        let claim = Claim::take(&open, "run:1").unwrap().unwrap();
        let copy = open.try_clone().unwrap();
        drop((claim, open));
        assert!(take(file.path(), "run:2").is_some(), "{copy:?} holds no claim");
    }

    #[test]
    fn of_groups_that_claim_at_once_never_two_have_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for _ in 0..20 {
            let granted: Vec<(usize, Claim)> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|number| {
                        let path = file.path();
                        scope.spawn(move || {
                            take(path, &format!("run:{}", number % 2)).map(|claim| (number, claim))
                        })
                    })
                    .collect();
                threads
                    .into_iter()
                    .filter_map(|thread| thread.join().unwrap())
                    .collect()
            });
            let groups: std::collections::BTreeSet<_> =
                granted.iter().map(|(number, _)| number % 2).collect();
            assert!(groups.len() <= 1, "two groups map one file");
        }
    }

    #[test]
    fn groups_have_bytes_of_their_own() {
        let names = [
            "run:1",
            "run:2",
            "user:0",
            "user:1000",
            "group:0:red",
            "group:0:blue",
        ];
        let bytes: std::collections::BTreeSet<u64> = names.iter().map(|name| byte_of(name)).collect();
        assert_eq!(bytes.len(), names.len());
        assert!(bytes.iter().all(|byte| *byte < GROUPS));
        assert!(FIRST + GROUPS < i64::MAX as u64);
    }
}
