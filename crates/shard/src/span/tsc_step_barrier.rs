//! Barrier that a shard's vCPUs pass when they enter the guest, so that all of them change their TSC offset
//! at one moment. The clocks of other hosts are faster, and this shard follows them in steps.
//!
//! If one vCPU stepped while another ran on, the second could receive a message of the first and read an
//! earlier time. So a step closes the barrier, kicks the vCPUs that are in the guest, waits until they are
//! out, changes the offset and opens the barrier. Each vCPU sets the new offset in KVM before it enters. A
//! vCPU that is blocked or waits for a device is not disturbed.
//!
//! A vCPU that waits in the kernel for a page may take long to exit. The step waits for [`EXIT_TIMEOUT`] at
//! most. The pending signal keeps the kernel from entering the guest before the thread has left `KVM_RUN`, so
//! the vCPU executes nothing meanwhile.
//!
//! The TSC never goes back: an offset only grows (modulo 2^64), by [`STEP_NS_MAX`] at most.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use locks::IgnorePoison;

/// Time limit for kicked vCPUs to leave the guest. An interrupt of another CPU takes some microseconds.
pub const EXIT_TIMEOUT: Duration = Duration::from_millis(1);
/// Interval at which a step checks whether all vCPUs are out.
const EXIT_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Largest step, nanoseconds: twice the longest pause of a host that is accepted.
const STEP_NS_MAX: u64 = 20_000_000_000;
/// Flag in the count of vCPUs inside: the barrier is closed.
const CLOSED: u32 = 1 << 31;

/// TSC step barrier of one shard, in a VM over several hosts.
#[derive(Debug)]
pub struct TscStepBarrier {
    /// TSC offset, added to the host's TSC.
    offset: AtomicU64,
    /// Number of vCPUs inside, with the flag [`CLOSED`].
    inside: AtomicU32,
    /// Held during a step.
    closing: Mutex<()>,
    /// Signalled when the last vCPU has left.
    emptied: Condvar,
    opened: Condvar,
    /// Frequency of the guest's TSC, kHz.
    khz: u32,
    steps: AtomicU64,
    late: AtomicU64,
}

/// Reason why a step is refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StepError {
    /// The step goes backward, or further than the limit.
    #[error(
        "a step of the guest's clock by {0} ticks goes backward or further than 20 s; the step is refused"
    )]
    Far(i64),
    /// All shards of the VM are on one host.
    #[error("a step of the guest's clock, whose shards are all on one host; the step is refused")]
    OneHost,
}

/// Counters of steps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Steps {
    /// Number of steps since the shard started.
    pub count: u64,
    /// Steps for which a vCPU took longer than [`EXIT_TIMEOUT`] to leave the guest.
    pub late: u64,
}

impl TscStepBarrier {
    /// Returns an open barrier with the initial TSC offset. `khz` is the frequency of the guest's TSC.
    pub fn new(offset: u64, khz: u32) -> Self {
        Self {
            offset: AtomicU64::new(offset),
            inside: AtomicU32::new(0),
            closing: Mutex::default(),
            emptied: Condvar::new(),
            opened: Condvar::new(),
            khz,
            steps: AtomicU64::new(0),
            late: AtomicU64::new(0),
        }
    }

    /// Returns the TSC offset. Every vCPU that enters later has this offset or a larger one.
    pub fn offset(&self) -> u64 {
        self.offset.load(Ordering::SeqCst)
    }

    /// Returns the counters of steps.
    pub fn steps(&self) -> Steps {
        Steps {
            count: self.steps.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
        }
    }

    /// Lets the calling vCPU enter, and returns its TSC offset until [`TscStepBarrier::leave`]. The vCPU must
    /// be ready to be kicked. During a step, blocks until the step ends and returns none: the vCPU must check
    /// its events again.
    pub fn enter(&self) -> Option<u64> {
        if self.inside.fetch_add(1, Ordering::SeqCst) & CLOSED == 0 {
            return Some(self.offset());
        }
        self.leave();
        let mut closing = self.lock();
        while self.inside.load(Ordering::SeqCst) & CLOSED != 0 {
            closing = self.opened.wait(closing).ignore_poison();
        }
        None
    }

    /// Records that the vCPU has left the guest.
    pub fn leave(&self) {
        if self.inside.fetch_sub(1, Ordering::SeqCst) == CLOSED | 1 {
            self.emptied.notify_all();
        }
    }

    /// Changes the TSC offset to `offset`. `kick` kicks the vCPUs that are inside. Returns when the new
    /// offset is in force.
    ///
    /// # Errors
    /// Fails if the step goes backward or further than the limit.
    pub fn step(&self, offset: u64, limit: Duration, kick: impl FnOnce()) -> Result<(), StepError> {
        let mut closing = self.lock();
        let further = offset.wrapping_sub(self.offset());
        if further == 0 {
            return Ok(());
        }
        if u128::from(further) * 1_000_000 > u128::from(STEP_NS_MAX) * u128::from(self.khz) {
            return Err(StepError::Far(further as i64));
        }
        self.inside.fetch_or(CLOSED, Ordering::SeqCst);
        kick();
        let deadline = Instant::now() + limit;
        while self.inside.load(Ordering::SeqCst) != CLOSED {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.late.fetch_add(1, Ordering::Relaxed);
                break;
            }
            // A vCPU leaves without the lock, so this thread may have missed its signal.
            let wait = left.min(EXIT_POLL_INTERVAL);
            let waited = self.emptied.wait_timeout(closing, wait);
            closing = waited.ignore_poison().0;
        }
        self.offset.store(offset, Ordering::SeqCst);
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.inside.fetch_and(!CLOSED, Ordering::SeqCst);
        self.opened.notify_all();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.closing.lock().ignore_poison()
    }
}

#[cfg(test)]
mod tests;
