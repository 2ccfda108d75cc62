//! Asynchronous I/O (io_uring), reduced to a disk queue's needs.
//!
//! A ring works in the kernel, beyond the thread's system call filter. So it is restricted, before the
//! sandbox is sealed, to reading and syncing the disk's own files by their index: a compromised thread can't
//! open, connect or send anything through it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue, types};

use super::Segments;

/// Maximum submissions, a millisecond apart, when the kernel has no memory for a batch.
const SEND_ATTEMPTS_MAX: u32 = 1000;

/// A restricted ring over fixed files.
pub(super) struct Ring {
    ring: IoUring,
    done: OwnedFd,
    /// Whether entries were pushed but not yet submitted.
    unsent: bool,
}

impl Ring {
    /// Creates a ring for `entries` simultaneous requests over `files`.
    pub fn new(files: &[BorrowedFd<'_>], entries: u32) -> io::Result<Self> {
        let ring = IoUring::builder().setup_r_disabled().dontfork().build(entries)?;
        // SAFETY: a new file of our own.
        let done = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, nothing else owns it.
        let done = unsafe { OwnedFd::from_raw_fd(done) };
        let numbers: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let submitter = ring.submitter();
        submitter.register_files(&numbers)?;
        submitter.register_eventfd(done.as_raw_fd())?;
        let fixed = squeue::Flags::FIXED_FILE.bits();
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Fsync::CODE),
            Restriction::sqe_flags_allowed(fixed),
            Restriction::sqe_flags_required(fixed),
        ])?;
        submitter.register_enable_rings()?;
        Ok(Self {
            ring,
            done,
            unsent: false,
        })
    }

    /// File that is readable when completions wait; read it before taking them.
    pub fn done(&self) -> BorrowedFd<'_> {
        self.done.as_fd()
    }

    /// Queues a read; false when the ring is full.
    ///
    /// # Safety
    /// `into` must stay valid and unmoved until the completion of `token` was taken.
    pub unsafe fn push_read(&mut self, file: usize, into: &Segments, offset: u64, token: u64) -> bool {
        let iovecs = into.iovecs();
        let entry = opcode::Readv::new(types::Fixed(file as u32), iovecs.as_ptr(), iovecs.len() as u32)
            .offset(offset)
            .build();
        self.push(entry.user_data(token))
    }

    /// Queues a sync of a file's data; false when the ring is full.
    pub fn push_sync(&mut self, file: usize, token: u64) -> bool {
        let entry = opcode::Fsync::new(types::Fixed(file as u32))
            .flags(types::FsyncFlags::DATASYNC)
            .build();
        self.push(entry.user_data(token))
    }

    fn push(&mut self, entry: squeue::Entry) -> bool {
        // SAFETY: syncs have no memory; the caller of `push_read` guarantees the read's.
        let pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        self.unsent |= pushed;
        pushed
    }

    /// Submits the queued entries to the kernel.
    pub fn send(&mut self) -> io::Result<()> {
        let mut attempts = 0;
        while self.unsent {
            match self.ring.submit() {
                Ok(_) => self.unsent = !self.ring.submission().is_empty(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is temporarily short of memory.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && attempts < SEND_ATTEMPTS_MAX => {
                    attempts += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for at least one completion.
    pub fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes a completion: its token, and the bytes or the error.
    pub fn take(&mut self) -> Option<(u64, io::Result<u64>)> {
        let entry = self.ring.completion().next()?;
        let result = u64::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(-entry.result()));
        Some((entry.user_data(), result))
    }
}
