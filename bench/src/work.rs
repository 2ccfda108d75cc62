//! The work that is timed; the same code runs in the guest and on the host.

use std::time::{Duration, Instant};

/// Rounds of the integer loop: about a second in software emulation.
const COMPUTE_ROUNDS: u64 = 300_000_000;
/// Words of the memory walk: 8 MiB, beyond most second-level caches.
const WALK_WORDS: usize = 1 << 20;

/// An integer loop and a dependent walk through memory.
pub fn compute() -> Duration {
    let start = Instant::now();
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..COMPUTE_ROUNDS {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    }
    let mut words = vec![0u32; WALK_WORDS];
    for (index, word) in words.iter_mut().enumerate() {
        *word = (index as u32).wrapping_mul(1_664_525).wrapping_add(1_013_904_223) % WALK_WORDS as u32;
    }
    let mut at = (x % WALK_WORDS as u64) as u32;
    for _ in 0..WALK_WORDS {
        at = words[at as usize];
    }
    std::hint::black_box(at);
    start.elapsed()
}
