//! Two threads that sleep until the other one wakes them, each on an otherwise idle CPU.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};

use bench::Outcome;
use bench::cpu::pin;

use crate::each_ns;

/// Sleeps until `turn` is `wanted`.
fn sleep_until(turn: &AtomicU64, wanted: u64, over: &AtomicBool) {
    while turn.load(Ordering::Acquire) != wanted && !over.load(Ordering::Acquire) {
        thread::park();
    }
}

/// Time until a thread on `here` has woken one on `there` and was woken by it (a futex each); nanoseconds.
pub fn round_trip(here: usize, there: usize) -> Outcome<f64> {
    // An even number is the turn of `here`.
    let (turn, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let answer = |asker: Thread| -> Result<(), String> {
        let pinned = pin(there).map_err(|error| error.to_string());
        let mut count = 1;
        while !over.load(Ordering::Acquire) {
            sleep_until(&turn, count, &over);
            turn.store(count + 1, Ordering::Release);
            asker.unpark();
            count += 2;
        }
        pinned
    };
    pin(here)?;
    let asker = thread::current();
    thread::scope(|scope| {
        let other = scope.spawn(|| answer(asker));
        let mut count = 0;
        let measured = each_ns(|| {
            turn.store(count + 1, Ordering::Release);
            other.thread().unpark();
            count += 2;
            sleep_until(&turn, count, &over);
            Ok(())
        });
        over.store(true, Ordering::Release);
        other.thread().unpark();
        other.join().map_err(|_| "a thread panicked")??;
        measured
    })
}
