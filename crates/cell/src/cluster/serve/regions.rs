//! The files of shared regions.
//!
//! Each member has a descriptor of its own, which has a shared lock of the file (`flock`). A mapping keeps it
//! as well. So an exclusive lock is granted only when no process has or maps a file, whatever a shard does
//! with its copy: the kernel counts. A file has a fixed length: a member that could shorten it would end the
//! others.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use config::cluster::RegionAccess;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::region::Found;
use registry::cluster::interface::{LentMemory, RegionGrant};
use registry::control::{Answer, Request, ask};
use registry::vms::Registry;

use super::region_pages::{Nodes, Piece, has_nodes};
use crate::control::take_region;

/// Seals of a region's file: no process changes its length, or adds a seal.
const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK
    .union(SealFlag::F_SEAL_GROW)
    .union(SealFlag::F_SEAL_SEAL);
/// Time limit for a member to send a region's file.
const MEMBER_LIMIT: Duration = Duration::from_secs(2);

/// Time limit for a member to record the cells of a region's memory. Ours: a cell's next process serves its
/// VMs by then.
const RECORD_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for all members of a region.
const RECORDS_LIMIT: Duration = Duration::from_secs(20);

/// The files of this cell's regions.
#[derive(Debug, Default)]
pub(super) struct RegionFiles(BTreeMap<String, File>);

impl RegionFiles {
    /// Creates the file of a region, whose memory is to come from these nodes of the host.
    ///
    /// # Errors
    /// If the host has no descriptors left, or does not let this process use the nodes.
    pub(super) fn create(&mut self, name: &str, bytes: u64, nodes: &[u32]) -> io::Result<()> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"shared-region", flags)?);
        file.set_len(bytes)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
        bind(&file, bytes, nodes)?;
        self.0.insert(name.to_owned(), file);
        Ok(())
    }

    /// Keeps the file of a region, which [`search`] has found.
    pub(super) fn keep(&mut self, name: &str, file: File) {
        self.0.insert(name.to_owned(), file);
    }

    /// A descriptor for a member, with its lock.
    ///
    /// # Errors
    /// If there is no such file, or the host has no descriptors left.
    pub(super) fn descriptor(&self, name: &str, access: RegionAccess) -> io::Result<File> {
        let file = open_again(self.0.get(name).ok_or(io::ErrorKind::NotFound)?, access)?;
        file.try_lock_shared().map_err(io::Error::from)?;
        Ok(file)
    }

    /// Whether another process has the file of a region, or maps it.
    ///
    /// # Errors
    /// If there is no such file, or the host has no descriptors left.
    pub(super) fn is_used(&self, name: &str) -> io::Result<bool> {
        let file = self.0.get(name).ok_or(io::ErrorKind::NotFound)?;
        match open_again(file, RegionAccess::Write)?.try_lock() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// A descriptor with which a thread moves the pages of a region. It has no lock.
    ///
    /// # Errors
    /// As [`Self::descriptor`].
    pub(super) fn to_move(&self, name: &str) -> io::Result<File> {
        let file = self.0.get(name).ok_or(io::ErrorKind::NotFound)?;
        open_again(file, RegionAccess::Write)
    }

    /// Whether this process has the file of a region.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn close(&mut self, name: &str) {
        self.0.remove(name);
    }
}

/// Opens the file again, so that the descriptor has a lock of its own.
fn open_again(file: &File, access: RegionAccess) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(access == RegionAccess::Write)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Seeks the file of a region of `bytes` at the VMs that run. `without` are VMs that don't have it.
pub(super) fn search(region: &str, bytes: u64, without: &[String]) -> (Found, Option<File>) {
    let Ok(records) = Registry::open().and_then(|registry| Ok((registry.list()?, registry))) else {
        return (Found::Unknown, None);
    };
    let (records, registry) = records;
    let mut found = Found::Nowhere;
    for record in records {
        let has = record.regions.iter().any(|grant| grant.name == region);
        if !has || without.contains(&record.name) {
            continue;
        }
        found = Found::Unknown;
        let file = registry
            .folder_of(&record.name)
            .and_then(|folder| take_region(&folder, region, MEMBER_LIMIT));
        let file = file.ok().filter(|file| is_region(file, bytes));
        // The member's descriptor has the member's lock.
        if let Some(file) = file.and_then(|file| open_again(&file, RegionAccess::Write).ok()) {
            return (Found::File, Some(file));
        }
    }
    (found, None)
}

/// Whether a file is a region's of this length.
fn is_region(file: &File, bytes: u64) -> bool {
    let seals = fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_truncate);
    let has_length = file.metadata().is_ok_and(|about| about.len() == bytes);
    has_length && seals.is_ok_and(|seals| seals.contains(SEALS))
}

/// Has the VMs that run with a grant of a region record the cells of its memory. Returns those that have not
/// recorded it, each with the reason.
pub(super) fn record_lenders(home: u16, region: &str, borrowed: &[LentMemory]) -> Vec<(String, String)> {
    let listed = Registry::open().and_then(|registry| Ok((registry.list()?, registry)));
    let (records, registry) = match listed {
        Ok(listed) => listed,
        Err(error) => return vec![("of this host".to_owned(), error.to_string())],
    };
    let request = Request::RegionLenders {
        name: region.to_owned(),
        borrowed: borrowed.to_vec(),
    };
    let deadline = Instant::now() + RECORDS_LIMIT;
    let record = |vm: &str| {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = left.min(RECORD_LIMIT).max(Duration::from_millis(1));
        let folder = registry.folder_of(vm)?;
        match ask(&folder, &request, Some(limit))? {
            // A VM that has ended depends on nothing.
            Answer::Done | Answer::Ended { .. } => Ok(()),
            Answer::Refused { why } => Err(io::Error::other(why)),
            other => Err(io::Error::other(format!(
                "an answer to another question: {other:?}"
            ))),
        }
    };
    let is_grant = |grant: &RegionGrant| grant.name == region && grant.home == home;
    let members = records.iter().filter(|vm| vm.regions.iter().any(is_grant));
    members
        .filter_map(|vm| match record(&vm.name) {
            Ok(()) => None,
            Err(error) => Some((vm.name.clone(), error.to_string())),
        })
        .collect()
}

/// Whether a VM that runs has a grant of a region of this cell; true if that can't be found out now.
pub(super) fn is_recorded(cell: u16, region: &str) -> bool {
    let records = Registry::open().and_then(|registry| registry.list());
    records.is_ok_and(|records| {
        let mut grants = records.iter().flat_map(|record| &record.regions);
        grants.any(|grant| grant.name == region && grant.home == cell)
    })
}

/// Binds the memory of a file to nodes of the host. On a host with one node there is nothing to bind.
fn bind(file: &File, bytes: u64, nodes: &[u32]) -> io::Result<()> {
    match has_nodes() {
        true => Piece::map(file, 0, bytes)?.bind(&Nodes::new(nodes), 0),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
