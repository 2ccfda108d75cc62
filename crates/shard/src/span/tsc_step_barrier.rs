//! Where the vCPUs of a shard pass when they enter the guest, so that all of them begin to add more to the host's counter at one
//! moment: the shards of other hosts have faster clocks, and this one follows.
//!
//! Were one vCPU to step while another runs on, the second could be told something by the first and read an earlier time. So
//! a step closes the barrier, has those that are in the guest called out, waits until they are, changes the offset,
//! and opens again; each vCPU gives KVM the new one before it enters. Who sleeps, or waits for a device, is left alone.
//!
//! A vCPU that waits in the kernel for a page may take long to come out, and is not waited for beyond [`EXIT_TIMEOUT`]: the signal that it has
//! been sent keeps the kernel from entering the guest before it has come out, so it executes nothing meanwhile.
//!
//! The counter never goes back: an offset only grows (modulo 2^64), by [`STEP_NS_MAX`] at most.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long those that were called may take to come out: an interrupt of another CPU takes some microseconds.
pub const EXIT_TIMEOUT: Duration = Duration::from_millis(1);
/// How long a step waits before it looks again whether all are out.
const EXIT_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// How far a step may go, nanoseconds: twice what a host may have stood still.
const STEP_NS_MAX: u64 = 20_000_000_000;
/// Set in the number of vCPUs inside while nobody may enter.
const CLOSED: u32 = 1 << 31;

/// A shard's, of a VM over several hosts.
#[derive(Debug)]
pub struct TscStepBarrier {
    /// What is added to the host's counter.
    offset: AtomicU64,
    /// vCPUs that have entered, and [`CLOSED`].
    inside: AtomicU32,
    /// Held for a step.
    closing: Mutex<()>,
    /// All may be out.
    emptied: Condvar,
    opened: Condvar,
    /// Ticks in a millisecond.
    khz: u32,
    steps: AtomicU64,
    late: AtomicU64,
}

/// A step that is not made.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StepError {
    /// Time does not go back.
    #[error(
        "a step of the guest's clock by {0} ticks would turn it back, or far into the future; it is left out"
    )]
    Far(i64),
    /// It is in one host.
    #[error("a step of the guest's clock, which has one host's; it is left out")]
    OneHost,
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Steps {
    /// Steps.
    pub count: u64,
    /// Those for which a vCPU took longer than [`EXIT_TIMEOUT`] to come out.
    pub late: u64,
}

impl TscStepBarrier {
    /// Open, with what is added at first; the guest's counter has so many ticks in a millisecond.
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

    /// What is added to the host's counter: from now on, at least as much for all that enter.
    pub fn offset(&self) -> u64 {
        self.offset.load(Ordering::SeqCst)
    }

    /// What was done so far.
    pub fn steps(&self) -> Steps {
        Steps {
            count: self.steps.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
        }
    }

    /// The calling vCPU, which can be called out from now on, enters; what it is to add until [`TscStepBarrier::leave`]. None while a step is
    /// made, for which it waits: then it is to look at its mail again.
    pub fn enter(&self) -> Option<u64> {
        if self.inside.fetch_add(1, Ordering::SeqCst) & CLOSED == 0 {
            return Some(self.offset());
        }
        self.leave();
        let mut closing = self.lock();
        while self.inside.load(Ordering::SeqCst) & CLOSED != 0 {
            closing = self.opened.wait(closing).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// It is out.
    pub fn leave(&self) {
        if self.inside.fetch_sub(1, Ordering::SeqCst) == CLOSED | 1 {
            self.emptied.notify_all();
        }
    }

    /// From now on `offset` is added. `call` calls those out that have entered. Returns when it holds.
    ///
    /// # Errors
    /// If that would turn time back, or make it jump.
    pub fn step(&self, offset: u64, limit: Duration, call: impl FnOnce()) -> Result<(), StepError> {
        let mut closing = self.lock();
        let further = offset.wrapping_sub(self.offset());
        if further == 0 {
            return Ok(());
        }
        if u128::from(further) * 1_000_000 > u128::from(STEP_NS_MAX) * u128::from(self.khz) {
            return Err(StepError::Far(further as i64));
        }
        self.inside.fetch_or(CLOSED, Ordering::SeqCst);
        call();
        let deadline = Instant::now() + limit;
        while self.inside.load(Ordering::SeqCst) != CLOSED {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.late.fetch_add(1, Ordering::Relaxed);
                break;
            }
            // Who leaves doesn't take the lock, so it may have been just before this.
            let wait = left.min(EXIT_POLL_INTERVAL);
            let waited = self.emptied.wait_timeout(closing, wait);
            closing = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.offset.store(offset, Ordering::SeqCst);
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.inside.fetch_and(!CLOSED, Ordering::SeqCst);
        self.opened.notify_all();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
