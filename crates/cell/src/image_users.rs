//! How many VMs use the files of one, for the sharing of their pages: counted by the monitor, so that a shard sees no table of
//! the host's processes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use diskstore::disk::Users;
use shard::launch::{FileUsers, LaunchSpec, Order};

use crate::handle::Handle;

/// How long after a count the next follows: while the VM is alone on a file, and otherwise. Counting reads the table of all the
/// host's locks.
const INTERVAL_ALONE: Duration = Duration::from_secs(5);
const INTERVAL_SHARED: Duration = Duration::from_secs(60);

/// The files of a VM that no process writes.
#[derive(Debug)]
pub(crate) struct ImageUsers {
    users: Users,
    /// Device and number of each.
    files: Vec<(u64, u64)>,
}

impl ImageUsers {
    /// Of a VM with this `launch` and its `files`.
    pub(crate) fn of(launch: &LaunchSpec, files: &[OwnedFd]) -> io::Result<Self> {
        let layers = launch.disks.iter().flat_map(|disk| &disk.layers);
        let mut open = vec![files[launch.kernel.0].as_fd()];
        open.extend(launch.initrd.map(|initrd| files[initrd.0].as_fd()));
        // Those that are written are no images, and their users are of no interest to a shard.
        open.extend(layers.map(|layer| files[layer.file.0].as_fd()));
        let id = |file: &BorrowedFd<'_>| -> io::Result<(u64, u64)> {
            let about = File::from(file.try_clone_to_owned()?).metadata()?;
            Ok((about.dev(), about.ino()))
        };
        Ok(Self {
            files: open.iter().map(id).collect::<io::Result<_>>()?,
            users: Users::of(open),
        })
    }

    /// The counts for a shard's start; none if this host has no table of locks.
    pub(crate) fn now(&self) -> Vec<FileUsers> {
        let counts = self.users.count().unwrap_or_default();
        let known = self.files.iter().zip(counts);
        known
            .map(|(&(device, inode), users)| FileUsers { device, inode, users })
            .collect()
    }

    /// Sends the VM's shard new counts, again and again, until `over` is closed.
    pub(crate) fn watch(&self, handle: &Handle, over: &Receiver<()>) {
        let mut interval = INTERVAL_ALONE;
        while over.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            let Ok(counts) = self.users.count() else { return };
            let is_alone = counts.contains(&1);
            interval = if is_alone { INTERVAL_ALONE } else { INTERVAL_SHARED };
            // Between two boots there is no shard; the next one gets the counts at its start.
            let _ = handle.order(&Order::Users { counts });
        }
    }
}
