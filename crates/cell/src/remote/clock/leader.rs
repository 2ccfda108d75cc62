//! Decides which of a VM's hosts has the fastest clock, and the steps by which the others follow it. Pure.
//!
//! The guest's counter at a shard is the host's, scaled, and an offset. Hosts drift apart, and the guest's
//! counters stay together because the offsets of those that are behind grow: a guest tolerates a counter that
//! jumps ahead by a microsecond, and none that goes back. So the guest's time runs as fast as the fastest
//! host's counter. Slowing that one down instead would take a new frequency, and KVM treats frequencies as
//! equal that are 250 parts of a million apart.
//!
//! The home's monitor decides for all: it makes rounds with every other host, and those make none with one
//! another. If each host followed the one that it measures to be ahead, errors would add up in circles, and
//! the guest's time would run away. A decision counts at once for the next decision; the shards follow after
//! the time that an order takes.
//!
//! The readings of two shards on different hosts at the same moment differ by the errors of their estimates
//! ([`Estimate::error`] of each), by a step that is not worth its cost yet ([`Leader::worth`]), and by their
//! drift while an order is on its way.

use shard_api::relation::{Ratio, Relation, Round};

use super::drift::{Drift, Estimate, JUMP_MAX_S, Refused};

/// Minimum step, nanoseconds; shorter ones are left for later: each stops the vCPUs of a shard for some ten
/// microseconds.
pub const STEP_NS: u64 = 1_000;
/// Minimum and maximum time until the clocks are compared again, nanoseconds.
pub const LOOK_NS: std::ops::RangeInclusive<u64> = 10_000_000..=250_000_000;

/// The clocks of a VM's shards.
#[derive(Clone, Debug)]
pub struct Leader {
    /// Ticks of the guest's counter in a millisecond.
    khz: u64,
    shards: Vec<Clock>,
}

/// The clock of one shard.
#[derive(Clone, Debug)]
pub struct Clock {
    /// The offset to its host's counter, ticks.
    pub offset: u64,
    /// Drift of its host's counter; none on the home's host.
    pub drift: Option<Drift>,
    /// Number of steps that it was ordered to make.
    pub steps: u64,
    /// Sum of these steps, ticks.
    pub stepped: u64,
    /// Number of rounds that were refused.
    pub refused: u64,
    /// The reason for the last refusal.
    pub why: Option<Refused>,
}

/// The order that a shard adds another offset to its host's counter from now on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Step {
    /// The shard's number.
    pub shard: usize,
    /// The new offset, ticks.
    pub offset: u64,
}

impl Clock {
    /// The clock of a shard with that offset.
    pub fn new(offset: u64, drift: Option<Drift>) -> Self {
        Self {
            offset,
            drift,
            steps: 0,
            stepped: 0,
            refused: 0,
            why: None,
        }
    }

    /// The clock of a shard on another host, so that the guest reads the same there as here, where `offset`
    /// is added.
    pub fn there(relation: Relation, offset: u64, ratio: Ratio, khz: u32) -> Self {
        let drift = Drift::new(relation, ratio, khz);
        Self::new(relation.offset(offset, ratio), Some(drift))
    }
}

impl Leader {
    /// The clocks of all shards, the home's first. The guest's counter has so many ticks in a millisecond.
    pub fn new(khz: u32, shards: Vec<Clock>) -> Self {
        Self {
            khz: u64::from(khz.max(1)),
            shards,
        }
    }

    /// The shards' clocks.
    pub fn clocks(&self) -> &[Clock] {
        &self.shards
    }

    /// The lead of the guest's counter at a shard over the home's, with the estimate for its host, when the
    /// home's host's counter reads `now`.
    pub fn lead(&self, shard: usize, now: u64) -> Estimate {
        let known = |clock: &Clock| clock.drift.as_ref().map(|drift| drift.at(now));
        let (home, clock) = (self.shards.first(), self.shards.get(shard));
        let own = Estimate {
            ahead: 0,
            error: 0,
            rate_ppb: 0,
            rate_error_ppb: 0,
        };
        let known = clock.and_then(known).unwrap_or(own);
        let offset = |clock: Option<&Clock>| clock.map_or(0, |clock| clock.offset);
        let more = offset(clock).wrapping_sub(offset(home)) as i64;
        Estimate {
            ahead: known.ahead.wrapping_add(more),
            ..known
        }
    }

    /// The shortest step that is worth its cost with that error, ticks.
    pub fn worth(&self, error: u64) -> u64 {
        (self.ticks(STEP_NS)).max(error / 8)
    }

    /// Takes the result of a round with a shard's host.
    pub fn learn(&mut self, shard: usize, round: Round) {
        let Some(clock) = self.shards.get_mut(shard) else {
            return;
        };
        if let Some(Err(refused)) = clock.drift.as_mut().map(|drift| drift.learn(round)) {
            clock.refused += 1;
            clock.why = Some(refused);
        }
    }

    /// The steps to make when the home's host's counter reads `now`.
    pub fn steps(&mut self, now: u64) -> Vec<Step> {
        let leads: Vec<Estimate> = (0..self.shards.len())
            .map(|shard| self.lead(shard, now))
            .collect();
        let Some(first) = leads.iter().max_by_key(|lead| lead.ahead).copied() else {
            return Vec::new();
        };
        let mut steps = Vec::new();
        for (shard, lead) in leads.iter().enumerate() {
            let behind = first.ahead.wrapping_sub(lead.ahead).unsigned_abs();
            // At most two jumps, of two hosts: impossible readings were refused before.
            if behind < self.worth(lead.error.max(first.error))
                || behind > self.ticks(2_000_000_000 * JUMP_MAX_S)
            {
                continue;
            }
            let clock = &mut self.shards[shard];
            clock.offset = clock.offset.wrapping_add(behind);
            clock.steps += 1;
            clock.stepped += behind;
            let offset = clock.offset;
            steps.push(Step { shard, offset });
        }
        steps
    }

    /// Nanoseconds until the next comparison: before the counters can have drifted apart by a step.
    pub fn look_ns(&self, now: u64) -> u64 {
        let rates = (0..self.shards.len()).map(|shard| self.lead(shard, now));
        let rate = rates
            .map(|lead| lead.rate_ppb.unsigned_abs() + lead.rate_error_ppb)
            .max();
        let (shortest, longest) = LOOK_NS.into_inner();
        let look_ns = STEP_NS * 1_000_000_000 / rate.unwrap_or(0).max(1);
        look_ns.clamp(shortest, longest)
    }

    /// Converts ticks to nanoseconds.
    pub fn nanoseconds(&self, ticks: i64) -> i64 {
        (i128::from(ticks) * 1_000_000 / i128::from(self.khz)) as i64
    }

    fn ticks(&self, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.khz) / 1_000_000) as u64
    }
}

#[cfg(test)]
mod tests;
