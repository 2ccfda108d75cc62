//! The rate at which one CPU of this host allocates memory (Cellular Disco, SOSP '99, section 5.2: 732 KB in
//! 10 ms on its machine).

use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Memory of one measurement, in bytes: some milliseconds on a host of today.
const SAMPLE_BYTES: usize = 8 << 20;
/// Number of measurements. The fastest counts, since any other was disturbed.
const SAMPLES: usize = 3;
const PAGE_BYTES: usize = 4096;

/// Measures the rate in bytes per second, by the first writes to fresh pages; 0 if there is no memory for it.
pub(super) fn measure() -> u64 {
    let fastest = (0..SAMPLES).filter_map(|_| sample()).min();
    let Some(fastest) = fastest.filter(|time| !time.is_zero()) else {
        return 0;
    };
    let rate = SAMPLE_BYTES as u128 * 1_000_000_000 / fastest.as_nanos();
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// The time to allocate the pages of one measurement.
fn sample() -> Option<Duration> {
    let length = SAMPLE_BYTES.try_into().ok()?;
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the kernel chooses a range that no other code of this process uses.
    let start = unsafe { mmap_anonymous(None, length, access, MapFlags::MAP_PRIVATE) }.ok()?;
    let began = Instant::now();
    for offset in (0..SAMPLE_BYTES).step_by(PAGE_BYTES) {
        // SAFETY: `offset` is inside the mapping, which is writable and has no other reference.
        unsafe { start.cast::<u8>().add(offset).write_volatile(1) };
    }
    let time = began.elapsed();
    // SAFETY: the mapping is this function's own, and no reference to it is left.
    unsafe { munmap(start, SAMPLE_BYTES) }.ok()?;
    Some(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_of_a_host_is_above_a_page_in_ten_milliseconds() {
        assert!(measure() > PAGE_BYTES as u64 * 100);
    }
}
