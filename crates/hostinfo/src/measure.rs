//! Measures the cost of messages between the CPUs of this host, and the latency to other hosts (Multikernel,
//! SOSP '09, section 4.9: "URPC communication latency and bandwidth between all core pairs").
//!
//! - `pair`: two CPUs;
//! - `hosts`: other hosts;
//! - `cache`: the results, kept until the host starts again.
//!
//! The process `mirrorball measure`, which `cluster up` starts, and `mirrorball topology --measure` call this
//! through [`crate::facts::measure`]. Only CPUs that this process may use are measured, and pairs that can't
//! be measured are omitted. `knowledge::pairs` orders the pairs. The time for all is bounded ([`LIMIT`]), and
//! pairs share it equally.

mod cache;
mod hosts;
mod pair;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use knowledge::pairs::pairs;
use knowledge::route_costs::{COPY, RING};
use knowledge::{Base, Fact, Machine};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

pub use cache::{MeasureLock, MeasurementCache, Measurements};
pub use hosts::reach;
use pair::{MeasureError, PairReport};

/// Time limit of all pairs together.
pub const LIMIT: Duration = Duration::from_secs(2);
/// Time limit of one pair; more makes the medians no better.
const PAIR_TIMEOUT: Duration = Duration::from_millis(4);
/// Time limit of a pair for a CPU that other work keeps busy. The next pair follows.
const PAIR_BUSY_TIMEOUT: Duration = Duration::from_millis(250);

/// The CPUs that this process may use.
pub fn allowed() -> BTreeSet<i64> {
    let Ok(mine) = sched_getaffinity(Pid::from_raw(0)) else {
        return BTreeSet::new();
    };
    let all = (0..CpuSet::count()).filter(|cpu| mine.is_set(*cpu).unwrap_or(false));
    all.filter_map(|cpu| i64::try_from(cpu).ok()).collect()
}

/// Measures between the allowed CPUs of the first host in `found`, which is this one, within `limit`.
pub fn measure(found: &Base, allowed: &BTreeSet<i64>, limit: Duration) -> Vec<Fact> {
    let Some(host) = Machine::of(found).hosts.into_iter().next() else {
        return Vec::new();
    };
    let end = Instant::now() + limit;
    let mut pairs = pairs(&host, allowed);
    let mut facts = Vec::new();
    while !pairs.is_empty() {
        let mut busy = Vec::new();
        for (done, (one, other)) in pairs.iter().enumerate() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return facts;
            }
            let [Ok(first), Ok(second)] = [one, other].map(|cpu| usize::try_from(*cpu)) else {
                continue;
            };
            // The time that one pair saves goes to the others.
            let rest = u32::try_from(pairs.len() - done).unwrap_or(u32::MAX);
            match pair::measure(
                first,
                second,
                PAIR_TIMEOUT.min(left / rest),
                left.min(PAIR_BUSY_TIMEOUT),
            ) {
                Ok(measured) => facts.extend(facts_of(&host.name, *one, *other, &measured)),
                Err(MeasureError::Busy) => busy.push((*one, *other)),
                Err(MeasureError::Unusable) => {}
            }
        }
        // Busy pairs are tried again, while there is time.
        pairs = busy;
    }
    facts
}

fn facts_of(host: &str, one: i64, other: i64, measured: &PairReport) -> Vec<Fact> {
    let ways = [(one, other, &measured.forward), (other, one, &measured.reverse)];
    let facts = ways.into_iter().flat_map(|(from, to, way)| {
        let fact = |kind, transport: &str, value: f64| {
            // In facts, zero means that nothing is known.
            let value = (value.round() as i64).max(1);
            Fact::new(
                kind,
                [
                    host.into(),
                    from.into(),
                    to.into(),
                    transport.into(),
                    value.into(),
                ],
            )
        };
        [
            fact("latency_ns", RING, measured.latency_ns),
            fact("send_ns", RING, way.send_ns),
            fact("bandwidth_mb_s", RING, way.ring_mb_s),
            fact("bandwidth_mb_s", COPY, way.copy_mb_s),
        ]
    });
    facts.collect()
}
