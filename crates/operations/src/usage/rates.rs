//! Rates: differences of a vCPU's or a CPU's counters between two readings.
//!
//! A counter that is lower than before has begun anew, and has no rate. So has a thread that was not there
//! before: another boot, or another VM of the same name.

use super::reading::{Counters, CpuReading, VcpuReading};

/// Shortest time between two readings that has rates, in milliseconds: counters are in milliseconds.
const ELAPSED_MS_MIN: u64 = 50;
/// Thousandths of a whole.
const MILLI: u64 = 1000;

/// Shares of time, in thousandths of one CPU, and frequencies of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rates {
    pub(super) run_milli: Option<u64>,
    pub(super) wait_milli: Option<u64>,
    pub(super) spin_milli: Option<u64>,
    pub(super) halt_milli: Option<u64>,
    pub(super) halts_per_s: Option<u64>,
    pub(super) exits_per_s: Option<u64>,
    /// Number of moves between CPUs since the reading before.
    pub(super) migrated: Option<u64>,
}

impl Rates {
    /// Returns the rates of a vCPU between two readings of it.
    pub(super) fn between(before: &VcpuReading, after: &VcpuReading) -> Self {
        let elapsed_ms = after.at_ms.saturating_sub(before.at_ms);
        let is_same = (before.shard_pid, before.thread_id) == (after.shard_pid, after.thread_id)
            && after.thread_id.is_some();
        if !is_same || elapsed_ms < ELAPSED_MS_MIN || began_anew(&before.counters, &after.counters) {
            return Self::default();
        }
        let (old, new) = (&before.counters, &after.counters);
        let share = |of: fn(&Counters) -> Option<u64>| {
            difference(of(old), of(new)).map(|ms| ms.saturating_mul(MILLI) / elapsed_ms)
        };
        // Rounded: one event in 2.001 s is 0 a second, and one in 1.999 s is 1.
        let per_s = |of: fn(&Counters) -> Option<u64>| {
            let events = difference(of(old), of(new))?;
            Some((events.saturating_mul(MILLI) + elapsed_ms / 2) / elapsed_ms)
        };
        Self {
            run_milli: share(|counters| counters.ran_ms),
            wait_milli: share(|counters| counters.waited_ms),
            spin_milli: share(|counters| counters.spun_ms),
            halt_milli: halted_ms(before, after, elapsed_ms).map(|ms| ms * MILLI / elapsed_ms),
            halts_per_s: per_s(|counters| counters.halts),
            exits_per_s: per_s(|counters| counters.exits),
            migrated: difference(old.migrations, new.migrations),
        }
    }
}

/// Whether a counter is lower than before: the thread is another one with the same id.
fn began_anew(before: &Counters, after: &Counters) -> bool {
    let counters: [fn(&Counters) -> Option<u64>; 5] = [
        |counters| counters.ran_ms,
        |counters| counters.waited_ms,
        |counters| counters.halts,
        |counters| counters.exits,
        |counters| counters.migrations,
    ];
    counters
        .iter()
        .any(|of| of(after) < of(before) && of(after).is_some())
}

fn difference(before: Option<u64>, after: Option<u64>) -> Option<u64> {
    after?.checked_sub(before?)
}

/// Time that the vCPU was halted between two readings, in milliseconds. KVM counts a halt when it ends:
///
/// - no halt at either reading: KVM's difference;
/// - one halt at both: all of the time;
/// - else a part of a halt is missing in the difference, or is from before: the time for which the thread
///   neither ran nor waited for a CPU.
///
/// None if KVM does not count halts.
fn halted_ms(before: &VcpuReading, after: &VcpuReading, elapsed_ms: u64) -> Option<u64> {
    let (old, new) = (&before.counters, &after.counters);
    let counted = difference(old.halted_ms, new.halted_ms)?;
    let ms = match (before.is_halted, after.is_halted) {
        (Some(false), Some(false)) | (None, _) | (_, None) => counted,
        (Some(true), Some(true)) if old.halts == new.halts && counted == 0 => elapsed_ms,
        _ => {
            let worked = difference(old.ran_ms, new.ran_ms)?;
            let waited = difference(old.waited_ms, new.waited_ms).unwrap_or(0);
            elapsed_ms.saturating_sub(worked).saturating_sub(waited)
        }
    };
    Some(ms.min(elapsed_ms))
}

/// Returns the share of time that a CPU worked between two readings, in thousandths.
pub(super) fn busy_milli(before: &CpuReading, after: &CpuReading) -> Option<u64> {
    let total = after.total_ticks.checked_sub(before.total_ticks)?;
    let busy = after.busy_ticks.checked_sub(before.busy_ticks)?;
    // The kernel's counters are read one after another.
    busy.min(total).saturating_mul(MILLI).checked_div(total)
}

/// Returns the sum of a VM's vCPUs; none if it is unknown of one.
pub(super) fn sum(values: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    let mut sum = None;
    for value in values {
        sum = Some(u64::saturating_add(sum.unwrap_or(0), value?));
    }
    sum
}
