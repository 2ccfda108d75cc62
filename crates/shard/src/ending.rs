//! Signal of a VM's end, from its cause (a vCPU, a power register) to the thread that waits for the end.
//!
//! The first cause wins. A panic is kept even if the kernel resets the machine right after it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use locks::IgnorePoison;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::launch::Ending;

/// The cause of the VM's end, with an event file that wakes the waiting thread.
pub struct EndSignal {
    cause: Mutex<Option<Ending>>,
    panicked: AtomicBool,
    stopping: AtomicBool,
    event: EventFd,
}

impl EndSignal {
    /// Creates the signal of a VM that runs.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            cause: Mutex::new(None),
            panicked: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            event: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Records that the guest's kernel panics: a later reset or power-off counts as the panic's.
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
        self.cause.lock().ignore_poison().get_or_insert(ending);
        self.stopping.store(true, Ordering::Release);
        // The counter can't overflow: that would take 2^64 ends.
        let _ = self.event.write(1);
    }

    /// Returns whether vCPUs must stop.
    pub fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Returns the cause of the VM's end, if it has ended.
    pub fn cause(&self) -> Option<Ending> {
        self.cause.lock().ignore_poison().clone()
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
