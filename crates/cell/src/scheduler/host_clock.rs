//! Monotonic clock of the host, which all its cells read alike.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use policy::cpu::Nanos;

/// Time since the host's start.
pub(crate) fn monotonic() -> Nanos {
    // The clock is always there; at 0 no window is open.
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
