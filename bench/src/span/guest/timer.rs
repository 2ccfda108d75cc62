//! Timers of a guest: how late a sleep ends, and the time to set one.

use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::cpu::pin;
use bench::tables::median;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::each_ns;

/// Duration of a sleep, and number of sleeps.
const SLEEP: Duration = Duration::from_millis(1);
const SLEEPS: usize = 500;
/// Sooner than the kernel's next tick, so that the CPU's own timer must be set.
const SOON: Duration = Duration::from_micros(900);

/// Excess of a sleep on `cpu`: the median, nanoseconds.
pub fn late(cpu: usize) -> Outcome<f64> {
    pin(cpu)?;
    let overshoot = |_| {
        let start = Instant::now();
        thread::sleep(SLEEP);
        start.elapsed().saturating_sub(SLEEP).as_nanos() as f64
    };
    let samples: Vec<f64> = (0..SLEEPS).map(overshoot).collect();
    median(&samples).ok_or_else(|| "nothing was measured".into())
}

/// Time to set a timer and stop it again, on `cpu`; nanoseconds.
pub fn arm(cpu: usize) -> Outcome<f64> {
    pin(cpu)?;
    let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::empty())?;
    let soon = Expiration::OneShot(TimeSpec::from_duration(SOON));
    each_ns(|| {
        timer.set(soon, TimerSetTimeFlags::empty())?;
        Ok(timer.unset()?)
    })
}
