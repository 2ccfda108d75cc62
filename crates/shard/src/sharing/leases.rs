//! Files of shared folders whose pages guest memory may map. Each has a lease of the kernel.
//!
//! A read lease (`F_SETLEASE`, fcntl(2)) exists only while no process has the file open for writing. An open
//! for writing, or a truncation, waits until the lease is gone, for `lease-break-time` (45 s) at most. So the
//! pages of a leased file do not change. The folder's process takes the lease on an open file, and passes
//! that. The lease lasts as long as the open file, which each mapping keeps: it ends when the last page is
//! unmapped and the descriptor closed. This process reads the lease's state, and never waits for another.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::extents::ImageId;
use super::pages::PAGE_BYTES;

/// Number of the first leased file among images. There are fewer images and layers of frozen memory.
pub(super) const LEASED_FIRST: ImageId = 1 << 15;
/// Greatest number of leased files of one VM.
pub(super) const FILES_MAX: usize = 512;
/// Shortest time that a writer waits for a lease, seconds, with which files are leased.
const BREAK_TIME_MIN_S: u64 = 10;
/// Rounds after which a file without a page in guest memory is given back.
const IDLE_ROUNDS_MAX: u8 = 10;
/// File systems on which every writer goes by this host's kernel, and whose pages come from no other
/// process.
const FILE_SYSTEMS: [i64; 5] = [
    libc::EXT4_SUPER_MAGIC,
    libc::XFS_SUPER_MAGIC,
    libc::BTRFS_SUPER_MAGIC,
    libc::F2FS_SUPER_MAGIC,
    libc::TMPFS_MAGIC,
];

/// The leased files of a VM.
#[derive(Default)]
pub(super) struct Leases {
    files: BTreeMap<ImageId, LeasedFile>,
    last: ImageId,
}

struct LeasedFile {
    file: Arc<File>,
    /// Device and inode.
    name: (u64, u64),
    idle_rounds: u8,
}

impl Leases {
    /// Adds a file, if it is one whose pages do not change, and returns its number.
    pub fn add(&mut self, file: File) -> Option<ImageId> {
        let metadata = file.metadata().ok()?;
        let is_whole = metadata.is_file() && metadata.len() >= PAGE_BYTES;
        if !is_whole || !is_local(&file) || !is_leased(&file) {
            return None;
        }
        let name = (metadata.dev(), metadata.ino());
        let known = self.files.iter().find(|(_, known)| known.name == name);
        if let Some((id, known)) = known
            && is_leased(&known.file)
        {
            return Some(*id);
        }
        if self.files.len() >= FILES_MAX {
            return None;
        }
        let id = self.free_id()?;
        let file = LeasedFile {
            file: Arc::new(file),
            name,
            idle_rounds: 0,
        };
        self.files.insert(id, file);
        Some(id)
    }

    /// Returns a number that was not used for the longest time.
    fn free_id(&mut self) -> Option<ImageId> {
        let numbers = LEASED_FIRST..super::NOTHING;
        let after = self.last.saturating_add(1).clamp(numbers.start, numbers.end);
        let mut candidates = (after..numbers.end).chain(numbers.start..after);
        self.last = candidates.find(|id| !self.files.contains_key(id))?;
        Some(self.last)
    }

    /// Returns a file.
    pub fn file(&self, id: ImageId) -> Option<Arc<File>> {
        self.files.get(&id).map(|leased| leased.file.clone())
    }

    /// Removes a file. Its lease ends when its last page is unmapped.
    pub fn remove(&mut self, id: ImageId) {
        self.files.remove(&id);
    }

    /// Returns the files for which a writer waits.
    pub fn wanted(&self) -> Vec<ImageId> {
        let wanted = self.files.iter().filter(|(_, leased)| !is_leased(&leased.file));
        wanted.map(|(id, _)| *id).collect()
    }

    /// Removes the files of which no page was mapped or copied for some rounds.
    pub fn end_round(&mut self, used: &BTreeSet<ImageId>) {
        self.files.retain(|id, leased| {
            leased.idle_rounds = match used.contains(id) {
                true => 0,
                false => leased.idle_rounds.saturating_add(1),
            };
            leased.idle_rounds <= IDLE_ROUNDS_MAX
        });
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }
}

/// Returns whether leases of this host last long enough to give them back. Called before the sandbox closes.
pub(super) fn are_usable() -> bool {
    let setting = |name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/sys/fs/{name}")).ok()?;
        text.trim().parse().ok()
    };
    setting("leases-enable") == Some(1)
        && setting("lease-break-time").is_some_and(|limit| limit >= BREAK_TIME_MIN_S)
}

/// Returns whether the file is on a file system of this host. Another's pages may change without an open on
/// this host, and may come from a process that does not reply.
fn is_local(file: &File) -> bool {
    nix::sys::statfs::fstatfs(file).is_ok_and(|found| FILE_SYSTEMS.contains(&found.filesystem_type().0))
}

/// Returns whether the open file has a read lease for which no writer waits.
fn is_leased(file: &File) -> bool {
    // SAFETY: the call takes no pointers.
    let lease = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) };
    lease == libc::F_RDLCK as libc::c_int
}
