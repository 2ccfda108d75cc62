//! Rate of this machine's time stamp counter, which QEMU passes to its CPUs unchanged.

use std::time::{Duration, Instant};

/// How long the counter is watched. Its rate is then known to some 20 parts in a million.
const WATCHED: Duration = Duration::from_millis(60);
/// Readings of which the quickest counts: a process may be stopped in any of them.
const READINGS: usize = 8;

/// Ticks of the time stamp counter in a millisecond.
pub fn tsc_khz() -> u64 {
    let (start, first) = reading();
    std::thread::sleep(WATCHED);
    let (end, last) = reading();
    let passed_ns = end.duration_since(start).as_nanos();
    let ticks = u128::from(last.wrapping_sub(first));
    u64::try_from(ticks * 1_000_000 / passed_ns.max(1)).unwrap_or(u64::MAX)
}

/// A moment, and the counter then.
fn reading() -> (Instant, u64) {
    let readings = (0..READINGS).map(|_| {
        let before = Instant::now();
        // SAFETY: every x86-64 processor has this instruction, and Linux lets programs use it.
        let ticks = unsafe { core::arch::x86_64::_rdtsc() };
        (before.elapsed(), before, ticks)
    });
    let quickest = readings.min_by_key(|(took, ..)| *took);
    let (took, before, ticks) = quickest.expect("there are readings");
    (before + took / 2, ticks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree() {
        let (one, other) = (tsc_khz(), tsc_khz());
        assert!(one > 100_000, "{one} kHz");
        assert!(one.abs_diff(other) < one / 500, "{one} and {other} kHz");
    }
}
