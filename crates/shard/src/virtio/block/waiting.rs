//! Requests that wait for room on the host, and the timer that retries them (`on_full = "pause"`).
//!
//! To the driver the request takes long: virtio-blk has no timeout of its own. Requests behind a waiting one
//! are served, since the driver may not rely on an order between requests that it has not seen completed.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use diskstore::disk::Operation;
use vmm_sys_util::timerfd::TimerFd;

use super::handler::InFlight;
use super::metrics::Metrics;

/// First and longest interval between two retries. Each costs one or two system calls per request.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// A request that found no room.
pub(super) struct Waiting {
    pub token: usize,
    pub request: InFlight,
    pub operation: Operation,
}

/// The requests of one queue that wait for room.
pub(super) struct WaitingRequests {
    timer: TimerFd,
    interval: Duration,
    /// Number of requests under retry, from [`WaitingRequests::take`] to [`WaitingRequests::tried`]. They
    /// count as waiting: otherwise a full disk would seem to have room meanwhile.
    trying: Option<usize>,
    requests: Vec<Waiting>,
    metrics: Arc<Metrics>,
}

impl WaitingRequests {
    /// Creates an empty list. Creates a file, so it must be called before the sandbox closes.
    pub fn new(metrics: Arc<Metrics>) -> io::Result<Self> {
        Ok(Self {
            timer: TimerFd::new()?,
            interval: RETRY_FIRST,
            trying: None,
            requests: Vec::new(),
            metrics,
        })
    }

    /// Returns the timer, which is readable when the requests are to be retried.
    pub fn timer(&self) -> BorrowedFd<'_> {
        // SAFETY: the file is the timer's, open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.timer.as_raw_fd()) }
    }

    /// Adds a waiting request: a new one, or, between `take` and `tried`, one that was retried without
    /// success.
    pub fn add(&mut self, waiting: Waiting) -> io::Result<()> {
        if self.trying.is_none() {
            if self.requests.is_empty() {
                self.interval = RETRY_FIRST;
                self.timer.reset(self.interval, None)?;
            }
            self.metrics.waiting.fetch_add(1, Ordering::Relaxed);
        }
        self.requests.push(waiting);
        Ok(())
    }

    /// Takes all requests, to be retried because the timer has expired.
    pub fn take(&mut self) -> io::Result<Vec<Waiting>> {
        // The timer has expired, so this does not block.
        self.timer.wait()?;
        let requests = std::mem::take(&mut self.requests);
        self.trying = Some(requests.len());
        Ok(requests)
    }

    /// Sets the timer again after `tried` requests were retried, and those still without room were added
    /// again.
    pub fn tried(&mut self, tried: usize) -> io::Result<()> {
        self.trying = None;
        lower(&self.metrics.waiting, tried.saturating_sub(self.requests.len()));
        if self.requests.is_empty() {
            return Ok(());
        }
        self.interval = next_interval(self.interval, self.requests.len() < tried);
        Ok(self.timer.reset(self.interval, None)?)
    }

    /// Removes all requests: the driver has released them.
    pub fn clear(&mut self) {
        lower(
            &self.metrics.waiting,
            self.trying.take().unwrap_or(self.requests.len()),
        );
        self.requests.clear();
        // A timer that expires without need is harmless.
        let _ = self.timer.clear();
    }
}

impl Drop for WaitingRequests {
    fn drop(&mut self) {
        self.clear();
    }
}

fn lower(gauge: &AtomicU64, by: usize) {
    gauge.fetch_sub(by as u64, Ordering::Relaxed);
}

/// Returns the interval until the next retry. `has_progress` means that some request found room in the last
/// one.
fn next_interval(last: Duration, has_progress: bool) -> Duration {
    if has_progress {
        RETRY_FIRST
    } else {
        (last * 2).min(RETRY_MAX)
    }
}

/// The disks of a VM with requests that wait for room. Cheap to clone.
#[derive(Clone, Default)]
pub struct FullDisks(Vec<(u16, Arc<Metrics>)>);

impl FullDisks {
    /// Also watches the disk with this number.
    pub fn watch(&mut self, number: u16, metrics: Arc<Metrics>) {
        self.0.push((number, metrics));
    }

    /// Returns the numbers of the disks that are full now, in order.
    pub fn now(&self) -> Vec<u16> {
        let is_full = |metrics: &Metrics| metrics.waiting.load(Ordering::Relaxed) > 0;
        let full = self.0.iter().filter(|(_, metrics)| is_full(metrics));
        full.map(|(number, _)| *number).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use vm_memory::GuestAddress;

    use super::*;

    fn waiting(token: usize) -> Waiting {
        let request = InFlight {
            head: 0,
            status: GuestAddress(0),
            filled: 1,
            flush_after: false,
        };
        Waiting {
            token,
            request,
            operation: Operation::Flush,
        }
    }

    #[test]
    fn requests_without_room_are_retried_at_growing_intervals_and_counted_until_dropped() {
        let metrics = Arc::new(Metrics::default());
        let mut requests = WaitingRequests::new(metrics.clone()).unwrap();
        requests.add(waiting(1)).unwrap();
        requests.add(waiting(2)).unwrap();
        let start = Instant::now();
        for _ in 0..3 {
            assert_eq!(metrics.snapshot().waiting, 2);
            let taken = requests.take().unwrap();
            assert_eq!(taken.len(), 2);
            taken
                .into_iter()
                .for_each(|request| requests.add(request).unwrap());
            requests.tried(2).unwrap();
        }
        assert!(start.elapsed() >= RETRY_FIRST * (1 + 2 + 4));
        assert_eq!(requests.interval, RETRY_FIRST * 8);
        let mut taken = requests.take().unwrap();
        requests.add(taken.remove(0)).unwrap();
        requests.tried(2).unwrap();
        assert_eq!(requests.interval, RETRY_FIRST);
        assert_eq!(metrics.snapshot().waiting, 1);
        requests.clear();
        assert_eq!(metrics.snapshot().waiting, 0);
    }

    #[test]
    fn requests_count_as_waiting_while_they_are_retried_and_a_full_disk_stays_reported() {
        let metrics = Arc::new(Metrics::default());
        let mut full = FullDisks::default();
        full.watch(3, metrics.clone());
        let mut requests = WaitingRequests::new(metrics.clone()).unwrap();
        requests.add(waiting(1)).unwrap();
        requests.add(waiting(2)).unwrap();
        let mut taken = requests.take().unwrap();
        assert_eq!((metrics.snapshot().waiting, full.now()), (2, vec![3]));
        requests.add(taken.remove(0)).unwrap();
        assert_eq!(metrics.snapshot().waiting, 2);
        requests.tried(2).unwrap();
        assert_eq!((metrics.snapshot().waiting, full.now()), (1, vec![3]));
        // Removed during a retry, as when an error ends the device.
        requests.take().unwrap();
        drop(requests);
        assert_eq!((metrics.snapshot().waiting, full.now()), (0, vec![]));
    }

    #[test]
    fn retry_interval_doubles_up_to_two_seconds_and_restarts_after_progress() {
        let mut interval = RETRY_FIRST;
        let mut seen = vec![interval.as_millis()];
        for _ in 0..7 {
            interval = next_interval(interval, false);
            seen.push(interval.as_millis());
        }
        assert_eq!(seen, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(next_interval(interval, true), RETRY_FIRST);
    }

    #[test]
    fn only_disks_with_waiting_requests_are_full() {
        let disks = [(); 3].map(|()| Arc::new(Metrics::default()));
        let mut full = FullDisks::default();
        for (number, metrics) in (0..).zip(&disks) {
            full.watch(number, metrics.clone());
        }
        assert!(full.now().is_empty());
        disks[2].waiting.store(1, Ordering::Relaxed);
        disks[0].waiting.store(3, Ordering::Relaxed);
        assert_eq!(full.now(), [0, 2]);
    }
}
