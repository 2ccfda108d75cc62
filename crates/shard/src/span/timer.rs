//! A vCPU's alarm: kicks its thread out of the guest when its interrupt controller's timer expires.

use std::io;
use std::time::Duration;

use super::clock::monotonic_ns;
use crate::kick;

/// A timer of the kernel's (timer_create(2)) that signals the thread that made it.
#[derive(Debug)]
pub struct Alarm {
    id: libc::c_int,
    /// What it is set for, in the caller's time, and when it goes off by the clock.
    set_for: Option<(u64, u64)>,
}

impl Alarm {
    /// One for the calling thread, not set.
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
            Ok(Self { id, set_for: None })
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Sets it for `due`, a time `left` from now. Does nothing when it is set for that already and has not gone off: the
    /// caller's time and the clock do not run alike, so it may go off too early.
    pub fn set(&mut self, due: u64, left: Duration) {
        let now = monotonic_ns();
        if self
            .set_for
            .is_some_and(|(known, goes_off)| known == due && now < goes_off)
        {
            return;
        }
        // Zero would turn it off.
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
        // SAFETY: the timer is ours; the value lives through the call. It can't fail with sound values.
        unsafe {
            libc::syscall(
                libc::SYS_timer_settime,
                self.id,
                0,
                &raw const value,
                std::ptr::null_mut::<libc::itimerspec>(),
            )
        };
        let left_ns = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
        self.set_for = Some((due, now.saturating_add(left_ns)));
    }

    /// The time that it was set for is over, or nobody wants it any more: a late signal does no harm.
    pub fn forget(&mut self) {
        self.set_for = None;
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer is ours.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.id) };
    }
}
