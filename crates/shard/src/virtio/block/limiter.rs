//! Limits of the requests and bytes per second of a disk.
//!
//! A queue's thread takes no further request from the guest's queue while the disk has no token. A request
//! is charged with its whole size when it is taken, so a large one makes the next ones wait longer. All
//! queues of a disk have one limit.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use locks::lock;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use policy::rate::Bucket;
use vmm_sys_util::timerfd::TimerFd;

use crate::launch::{DiskLimit, DiskLimits};

/// Part of a second whose requests may come at once.
const BURST_PART: u64 = 10;
/// Longest time after which a waiting queue checks again: the limit may have been raised meanwhile.
const RECHECK: Duration = Duration::from_millis(100);

/// The limits of a disk, shared by its queues and the first thread.
#[derive(Debug, Default)]
pub struct DiskLimiter {
    /// Whether there is any limit: without one, requests take no lock.
    is_limited: AtomicBool,
    buckets: Mutex<Buckets>,
    /// Number of times that a queue began to wait.
    waits: AtomicU64,
}

#[derive(Debug, Default)]
struct Buckets {
    limit: DiskLimit,
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
}

impl DiskLimiter {
    /// Sets the limits. A limit that does not change keeps its state.
    pub fn set(&self, limit: DiskLimit) {
        let bucket = |rate: u64| Bucket::new(rate, rate / BURST_PART, Instant::now());
        let mut buckets = lock(&self.buckets);
        if limit.bytes != buckets.limit.bytes {
            buckets.bytes = limit.bytes.map(bucket);
        }
        if limit.requests != buckets.limit.requests {
            buckets.requests = limit.requests.map(u64::from).map(bucket);
        }
        buckets.limit = limit;
        self.is_limited
            .store(limit != DiskLimit::default(), Ordering::Release);
    }

    /// Returns how often a queue began to wait.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Returns the time until the next request may be taken; zero if it may be now.
    fn wait(&self) -> Duration {
        if !self.is_limited.load(Ordering::Acquire) {
            return Duration::ZERO;
        }
        let now = Instant::now();
        let mut buckets = lock(&self.buckets);
        let Buckets { bytes, requests, .. } = &mut *buckets;
        let waits = [bytes, requests].map(|bucket| bucket.as_mut().map_or(Duration::ZERO, |b| b.wait(now)));
        waits[0].max(waits[1])
    }

    fn charge(&self, cost: u64) {
        if !self.is_limited.load(Ordering::Acquire) {
            return;
        }
        let mut buckets = lock(&self.buckets);
        if let Some(bytes) = &mut buckets.bytes {
            bytes.owe(cost);
        }
        if let Some(requests) = &mut buckets.requests {
            requests.owe(1);
        }
    }
}

/// The limits as one queue's thread uses them.
pub(super) struct LimitedQueue {
    limiter: Arc<DiskLimiter>,
    timer: TimerFd,
    is_waiting: bool,
}

impl LimitedQueue {
    /// Creates the timer. Creates a file, so it must be called before the sandbox closes.
    pub fn new(limiter: Arc<DiskLimiter>) -> io::Result<Self> {
        let timer = TimerFd::new()?;
        // A timer that was set again after its expiry was reported has not expired.
        // SAFETY: the file is open for as long as `timer`, which outlives the call.
        let file = unsafe { BorrowedFd::borrow_raw(timer.as_raw_fd()) };
        fcntl(file, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok(Self {
            limiter,
            timer,
            is_waiting: false,
        })
    }

    /// Returns the timer, which is readable when a waiting queue is to be served.
    pub fn timer(&self) -> BorrowedFd<'_> {
        // SAFETY: the file is the timer's, open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.timer.as_raw_fd()) }
    }

    /// Returns whether a request may be taken from the queue. If not, the timer is set.
    pub fn admits(&mut self) -> io::Result<bool> {
        let wait = self.limiter.wait();
        if wait.is_zero() {
            self.is_waiting = false;
            return Ok(true);
        }
        if !self.is_waiting {
            self.limiter.waits.fetch_add(1, Ordering::Relaxed);
        }
        self.is_waiting = true;
        self.timer.reset(wait.min(RECHECK), None)?;
        Ok(false)
    }

    /// Whether the last request was not admitted.
    pub fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// Charges a request that was taken, with the bytes that it reads or writes.
    pub fn charge(&self, bytes: u64) {
        self.limiter.charge(bytes);
    }

    /// Takes the expiry of the timer.
    pub fn expired(&mut self) {
        // An error means that it has been set again.
        let _ = self.timer.wait();
    }

    /// Waits for nothing more: the driver has released its requests.
    pub fn clear(&mut self) {
        self.is_waiting = false;
        // A timer that expires without need is harmless.
        let _ = self.timer.clear();
    }
}

/// The limiters of a VM's disks, in order; none of a disk without requests. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct DiskLimiters(Vec<Option<Arc<DiskLimiter>>>);

impl DiskLimiters {
    /// Adds the next disk.
    pub fn push(&mut self, limiter: Option<Arc<DiskLimiter>>) {
        self.0.push(limiter);
    }

    /// Sets the limits of all disks.
    ///
    /// # Errors
    /// The reason, if a limited disk is missing or has no requests. No limit changes then.
    pub fn set(&self, limits: &DiskLimits) -> Result<(), &'static str> {
        let others = &limits.others;
        // The root disk, if there is one, is the first.
        let roots = self.0.len().checked_sub(others.len());
        let wanted: Vec<DiskLimit> = match roots {
            Some(0) if limits.root == DiskLimit::default() => others.clone(),
            Some(0) => return Err("it has no root disk"),
            Some(1) => [limits.root].into_iter().chain(others.iter().copied()).collect(),
            _ => return Err("it has other disks"),
        };
        let is_limited = |limit: &DiskLimit| *limit != DiskLimit::default();
        let pairs = || self.0.iter().zip(&wanted);
        if pairs().any(|(limiter, limit)| limiter.is_none() && is_limited(limit)) {
            return Err("persistent memory has no requests");
        }
        for (limiter, limit) in pairs() {
            if let Some(limiter) = limiter {
                limiter.set(*limit);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, poll};

    use super::*;

    fn limit(bytes: Option<u64>, requests: Option<u32>) -> DiskLimit {
        DiskLimit { bytes, requests }
    }

    #[test]
    fn both_limits_hold_and_a_change_of_one_keeps_the_other() {
        let limiter = DiskLimiter::default();
        limiter.charge(1 << 40);
        assert_eq!(limiter.wait(), Duration::ZERO);
        limiter.set(limit(Some(1000), Some(10)));
        limiter.charge(60_000);
        assert!(limiter.wait() > Duration::from_secs(58));
        limiter.set(limit(Some(1000), Some(1)));
        assert!(limiter.wait() > Duration::from_secs(58));
        limiter.set(limit(None, Some(1)));
        assert_eq!(limiter.wait(), Duration::ZERO);
        (0..50).for_each(|_| limiter.charge(0));
        assert!(limiter.wait() > Duration::from_secs(48));
        limiter.set(DiskLimit::default());
        assert_eq!(limiter.wait(), Duration::ZERO);
    }

    #[test]
    fn waiting_queue_checks_again_before_a_long_wait_ends() {
        let limiter = Arc::new(DiskLimiter::default());
        let mut queue = LimitedQueue::new(limiter.clone()).unwrap();
        assert!(queue.admits().unwrap() && !queue.is_waiting());
        limiter.set(limit(Some(1000), None));
        queue.charge(1 << 30);
        assert!(!queue.admits().unwrap() && queue.is_waiting());
        assert!(!queue.admits().unwrap());
        assert_eq!(limiter.waits(), 1);
        let mut files = [PollFd::new(queue.timer(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut files, 20_000_u16).unwrap(), 1);
        queue.expired();
        // It does not block.
        queue.expired();
        limiter.set(DiskLimit::default());
        assert!(queue.admits().unwrap() && !queue.is_waiting());
    }

    #[test]
    fn limits_are_of_the_disks_that_the_vm_file_names_or_change_nothing() {
        let disks = |count: usize| {
            let mut disks = DiskLimiters::default();
            (0..count).for_each(|_| disks.push(Some(Arc::default())));
            disks
        };
        let now = |disks: &DiskLimiters| -> Vec<Option<u64>> {
            let of =
                |limiter: &Option<Arc<DiskLimiter>>| lock(&limiter.as_ref().unwrap().buckets).limit.bytes;
            disks.0.iter().map(of).collect()
        };
        let limits = |root: Option<u64>, others: &[Option<u64>]| DiskLimits {
            root: limit(root, None),
            others: others.iter().map(|bytes| limit(*bytes, None)).collect(),
        };
        let with_root = disks(2);
        with_root.set(&limits(Some(5), &[Some(6)])).unwrap();
        assert_eq!(now(&with_root), [Some(5), Some(6)]);
        with_root.set(&limits(None, &[Some(7)])).unwrap();
        assert_eq!(now(&with_root), [None, Some(7)]);
        let without = disks(2);
        without.set(&limits(None, &[Some(1), Some(2)])).unwrap();
        assert_eq!(now(&without), [Some(1), Some(2)]);
        without.set(&limits(Some(9), &[Some(1), None])).unwrap_err();
        without.set(&limits(None, &[])).unwrap_err();
        without.set(&limits(None, &[None, None, None])).unwrap_err();
        assert_eq!(now(&without), [Some(1), Some(2)]);
        let mut persistent = disks(1);
        persistent.push(None);
        persistent.set(&limits(Some(3), &[Some(4)])).unwrap_err();
        assert_eq!(now(&DiskLimiters(vec![persistent.0[0].clone()])), [None]);
        persistent.set(&limits(Some(3), &[None])).unwrap();
    }
}
