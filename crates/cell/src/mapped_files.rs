//! The files whose pages a VM maps, and those of them that another VM may map, too. The monitor finds out, so
//! that a shard has no table of the host's processes.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use diskstore::claim::Claim;
use locks::IgnorePoison;
use shard_api::launch::{MappedFile, Order};

use crate::handle::VmHandle;
use crate::share_group::Claims;

/// Interval between two searches for other VMs: a few system calls each.
const INTERVAL: Duration = Duration::from_secs(5);

/// The files that a VM holds claims on.
#[derive(Debug)]
pub(crate) struct MappedFiles {
    claims: Vec<Arc<Claim>>,
    /// The state that the shard has: which of the files are shared.
    told: Mutex<Vec<bool>>,
}

impl MappedFiles {
    /// The files of `claims`.
    pub(crate) fn of(claims: &Claims) -> Self {
        Self {
            claims: claims.held().to_vec(),
            told: Mutex::default(),
        }
    }

    /// The files as a shard receives them at its start; none if this host does not report them.
    pub(crate) fn at_start(&self) -> Vec<MappedFile> {
        let files = self.find().unwrap_or_default();
        *self.told() = files.iter().map(|file| file.is_shared).collect();
        files
    }

    /// Sends every change to the VM's shard, until `over` is closed.
    pub(crate) fn watch(&self, handle: &VmHandle, over: &Receiver<()>) {
        while over.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
            // Between two boots there is no shard; the next one receives the state at its start.
            if self.tell(|order| handle.order(order).is_ok()).is_err() {
                return;
            }
        }
    }

    /// Sends the changes since the last report to the shard by `order`, which returns true when the shard has
    /// it.
    fn tell(&self, order: impl FnOnce(&Order) -> bool) -> io::Result<()> {
        let files: Vec<bool> = self.find()?.iter().map(|file| file.is_shared).collect();
        let mut told = self.told();
        if *told != files && order(&Order::Shared { files: files.clone() }) {
            *told = files;
        }
        Ok(())
    }

    fn find(&self) -> io::Result<Vec<MappedFile>> {
        let file = |claim: &Arc<Claim>| {
            let (device, inode) = claim.file_id()?;
            let is_shared = claim.is_shared()?;
            Ok(MappedFile {
                device,
                inode,
                is_shared,
            })
        };
        self.claims.iter().map(file).collect()
    }

    fn told(&self) -> MutexGuard<'_, Vec<bool>> {
        self.told.lock().ignore_poison()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;
    use std::time::Instant;

    use registry::share_group::ShareGroup;
    use tempfile::NamedTempFile;

    use super::*;

    fn claims(group: &ShareGroup, files: &[&NamedTempFile]) -> Claims {
        let mut claims = Claims::new(group.clone());
        let files = files.iter().map(|file| file.as_file());
        assert!(claims.claim(files, Path::new("image")));
        claims
    }

    /// The order that a shard receives now, if any.
    fn told(mapped: &MappedFiles) -> Option<Vec<bool>> {
        let mut files = None;
        let order = |order: &Order| {
            let Order::Shared { files: told } = order else {
                panic!("{order:?}")
            };
            files = Some(told.clone());
            true
        };
        mapped.tell(order).unwrap();
        files
    }

    #[test]
    fn shard_receives_which_of_its_files_another_vm_maps_when_that_changes() {
        let (kernel, disk) = (NamedTempFile::new().unwrap(), NamedTempFile::new().unwrap());
        let group = ShareGroup::of_run().unwrap();
        let mapped = MappedFiles::of(&claims(&group, &[&kernel, &disk]));
        let at_start = mapped.at_start();
        let ids: Vec<_> = at_start.iter().map(|file| (file.device, file.inode)).collect();
        let own = [&kernel, &disk].map(|file| file.as_file().metadata().unwrap());
        assert_eq!(ids, own.map(|own| (own.dev(), own.ino())));
        assert!(at_start.iter().all(|file| !file.is_shared), "it is alone");
        assert_eq!(told(&mapped), None, "nothing has changed");

        let other = claims(&group, &[&disk]);
        mapped.tell(|_| false).unwrap();
        let shared = Some(vec![false, true]);
        assert_eq!(
            told(&mapped),
            shared,
            "a change that reached no shard is sent again"
        );
        assert_eq!(told(&mapped), None, "nothing has changed");
        drop(other);
        // A process that another test starts has copies of locks until it executes its program.
        let end = Instant::now() + Duration::from_secs(10);
        let last = loop {
            let last = told(&mapped);
            if last.is_some() || Instant::now() > end {
                break last;
            }
        };
        assert_eq!(last, Some(vec![false, false]));
    }
}
