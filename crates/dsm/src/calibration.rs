//! Calibrates the CPU time after which a faulting thread has certainly made progress: twice the measured
//! cost of a fault.

use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use coherence::Right;
use nix::poll::{PollFd, PollFlags, poll};

use crate::PAGE_LEN;
use crate::clock::ran_ns;
use crate::region::{Method, Region, RegionError, RegionOptions};
use crate::userfault::{FAULTS_MAX, Fault};

/// Faults that are measured.
const SAMPLES: u32 = 32;
/// Faults that are timed together, since reading a thread's time costs a part of a fault.
const BATCH: u32 = 4;
/// Bounds of the time that a thread runs before its page may be released, nanoseconds.
const ENOUGH_NS: RangeInclusive<u64> = 2_000..=500_000;
/// Interval at which the serving thread checks whether the worker has ended, milliseconds.
const POLL_INTERVAL_MS: u8 = 50;

/// Measures the time, nanoseconds, by faults of this thread in a region of its own.
///
/// # Errors
/// [`RegionError`] if there is no such region.
pub fn enough_ns(method: Option<Method>, options: RegionOptions<'_>) -> Result<u64, RegionError> {
    let region = Region::with(SAMPLES, 1, method, options)?;
    (0..region.pages()).for_each(|page| region.clear(page));
    let costs_ns = with_fault_server(&region, true, || {
        let thread = nix::unistd::gettid().as_raw();
        let cost_ns = |first: u32| {
            let before = ran_ns(thread).unwrap_or(0);
            (first..first + BATCH).for_each(|page| touch(&region, page));
            (ran_ns(thread).unwrap_or(0) - before) / u64::from(BATCH)
        };
        (0..SAMPLES).step_by(BATCH as usize).map(cost_ns).collect()
    });
    Ok((2 * median(costs_ns)).clamp(*ENOUGH_NS.start(), *ENOUGH_NS.end()))
}

/// Writes a word of a page.
pub fn touch(region: &Region, page: u32) {
    assert!(page < region.pages());
    // SAFETY: within the view.
    unsafe { region.view().add(page as usize * PAGE_LEN).write_volatile(1) };
}

/// Runs `work` on a new thread and serves its faults on this one. Between faults this thread polls or sleeps.
pub fn with_fault_server<T: Send>(region: &Region, polls: bool, work: impl FnOnce() -> T + Send) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let result = work();
            done.store(true, Ordering::Release);
            result
        });
        while !done.load(Ordering::Acquire) && !worker.is_finished() {
            let mut faults = [Fault::NONE; FAULTS_MAX];
            let count = region.userfault(0).read(&mut faults).unwrap_or(0);
            for page in faults[..count]
                .iter()
                .filter_map(|fault| region.page_at(fault.address))
            {
                let _ = region.open(page, Right::Write);
            }
            if count == 0 && !polls {
                let mut wait = [PollFd::new(region.userfault(0).as_fd(), PollFlags::POLLIN)];
                let _ = poll(&mut wait, POLL_INTERVAL_MS);
            } else if count == 0 {
                std::thread::yield_now();
            }
        }
        worker
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Returns the median, which an interrupted batch does not change. The host of a virtual machine can take its
/// CPU for milliseconds, which count as the thread's own time.
fn median(mut costs_ns: Vec<u64>) -> u64 {
    costs_ns.sort_unstable();
    costs_ns.get(costs_ns.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_batch_of_faults_does_not_change_the_calibration() {
        let quiet = [1_500, 1_400, 1_600, 1_500, 1_450, 1_550, 1_500, 1_500];
        assert_eq!(median(quiet.to_vec()), 1_500);
        let mut interrupted = quiet.to_vec();
        interrupted[3] = 5_000_000;
        interrupted[6] = 900_000;
        assert!(median(interrupted) <= 1_600, "more than each quiet batch");
        assert_eq!(median(Vec::new()), 0);
    }
}
