//! Page faults of a guest, on memory that is new to it or to its host.

use std::hint::black_box;
use std::time::Instant;

use bench::Outcome;
use bench::cpu::pin;

/// Large enough that the allocator maps it anew each time, and gives it back.
const BYTES: usize = 64 << 20;
const PAGE_BYTES: usize = 4096;

/// Times of the first write to a page of new memory: when the guest has not used it before, so that the host
/// has to find memory too; and when another mapping has just given it back. Means, nanoseconds.
pub fn fresh_and_again() -> Outcome<(f64, f64)> {
    pin(0)?;
    Ok((touch(), touch()))
}

fn touch() -> f64 {
    let mut memory = vec![0_u8; BYTES];
    let start = Instant::now();
    for page in memory.chunks_mut(PAGE_BYTES) {
        page[0] = 1;
        black_box(page);
    }
    start.elapsed().as_nanos() as f64 / (BYTES / PAGE_BYTES) as f64
}
