//! The files whose pages a VM maps, and which of them another VM may map, too: the monitor finds out, so that a shard has no
//! table of what runs on the host.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use diskstore::claim::Claim;
use shard_api::launch::{MappedFile, Order};

use crate::handle::Handle;
use crate::share_group::Claims;

/// How often the monitor looks for other VMs: a few system calls.
const INTERVAL: Duration = Duration::from_secs(5);

/// The files that a VM holds claims on.
#[derive(Debug)]
pub(crate) struct MappedFiles {
    claims: Vec<Arc<Claim>>,
    /// What the shard knows: which of them are shared.
    told: Mutex<Vec<bool>>,
}

impl MappedFiles {
    /// Those of `claims`.
    pub(crate) fn of(claims: &Claims) -> Self {
        Self {
            claims: claims.held().to_vec(),
            told: Mutex::default(),
        }
    }

    /// What a shard is told at its start; nothing if this host does not tell.
    pub(crate) fn at_start(&self) -> Vec<MappedFile> {
        let files = self.find().unwrap_or_default();
        *self.told() = files.iter().map(|file| file.is_shared).collect();
        files
    }

    /// Tells the VM's shard of every change, until `over` is closed.
    pub(crate) fn watch(&self, handle: &Handle, over: &Receiver<()>) {
        while over.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let Ok(files) = self.find() else { return };
            let files: Vec<bool> = files.iter().map(|file| file.is_shared).collect();
            let mut told = self.told();
            // Between two boots there is no shard; the next is told at its start.
            if *told != files && handle.order(&Order::Shared { files: files.clone() }).is_ok() {
                *told = files;
            }
        }
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
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
