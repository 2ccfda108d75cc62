//! Two cache lines, one each way, and nothing else.

use std::sync::atomic::{AtomicU64, Ordering};

use bench::Outcome;
use bench::tables::each_ns;

use super::TRIPS;
use crate::patience::poll;
use crate::pinned::both;

#[repr(align(64))]
struct Line(AtomicU64);

fn wait(line: &Line, number: u64) -> Outcome<()> {
    poll(|| (line.0.load(Ordering::Acquire) == number).then_some(()))
}

pub fn round_trip() -> Outcome<f64> {
    let (there, back) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    both(
        || {
            for number in 1..=TRIPS {
                wait(&there, number)?;
                back.0.store(number, Ordering::Release);
            }
            Ok(())
        },
        || {
            each_ns(TRIPS, |number| {
                there.0.store(number + 1, Ordering::Release);
                wait(&back, number + 1)
            })
        },
    )
}
