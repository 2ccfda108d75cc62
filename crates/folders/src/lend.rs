//! Files that a folder's process passes to the shard, so that the guest's copies of their pages become
//! mappings of the host's page cache.
//!
//! Each file has a read lease (`F_SETLEASE`, fcntl(2)): as long as the shard keeps the file or a mapping of
//! it, its contents do not change. A process gets leases on files of its own user only.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use fuse_backend_rs::passthrough::PassthroughFs;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::sys::stat::Mode;

use crate::link::found;
use crate::packet::lent_file;

/// Size of the smallest file that is passed, bytes: four pages. A mapping of fewer costs more than it saves.
const FILE_BYTES_MIN: u64 = 16 << 10;
/// Time after which a file that is still read is passed again: the shard may have given it back.
const INTERVAL: Duration = Duration::from_secs(10);
/// Greatest number of remembered nodes.
const NODES_MAX: usize = 4096;

/// The files that were passed.
#[derive(Debug, Default)]
pub struct Lender {
    nodes: BTreeMap<u64, Instant>,
}

impl Lender {
    /// Lets this process live on when a writer waits for one of its leases: the kernel sends a signal, which
    /// the shard's own look at the leases makes superfluous.
    ///
    /// # Errors
    /// Fails if the kernel refuses.
    pub fn ignore_signals() -> io::Result<()> {
        // SAFETY: no handler runs.
        unsafe { signal(Signal::SIGIO, SigHandler::SigIgn) }?;
        Ok(())
    }

    /// Forgets what was passed: another connection begins.
    pub fn forget(&mut self) {
        self.nodes.clear();
    }

    /// Passes the file of a node that the guest reads, unless that was done a short time ago. A file that
    /// can't be leased, as one that is open for writing, is not passed.
    ///
    /// # Errors
    /// Fails if the socket fails.
    pub fn lend(&mut self, files: &PassthroughFs, node: u64, socket: &OwnedFd) -> Result<(), Errno> {
        let now = Instant::now();
        let last = self.nodes.get(&node);
        if last.is_some_and(|last| now.duration_since(*last) < INTERVAL) {
            return Ok(());
        }
        if self.nodes.len() >= NODES_MAX {
            self.nodes.clear();
        }
        self.nodes.insert(node, now);
        match leased(files, node) {
            Ok(Some(file)) => pass(socket, node, &file),
            // The guest reads on without it.
            Ok(None) | Err(_) => Ok(()),
        }
    }
}

/// Opens the file of a node and takes a lease; none for a file that is too small.
fn leased(files: &PassthroughFs, node: u64) -> io::Result<Option<File>> {
    let found = found(files, node)?;
    let metadata = found.metadata()?;
    if !metadata.is_file() || metadata.size() < FILE_BYTES_MIN {
        return Ok(None);
    }
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let file = File::from(open(path.as_str(), flags, Mode::empty())?);
    // SAFETY: the call takes no pointers.
    let taken = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK as libc::c_int) };
    Errno::result(taken)?;
    Ok(Some(file))
}

fn pass(socket: &OwnedFd, node: u64, file: &File) -> Result<(), Errno> {
    let packet = lent_file(node);
    let files = [file.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&files)];
    loop {
        let parts = [IoSlice::new(&packet)];
        match sendmsg::<()>(socket.as_raw_fd(), &parts, &rights, MsgFlags::MSG_NOSIGNAL, None) {
            Err(Errno::EINTR) => {}
            // The kernel bounds the descriptors on their way: the guest reads on without this one.
            Err(Errno::ETOOMANYREFS) => return Ok(()),
            sent => return sent.map(|_| ()),
        }
    }
}
