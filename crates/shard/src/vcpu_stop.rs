//! Stop of one vCPU by an order, for a short time.
//!
//! The vCPU's thread parks before its next entry into the guest. It holds no lock then, serves pauses of the
//! whole VM, and goes on at the deadline by itself, whether or not its monitor still lives. Interrupts for
//! the vCPU wait in its interrupt controller.
//!
//! A stop belongs to the shard that received the order. The thread of a vCPU that has moved to another shard
//! forwards the vCPU's events, so it must not park: the stop ends there, and the vCPU runs on in the other
//! shard. An order to move that arrives during a stop is served when the stop ends.

mod lease;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use locks::IgnorePoison;

pub use lease::{LeaseError, StopLease};

/// Stop of one vCPU, shared by its thread and the thread that carries out orders.
#[derive(Debug, Default)]
pub struct VcpuStop {
    lease: Mutex<StopLease>,
    changed: Condvar,
    /// Whether [`VcpuStop::serve`] may park. Set before the vCPU is kicked.
    is_wanted: AtomicBool,
    stops: AtomicU64,
    stopped_ns: AtomicU64,
}

impl VcpuStop {
    /// Begins or renews a stop. The caller kicks the vCPU's thread afterwards.
    ///
    /// # Errors
    /// Fails, and changes nothing, if the stop is too long ([`StopLease::stop`]).
    pub fn stop(&self, length: Duration) -> Result<(), LeaseError> {
        let mut lease = self.lease();
        if lease.stop(Instant::now(), length)? {
            self.stops.fetch_add(1, Ordering::Relaxed);
        }
        self.is_wanted.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        Ok(())
    }

    /// Ends the stop.
    pub fn go_on(&self) {
        self.lease().go_on(Instant::now());
        self.changed.notify_all();
    }

    /// Makes a parked thread check again whether it is interrupted.
    pub fn wake(&self) {
        // Under the lock, so that the thread is not between its check and its wait.
        let _lease = self.lease();
        self.changed.notify_all();
    }

    /// Returns whether the vCPU's thread has to call [`VcpuStop::serve`].
    pub fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst)
    }

    /// Parks the thread of a vCPU that is in this shard until the lease is over, or `is_interrupted` after
    /// [`VcpuStop::wake`]. Ends the stop of a vCPU that is in another shard, and returns at once.
    pub fn serve(&self, is_resident: bool, is_interrupted: impl Fn() -> bool) {
        if is_resident {
            self.park(is_interrupted);
            return;
        }
        let mut lease = self.lease();
        lease.end();
        self.is_wanted.store(false, Ordering::SeqCst);
    }

    fn park(&self, is_interrupted: impl Fn() -> bool) {
        let begun = Instant::now();
        let mut lease = self.lease();
        while !is_interrupted() {
            let Some(left) = lease.remaining(Instant::now()) else {
                self.is_wanted.store(false, Ordering::SeqCst);
                break;
            };
            let waited = self.changed.wait_timeout(lease, left);
            lease = waited.ignore_poison().0;
        }
        drop(lease);
        let stopped_ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.stopped_ns.fetch_add(stopped_ns, Ordering::Relaxed);
    }

    /// Returns the number of stops, without renewals.
    pub fn stops(&self) -> u64 {
        self.stops.load(Ordering::Relaxed)
    }

    /// Returns the time for which the thread was parked, nanoseconds. A stop that has not ended is missing.
    pub fn stopped_ns(&self) -> u64 {
        self.stopped_ns.load(Ordering::Relaxed)
    }

    fn lease(&self) -> MutexGuard<'_, StopLease> {
        self.lease.lock().ignore_poison()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    const LENGTH: Duration = Duration::from_millis(100);

    #[test]
    fn parked_thread_goes_on_at_the_deadline_and_the_counters_show_the_stop() {
        let stop = VcpuStop::default();
        stop.stop(LENGTH).unwrap();
        assert!(stop.is_wanted());
        let begun = Instant::now();
        stop.serve(true, || false);
        // The lease began a moment before.
        assert!(begun.elapsed() > LENGTH / 2, "{:?}", begun.elapsed());
        assert!(!stop.is_wanted());
        assert_eq!(stop.stops(), 1);
        assert!(stop.stopped_ns() > 50_000_000, "{}", stop.stopped_ns());
    }

    #[test]
    fn thread_goes_on_at_once_by_an_order_or_for_a_pause_of_the_vm() {
        let (stop, paused) = (Arc::new(VcpuStop::default()), Arc::new(AtomicBool::new(false)));
        let park = || {
            let (stop, paused) = (stop.clone(), paused.clone());
            thread::spawn(move || stop.serve(true, || paused.load(Ordering::SeqCst)))
        };
        // Renewals keep the thread parked beyond the first deadline.
        stop.stop(LENGTH).unwrap();
        let thread = park();
        let begun = Instant::now();
        while begun.elapsed() < LENGTH * 3 {
            stop.stop(LENGTH).unwrap();
            assert!(!thread.is_finished() || begun.elapsed() >= LENGTH);
            thread::sleep(Duration::from_millis(1));
        }
        stop.go_on();
        thread.join().unwrap();
        assert!(!stop.is_wanted());

        stop.stop(LENGTH).unwrap();
        let thread = park();
        paused.store(true, Ordering::SeqCst);
        stop.wake();
        thread.join().unwrap();
        assert!(stop.is_wanted(), "the lease is not over");
    }

    #[test]
    fn stop_of_a_vcpu_that_has_moved_away_ends_at_once_and_the_next_one_is_another() {
        let stop = VcpuStop::default();
        stop.stop(LENGTH).unwrap();
        let begun = Instant::now();
        stop.serve(false, || panic!("the thread of a vCPU in another shard parks"));
        assert!(begun.elapsed() < LENGTH / 2, "{:?}", begun.elapsed());
        assert!(!stop.is_wanted());
        assert_eq!((stop.stops(), stop.stopped_ns()), (1, 0));
        // The vCPU comes back and is stopped again.
        stop.stop(LENGTH).unwrap();
        assert_eq!(stop.stops(), 2, "a renewal of the stop that has ended");
    }
}
