//! How a VM's end travels from whoever causes it (a vCPU, a power register) to the thread that waits for it.
//!
//! The first cause wins, except that a panic is kept even when the kernel resets the machine right after.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::launch::Ending;

/// The place where the cause of the end is left.
pub struct EndSignal {
    cause: Mutex<Option<Ending>>,
    panicked: AtomicBool,
    stopping: AtomicBool,
    event: EventFd,
}

impl EndSignal {
    /// Nothing has ended yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            cause: Mutex::new(None),
            panicked: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            event: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// The guest's kernel says that it panics: a reset or power-off from here on is the panic's.
    pub fn panicked(&self) {
        self.panicked.store(true, Ordering::Relaxed);
    }

    /// Ends the VM. Every vCPU stops at its next exit.
    pub fn end(&self, ending: Ending) {
        let panicked = self.panicked.load(Ordering::Relaxed);
        let ending = match ending {
            Ending::Reboot | Ending::PowerOff | Ending::TripleFault if panicked => Ending::Panic,
            other => other,
        };
        self.cause
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(ending);
        self.stopping.store(true, Ordering::Release);
        // The counter can't overflow: nobody writes 2^64 ends.
        let _ = self.event.write(1);
    }

    /// Whether vCPUs must stop.
    pub fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Why the VM ended, once it has.
    pub fn cause(&self) -> Option<Ending> {
        self.cause.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl AsFd for EndSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `self.event` and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reset_after_panic_is_a_panic() {
        let signal = EndSignal::new().unwrap();
        signal.panicked();
        signal.end(Ending::Reboot);
        assert_eq!(signal.cause(), Some(Ending::Panic));
    }

    #[test]
    fn first_cause_wins() {
        let signal = EndSignal::new().unwrap();
        assert!(!signal.stopping());
        signal.end(Ending::PowerOff);
        signal.end(Ending::TripleFault);
        assert_eq!(signal.cause(), Some(Ending::PowerOff));
        assert!(signal.stopping());
    }
}
