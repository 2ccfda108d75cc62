//! Time limits: no wait of the bench is without one.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use bench::Outcome;

/// Limit of one wait, or of all those of one figure: far longer than any that will end.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Looks between two looks at the clock.
const LOOKS: u32 = 1 << 16;

/// The time at which a wait that begins now is given up.
pub fn soon() -> Option<Instant> {
    Some(Instant::now() + LIMIT)
}

/// Calls `look` until it returns a value. Inlined, so that the compared code pays as little for it as
/// possible.
#[inline(always)]
pub fn poll<T>(mut look: impl FnMut() -> Option<T>) -> Outcome<T> {
    let mut end = None;
    loop {
        for _ in 0..LOOKS {
            if let Some(found) = look() {
                return Ok(found);
            }
            spin_loop();
        }
        if Instant::now() > *end.get_or_insert_with(|| Instant::now() + LIMIT) {
            return Err("the other side does not answer".into());
        }
    }
}
