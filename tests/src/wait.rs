//! Waiting with a limit.

use std::time::{Duration, Instant};

/// Calls `ready` every 50 ms until it gives a value; panics with `what` when `limit` has passed.
#[track_caller]
pub fn until<T>(what: &str, limit: Duration, ready: impl FnMut() -> Option<T>) -> T {
    match within(limit, ready) {
        Some(value) => value,
        None => panic!("{what}: not within {limit:?}"),
    }
}

/// Calls `ready` every 50 ms until it gives a value; returns nothing when `limit` has passed.
pub fn within<T>(limit: Duration, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return Some(value);
        }
        if start.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
