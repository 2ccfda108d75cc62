//! I/O of one queue on a disk: synchronous where the data is in memory, asynchronous where it is not.
//!
//! * A read that lies in one file is first tried without blocking (`RWF_NOWAIT`); on a miss in the page cache
//!   it goes to io_uring. Reads that span files, and reads of qcow2, are synchronous and may block. So are
//!   those of files that are in memory anyway.
//! * A write goes to the page cache synchronously. A sync goes to io_uring.
//! * Without io_uring (an old kernel, or one that forbids it) everything is synchronous;
//!   [`IoQueue::in_background`] reports that.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use super::ring::Ring;
use super::{Segments, Store};

/// From `linux/magic.h`.
const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// Pause before another wait for the kernel.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// A disk operation. Offsets and lengths are in bytes and inside the disk.
#[derive(Debug)]
pub enum Operation {
    /// Read into memory.
    Read {
        /// Offset on the disk.
        offset: u64,
        /// Memory that the read fills.
        into: Segments,
    },
    /// Write from memory.
    Write {
        /// Offset on the disk.
        offset: u64,
        /// Memory that the write takes its bytes from.
        from: Segments,
    },
    /// Make every completed write durable.
    Flush,
    /// Give up a range's space.
    Discard {
        /// Offset on the disk.
        offset: u64,
        /// Length of the range, bytes.
        bytes: u64,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// Offset on the disk.
        offset: u64,
        /// Length of the range, bytes.
        bytes: u64,
        /// Whether its space may be freed.
        unmap: bool,
    },
}

/// Outcome of a submission.
#[derive(Debug)]
pub enum Submission {
    /// The operation is complete.
    Done(io::Result<()>),
    /// In progress: [`IoQueue::completed`] will return its token.
    Pending,
    /// The host's file system, or the user's quota, has no space for the operation. It may have been done
    /// partially, and can be resubmitted unchanged.
    NoRoom(Operation, io::Error),
}

impl Submission {
    /// Converts the result of an `operation` that was done synchronously.
    fn of(operation: Operation, result: io::Result<()>) -> Self {
        match result {
            Err(error) if is_full(&error) => Self::NoRoom(operation, error),
            result => Self::Done(result),
        }
    }
}

/// I/O of one queue. Owned by one thread.
pub struct IoQueue {
    store: Arc<dyn Store>,
    ring: Option<Ring>,
    why_no_ring: Option<io::Error>,
    /// Operations in the ring, by their index, which is the ring's token.
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    /// The store's files and the way to read each.
    files: Vec<(RawFd, Reading)>,
}

/// Way to read a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// Synchronously: the file is in memory.
    AtOnce,
    /// Non-blocking first, then by the ring.
    Try,
    /// By the ring: this file system can't report whether a read would block.
    Ring,
}

struct Pending {
    token: u64,
    what: What,
}

/// Kind of a pending request in the ring.
enum What {
    /// A read: its memory and its offset.
    Read(Segments, u64),
    /// A sync of this file.
    Sync(usize),
}

impl IoQueue {
    /// Creates a queue with at most `depth` pending operations.
    pub fn new(store: Arc<dyn Store>, depth: u16) -> Self {
        let files = store.files();
        let (ring, why_no_ring) = match Ring::new(&files, u32::from(depth).max(1).next_power_of_two()) {
            Ok(ring) => (Some(ring), None),
            Err(error) => (None, Some(error)),
        };
        let files = files
            .iter()
            .map(|file| (file.as_raw_fd(), reading(*file)))
            .collect();
        let depth = usize::from(depth);
        let pending = (0..depth).map(|_| None).collect();
        Self {
            store,
            ring,
            why_no_ring,
            pending,
            free: (0..depth).collect(),
            files,
        }
    }

    /// Creates a queue that does everything synchronously.
    pub fn blocking(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            ring: None,
            why_no_ring: None,
            pending: Vec::new(),
            free: Vec::new(),
            files: Vec::new(),
        }
    }

    /// Returns the disk that the queue serves.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Whether io_uring serves this queue, or the reason why not.
    pub fn in_background(&self) -> Result<(), Option<&io::Error>> {
        if self.ring.is_some() {
            Ok(())
        } else {
            Err(self.why_no_ring.as_ref())
        }
    }

    /// File that is readable when [`IoQueue::completed`] has a completion; read it (8 bytes) first.
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        self.ring.as_ref().map(Ring::done)
    }

    /// Number of pending operations.
    pub fn under_way(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    /// Starts an operation. Call [`IoQueue::send`] after the last of a batch.
    pub fn submit(&mut self, operation: Operation, token: u64) -> Submission {
        match operation {
            Operation::Read { offset, into } => self.read(offset, into, token),
            Operation::Write { offset, ref from } => {
                let written = self.store.write(from, offset);
                Submission::of(operation, written)
            }
            Operation::Flush => self.flush(token),
            Operation::Discard { offset, bytes } => {
                Submission::of(operation, self.store.discard(offset, bytes))
            }
            Operation::WriteZeroes { offset, bytes, unmap } => {
                Submission::of(operation, self.store.write_zeroes(offset, bytes, unmap))
            }
        }
    }

    /// Submits the batch to the kernel.
    pub fn send(&mut self) -> io::Result<()> {
        self.ring.as_mut().map_or(Ok(()), Ring::send)
    }

    /// Takes one completion: the token of its operation and its result.
    pub fn completed(&mut self) -> Option<(u64, io::Result<()>)> {
        let (index, result) = self.ring.as_mut()?.take()?;
        let index = usize::try_from(index).ok()?;
        let pending = self.pending.get_mut(index)?.take()?;
        self.free.push(index);
        let result = match (result, pending.what) {
            (Ok(read), What::Read(into, offset)) if read < into.bytes() => {
                self.read_rest(&into, offset, read)
            }
            // The kernel may request a retry (EAGAIN, EINTR), which is done here.
            (Err(error), What::Read(into, offset)) if is_transient(&error) => self.store.read(&into, offset),
            (Err(error), What::Sync(file)) if is_transient(&error) => self.sync(file),
            (result, What::Read(..)) => result.map(drop),
            (result, What::Sync(_)) => self.store.sync_state().note(result.map(drop)),
        };
        Some((pending.token, result))
    }

    /// Waits until all pending operations are complete, and drops the completions.
    pub fn drain(&mut self) {
        let _ = self.send();
        while self.under_way() > 0 {
            while self.completed().is_some() {}
            let Some(ring) = &mut self.ring else { return };
            if self.pending.len() > self.free.len() && ring.wait().is_err() {
                // As when memory is short. Returning without the completion would let the kernel write to
                // memory that is no longer ours.
                std::thread::sleep(RETRY_INTERVAL);
            }
        }
    }

    fn read(&mut self, offset: u64, into: Segments, token: u64) -> Submission {
        let extent = if self.ring.is_some() {
            self.store.extent(offset, into.bytes())
        } else {
            None
        };
        let (extent, how) = match extent {
            Some(extent) if self.files[extent.file].1 != Reading::AtOnce => {
                (extent, self.files[extent.file].1)
            }
            _ => return Submission::Done(self.store.read(&into, offset)),
        };
        let mut done = 0;
        if how == Reading::Try {
            match self.read_now(extent.file, &into, offset) {
                Ok(read) if read == into.bytes() => return Submission::Done(Ok(())),
                Ok(read) => done = read,
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(_) => self.files[extent.file].1 = Reading::Ring,
            }
        }
        let (Some(ring), Some(index)) = (self.ring.as_mut(), self.free.pop()) else {
            return Submission::Done(self.read_rest(&into, offset, done));
        };
        let (rest, at) = if done > 0 {
            (into.part(done, into.bytes() - done), offset + done)
        } else {
            (into, offset)
        };
        // SAFETY: the pieces' list is on the heap, owned by `pending` until the completion is taken.
        if unsafe { ring.push_read(extent.file, &rest, at, index as u64) } {
            self.pending[index] = Some(Pending {
                token,
                what: What::Read(rest, at),
            });
            Submission::Pending
        } else {
            self.free.push(index);
            Submission::Done(self.store.read(&rest, at))
        }
    }

    /// Reads without blocking; returns fewer bytes than requested, or EAGAIN, when the rest would block.
    fn read_now(&self, file: usize, into: &Segments, offset: u64) -> io::Result<u64> {
        let at = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let iovecs = into.iovecs();
        // SAFETY: the segments are writable until the I/O ends, which is when preadv2 returns. The file is
        // open: the store owns it.
        let read = unsafe {
            let count = iovecs.len() as i32;
            libc::preadv2(self.files[file].0, iovecs.as_ptr(), count, at, libc::RWF_NOWAIT)
        };
        u64::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Finishes a read that has read `done` bytes.
    fn read_rest(&self, into: &Segments, offset: u64, done: u64) -> io::Result<()> {
        self.store
            .read(&into.part(done, into.bytes() - done), offset + done)
    }

    /// Syncs a file of the store synchronously.
    fn sync(&self, file: usize) -> io::Result<()> {
        self.store.sync_state().note(sync(self.store.files()[file]))
    }

    fn flush(&mut self, token: u64) -> Submission {
        if let Err(error) = self.store.sync_state().check() {
            return Submission::Done(Err(error));
        }
        let file = match self.store.write_back() {
            Ok(Some(file)) => file,
            Ok(None) => return Submission::Done(Ok(())),
            // Tables that could not be written remain to be written. Data that a sync could not write is
            // lost, so that sync fails.
            Err(error) => return Submission::of(Operation::Flush, Err(error)),
        };
        if let (Some(ring), Some(index)) = (self.ring.as_mut(), self.free.pop()) {
            if ring.push_sync(file, index as u64) {
                let what = What::Sync(file);
                self.pending[index] = Some(Pending { token, what });
                return Submission::Pending;
            }
            self.free.push(index);
        }
        Submission::Done(self.sync(file))
    }
}

impl Drop for IoQueue {
    fn drop(&mut self) {
        // The kernel must not write to memory that is about to be freed.
        self.drain();
    }
}

/// Chooses the way to read a file, by its file system.
fn reading(file: BorrowedFd<'_>) -> Reading {
    // SAFETY: all zeroes is a value of this plain structure.
    let mut about: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: writes one structure of ours.
    let known = unsafe { libc::fstatfs(file.as_raw_fd(), &mut about) } == 0;
    let in_memory = [libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC, RAMFS_MAGIC].contains(&about.f_type);
    if known && in_memory {
        Reading::AtOnce
    } else {
        Reading::Try
    }
}

fn sync(file: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        // SAFETY: fdatasync touches no memory.
        if unsafe { libc::fdatasync(file.as_raw_fd()) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Whether the host has no space. An overlay at its own limit fails with another error, because that does not
/// pass.
fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::{Extent, Origin, SyncState};
    use super::*;

    /// A disk whose file can't be synced at first and later can, as a file whose lost data was reported once.
    struct Failing {
        bad: OwnedFd,
        good: File,
        is_bad: AtomicBool,
        sync_state: SyncState,
    }

    impl Failing {
        fn new() -> Arc<Self> {
            let (bad, _) = nix::unistd::pipe().unwrap();
            Arc::new(Self {
                bad,
                good: tempfile::tempfile().unwrap(),
                is_bad: AtomicBool::new(true),
                sync_state: SyncState::default(),
            })
        }
    }

    impl Store for Failing {
        fn size(&self) -> u64 {
            512
        }
        fn read(&self, _into: &Segments, _offset: u64) -> io::Result<()> {
            Ok(())
        }
        fn write(&self, _from: &Segments, _offset: u64) -> io::Result<()> {
            Ok(())
        }
        fn discard(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
            Ok(())
        }
        fn write_zeroes(&self, _offset: u64, _bytes: u64, _unmap: bool) -> io::Result<()> {
            Ok(())
        }
        fn write_back(&self) -> io::Result<Option<usize>> {
            Ok(Some(0))
        }
        fn sync_state(&self) -> &SyncState {
            &self.sync_state
        }
        fn files(&self) -> Vec<BorrowedFd<'_>> {
            if self.is_bad.load(Ordering::Relaxed) {
                vec![self.bad.as_fd()]
            } else {
                vec![self.good.as_fd()]
            }
        }
        fn bases(&self) -> Vec<usize> {
            Vec::new()
        }
        fn extent(&self, _offset: u64, _bytes: u64) -> Option<Extent> {
            None
        }
        fn origin(&self, _offset: u64, bytes: u64) -> Origin {
            Origin::Other { bytes }
        }
    }

    fn flush(queue: &mut IoQueue) -> io::Result<()> {
        match queue.submit(Operation::Flush, 1) {
            Submission::Done(result) => result,
            Submission::NoRoom(_, error) => Err(error),
            Submission::Pending => {
                queue.send().unwrap();
                loop {
                    if let Some((_, result)) = queue.completed() {
                        break result;
                    }
                    std::thread::sleep(RETRY_INTERVAL);
                }
            }
        }
    }

    #[test]
    fn after_a_failed_sync_no_queue_of_the_disk_reports_data_as_durable() {
        let kinds: [fn(Arc<dyn Store>) -> IoQueue; 2] = [|store| IoQueue::new(store, 4), IoQueue::blocking];
        for make in kinds {
            let store = Failing::new();
            let mut first = make(store.clone());
            assert!(flush(&mut first).is_err());
            store.is_bad.store(false, Ordering::Relaxed);
            let mut other = make(store.clone());
            for queue in [&mut other, &mut first] {
                assert_eq!(flush(queue).unwrap_err().raw_os_error(), Some(libc::EIO));
            }
        }
        let healthy = Failing::new();
        healthy.is_bad.store(false, Ordering::Relaxed);
        flush(&mut IoQueue::new(healthy.clone(), 4)).unwrap();
        flush(&mut IoQueue::blocking(healthy)).unwrap();
    }
}
