//! Alarm of a vCPU: kicks its thread out of the guest when its APIC timer expires.
//!
//! Guests move most timers to a later time before they expire: a time-out is cancelled, or an idle CPU stops
//! its tick and then halts. So an alarm that would expire too early is left armed. It costs one exit if the
//! vCPU still runs then.

use std::io;
use std::time::Duration;

use super::clock::monotonic_ns;
use crate::kick;

/// Permitted lateness of an alarm, nanoseconds: about the cost of arming it. The guest's clock and the host's
/// differ, so each conversion of the same deadline gives another value.
const SLACK_NS: u64 = 1_000;

/// A kernel timer (timer_create(2)) that signals the thread that created it.
#[derive(Debug)]
pub struct Alarm {
    id: libc::c_int,
    /// Expiry by the monotonic clock, nanoseconds; in the past if it has expired.
    expires_ns: u64,
}

impl Alarm {
    /// Creates an alarm for the calling thread, not armed.
    pub fn new() -> io::Result<Self> {
        // SAFETY: zero is a valid value of this structure of the kernel's.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_signo = kick::signal();
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        // SAFETY: no arguments.
        event.sigev_notify_thread_id = unsafe { libc::syscall(libc::SYS_gettid) } as libc::pid_t;
        let mut id: libc::c_int = 0;
        // SAFETY: both places live through the call; the kernel's timer numbers are ints.
        let made = unsafe {
            libc::syscall(
                libc::SYS_timer_create,
                libc::CLOCK_MONOTONIC,
                &raw mut event,
                &raw mut id,
            )
        };
        if made == 0 {
            Ok(Self { id, expires_ns: 0 })
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Arms the alarm for `left` from now. It may expire earlier, so a vCPU that still needs it then arms it
    /// again.
    pub fn set(&mut self, left: Duration) {
        let now = monotonic_ns();
        let left_ns = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
        let due_ns = now.saturating_add(left_ns);
        if is_good_enough(self.expires_ns, now, due_ns) {
            return;
        }
        // Zero would disarm the timer.
        let left = left.max(Duration::from_nanos(1));
        let value = libc::itimerspec {
            it_interval: libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: libc::timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
                tv_nsec: left.subsec_nanos().into(),
            },
        };
        // SAFETY: the timer is this structure's; the value lives through the call. Valid values cannot fail.
        unsafe {
            libc::syscall(
                libc::SYS_timer_settime,
                self.id,
                0,
                &raw const value,
                std::ptr::null_mut::<libc::itimerspec>(),
            )
        };
        self.expires_ns = due_ns;
    }
}

/// Returns whether an alarm that expires at `expires_ns` serves for the deadline `due_ns`.
fn is_good_enough(expires_ns: u64, now_ns: u64, due_ns: u64) -> bool {
    now_ns < expires_ns && expires_ns <= due_ns.saturating_add(SLACK_NS)
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer is this structure's.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.id) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn armed_alarm_is_kept_unless_expired_or_too_late() {
        // No alarm was armed, or it has expired.
        assert!(!is_good_enough(0, 5_000, 9_000));
        assert!(!is_good_enough(5_000, 5_000, 9_000));
        for goes_off in [5_001, 8_000, 9_000, 9_000 + SLACK_NS] {
            assert!(is_good_enough(goes_off, 5_000, 9_000), "{goes_off}");
        }
        assert!(!is_good_enough(9_001 + SLACK_NS, 5_000, 9_000));
    }
}
