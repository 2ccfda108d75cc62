//! The guest's TSC as this process computes it: the host's TSC, with one offset for all vCPUs of the VM.

use std::time::Duration;

use shard_api::relation::Ratio;

/// Conversion from the host's TSC to the guest's.
#[derive(Clone, Copy, Debug)]
pub struct GuestTsc {
    /// Added to the host's scaled TSC; `KVM_VCPU_TSC_OFFSET` of every vCPU.
    pub offset: u64,
    /// Factor that scales the host's TSC.
    pub ratio: Ratio,
    /// Frequency of the guest's TSC, kHz.
    pub khz: u32,
}

impl GuestTsc {
    /// Returns the value that the guest reads now.
    pub fn now(self) -> u64 {
        // SAFETY: reads a counter that every x86-64 processor has.
        let host = unsafe { std::arch::x86_64::_rdtsc() };
        self.ratio.scaled(host).wrapping_add(self.offset)
    }

    /// Returns the guest's time, nanoseconds. It is the same in all shards on all hosts.
    pub fn nanoseconds(self) -> u64 {
        let nanoseconds = u128::from(self.now()) * 1_000_000 / u128::from(self.khz.max(1));
        // It does not overflow within five hundred years.
        nanoseconds as u64
    }

    /// Returns the time from `now` to `due`; none when `due` has passed.
    pub fn left(self, now: u64, due: u64) -> Option<Duration> {
        let ticks = due.checked_sub(now).filter(|ticks| *ticks > 0)?;
        let nanoseconds = u128::from(ticks) * 1_000_000 / u128::from(self.khz.max(1));
        Some(Duration::from_nanos(
            u64::try_from(nanoseconds).unwrap_or(u64::MAX),
        ))
    }
}

/// Blocks until the guest's time reaches `ns`, or for `limit` at most. `now` returns the guest's time,
/// nanoseconds.
pub fn wait_until(ns: u64, limit: Duration, mut now: impl FnMut() -> u64) {
    // The guest's clock may step meanwhile.
    const STEP_POLL_INTERVAL: Duration = Duration::from_millis(1);
    let mut left = limit;
    while let Some(behind) = ns.checked_sub(now()).filter(|behind| *behind > 0)
        && !left.is_zero()
    {
        let wait = Duration::from_nanos(behind).min(STEP_POLL_INTERVAL).min(left);
        std::thread::sleep(wait);
        left -= wait;
    }
}

/// Returns the host's monotonic clock, nanoseconds. It is the same in all processes of a host.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the place lives through the call, which can't fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_at_the_target_time_or_at_its_timeout() {
        wait_until(5, Duration::from_secs(20), || 5);
        let since = monotonic_ns();
        wait_until(since + 3_000_000, Duration::from_secs(20), monotonic_ns);
        assert!(monotonic_ns() >= since + 3_000_000);
        let mut looks = 0;
        wait_until(u64::MAX, Duration::from_secs(20), || {
            looks += 1;
            if looks < 4 { 0 } else { u64::MAX }
        });
        assert_eq!(looks, 4, "a step is seen");
        let since = monotonic_ns();
        wait_until(u64::MAX, Duration::from_millis(4), || 0);
        assert!(monotonic_ns() >= since + 4_000_000);
    }

    #[test]
    fn ticks_convert_to_durations_by_the_tsc_frequency() {
        let tsc = GuestTsc {
            offset: 0,
            ratio: Ratio::ONE,
            khz: 2_000_000,
        };
        assert_eq!(tsc.left(100, 100), None);
        assert_eq!(tsc.left(200, 100), None);
        assert_eq!(tsc.left(100, 2_100), Some(Duration::from_micros(1)));
        assert!(tsc.left(0, u64::MAX) > Some(Duration::from_secs(1 << 32)));
    }
}
