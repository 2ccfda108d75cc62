//! Lease of a stop of one vCPU: begin, renew, go on, expire. Pure: the caller passes the time.

use std::time::{Duration, Instant};

use crate::launch::{VCPU_STOP_MS_MAX, VCPU_STOP_TOTAL_MAX};

/// Reason why a lease does not begin, or is not renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// The length is not within the limits of one lease.
    #[error("a vCPU is stopped for 1 to {VCPU_STOP_MS_MAX} ms at a time, which may be renewed")]
    Length,
    /// The stop would last longer than [`VCPU_STOP_TOTAL_MAX`] with all its renewals.
    #[error(
        "a vCPU is stopped for {} s at most with all renewals; it has to run first",
        VCPU_STOP_TOTAL_MAX.as_secs()
    )]
    Total,
}

/// Lease of a stop. A vCPU that has none runs.
#[derive(Debug, Default)]
pub struct StopLease {
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    /// Time of the order that began the stop.
    since: Instant,
    /// Deadline, at which the vCPU goes on by itself.
    until: Instant,
}

impl StopLease {
    /// Stops the vCPU until `length` from `now`, whatever the deadline was. Returns whether this begins a
    /// stop: an order that comes before the vCPU has gone on renews the former one, even after its deadline.
    ///
    /// # Errors
    /// Fails, and changes nothing, if `length` or the whole stop is too long.
    pub fn stop(&mut self, now: Instant, length: Duration) -> Result<bool, LeaseError> {
        if length.is_zero() || length > Duration::from_millis(VCPU_STOP_MS_MAX.into()) {
            return Err(LeaseError::Length);
        }
        let until = now + length;
        match &mut self.held {
            None => {
                self.held = Some(Held { since: now, until });
                Ok(true)
            }
            Some(held) if until.saturating_duration_since(held.since) > VCPU_STOP_TOTAL_MAX => {
                Err(LeaseError::Total)
            }
            Some(held) => {
                held.until = until;
                Ok(false)
            }
        }
    }

    /// Ends the stop before its deadline. A vCPU that runs runs on.
    pub fn go_on(&mut self, now: Instant) {
        if let Some(held) = &mut self.held {
            held.until = held.until.min(now);
        }
    }

    /// Ends the stop: the vCPU does not run here any more.
    pub fn end(&mut self) {
        self.held = None;
    }

    /// Returns the time for which the vCPU stays parked. `None` when the deadline has passed: the lease is
    /// over, and the caller, which is the vCPU's thread, goes on.
    pub fn remaining(&mut self, now: Instant) -> Option<Duration> {
        let left = self
            .held
            .as_ref()
            .map(|held| held.until.saturating_duration_since(now));
        let left = left.filter(|left| !left.is_zero());
        if left.is_none() {
            self.held = None;
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const MAX: Duration = Duration::from_millis(VCPU_STOP_MS_MAX as u64);

    #[test]
    fn stop_ends_at_its_deadline_by_itself() {
        let (mut lease, start) = (StopLease::default(), Instant::now());
        assert_eq!(lease.remaining(start), None, "a vCPU without a lease runs");
        assert_eq!(lease.stop(start, 30 * MS), Ok(true));
        assert_eq!(lease.remaining(start + 10 * MS), Some(20 * MS));
        assert_eq!(lease.remaining(start + 30 * MS), None);
        // The deadline of a lease that is over does not return, even if the clock did.
        assert_eq!(lease.remaining(start), None);
    }

    #[test]
    fn renewal_extends_by_its_length_from_now_and_may_shorten() {
        let (mut lease, start) = (StopLease::default(), Instant::now());
        lease.stop(start, MAX).unwrap();
        assert_eq!(lease.stop(start + 60 * MS, MAX), Ok(false));
        assert_eq!(lease.remaining(start + 60 * MS), Some(MAX));
        assert_eq!(lease.stop(start + 70 * MS, MS), Ok(false));
        assert_eq!(lease.remaining(start + 71 * MS), None);
    }

    #[test]
    fn length_outside_the_limits_is_refused_and_changes_nothing() {
        let (mut lease, start) = (StopLease::default(), Instant::now());
        for wrong in [Duration::ZERO, MAX + Duration::from_nanos(1), Duration::MAX] {
            assert_eq!(lease.stop(start, wrong), Err(LeaseError::Length));
            assert_eq!(lease.remaining(start), None);
        }
        lease.stop(start, 20 * MS).unwrap();
        assert_eq!(lease.stop(start, MAX * 2), Err(LeaseError::Length));
        assert_eq!(lease.remaining(start), Some(20 * MS));
    }

    #[test]
    fn order_to_go_on_ends_the_stop_and_needs_none() {
        let (mut lease, start) = (StopLease::default(), Instant::now());
        lease.go_on(start);
        lease.stop(start, MAX).unwrap();
        lease.go_on(start + MS);
        assert_eq!(lease.remaining(start + MS), None);
        // After the deadline it does not extend the stop.
        lease.stop(start, MS).unwrap();
        lease.go_on(start + 5 * MS);
        assert_eq!(lease.remaining(start + 2 * MS), None);
    }

    #[test]
    fn total_stop_is_bounded_however_often_it_is_renewed() {
        let (mut lease, start) = (StopLease::default(), Instant::now());
        let (mut now, mut renewals) = (start, 0);
        lease.stop(now, MAX).unwrap();
        loop {
            now += 50 * MS;
            // Neither an order to go on nor a passed deadline begins a new total before the vCPU has run.
            lease.go_on(now);
            match lease.stop(now, MAX) {
                Ok(begins) => assert!(!begins),
                Err(error) => break assert_eq!(error, LeaseError::Total),
            }
            renewals += 1;
        }
        assert_eq!(renewals, (VCPU_STOP_TOTAL_MAX - MAX).as_millis() / 50);
        assert!(now + MAX - start > VCPU_STOP_TOTAL_MAX);
        // The vCPU goes on, and may then be stopped again.
        assert_eq!(lease.remaining(now), None);
        assert_eq!(lease.stop(now, MAX), Ok(true));
    }
}
