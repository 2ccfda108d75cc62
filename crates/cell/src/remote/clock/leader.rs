//! Who of a VM's hosts has the fastest clock, and by what steps the others follow it. Pure.
//!
//! The guest's counter at a shard is the host's, scaled, and an offset. Hosts drift apart, and what keeps the
//! guest's counters together is that the offsets of those that are behind grow: a guest bears a counter that
//! jumps ahead by a microsecond, none that goes back. So the guest's time runs as fast as the fastest host's
//! counter. To slow that one down instead its frequency would have to be set, and KVM takes those for equal
//! that are 250 parts of a million apart.
//!
//! One decides for all, the home's monitor: it asks every other host, and those don't ask one another. Were
//! each to follow whoever it takes to be ahead, errors would add up in circles, and the guest's time would
//! run away. What it decides holds at once for what it decides next; the shards come after by the time that
//! an order takes.
//!
//! What two shards of different hosts read at the same moment differs by what is not known of them
//! ([`Estimate::error`] of each), by a step that is not worth its cost yet ([`Leader::worth`]), and by what
//! they drift while an order is on its way.

use shard_api::relation::{Ratio, Relation, Round};

use super::drift::{Drift, Estimate, JUMP_MAX_S, Refused};

/// Steps that are shorter are left for later, nanoseconds: each stops the vCPUs of a shard for some ten
/// microseconds.
pub const STEP_NS: u64 = 1_000;
/// How long a look at the clocks holds, nanoseconds, at least and at most.
pub const LOOK_NS: std::ops::RangeInclusive<u64> = 10_000_000..=250_000_000;

/// The clocks of a VM's shards.
#[derive(Clone, Debug)]
pub struct Leader {
    /// Ticks of the guest's in a millisecond.
    khz: u64,
    shards: Vec<Clock>,
}

/// One shard's.
#[derive(Clone, Debug)]
pub struct Clock {
    /// What is added to its host's counter.
    pub offset: u64,
    /// How its host's counter runs; none on the home's host.
    pub drift: Option<Drift>,
    /// How often it was ordered forward,
    pub steps: u64,
    /// by how many ticks in all.
    pub stepped: u64,
    /// Rounds that were not believed,
    pub refused: u64,
    /// and why the last one was not.
    pub why: Option<Refused>,
}

/// A shard is to add more to its host's counter from now on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Step {
    /// Which.
    pub shard: usize,
    /// How much.
    pub offset: u64,
}

impl Clock {
    /// A shard's, to which that is added.
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

    /// Of a shard on another host: so that the guest reads the same there as here, where `offset` is added.
    pub fn there(relation: Relation, offset: u64, ratio: Ratio, khz: u32) -> Self {
        let drift = Drift::new(relation, ratio, khz);
        Self::new(relation.offset(offset, ratio), Some(drift))
    }
}

impl Leader {
    /// Of all shards, the home's first. The guest's counter has so many ticks in a millisecond.
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

    /// By what the guest's counter at a shard is ahead of the home's, and what is known of its host's; all
    /// that is known when the home's host's counter reads `now`.
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

    /// The shortest step that is worth its cost where that much is not known, ticks.
    pub fn worth(&self, error: u64) -> u64 {
        (self.ticks(STEP_NS)).max(error / 8)
    }

    /// A round with a shard's host has come back.
    pub fn learn(&mut self, shard: usize, round: Round) {
        let Some(clock) = self.shards.get_mut(shard) else {
            return;
        };
        if let Some(Err(refused)) = clock.drift.as_mut().map(|drift| drift.learn(round)) {
            clock.refused += 1;
            clock.why = Some(refused);
        }
    }

    /// Who is to step, when the home's host's counter reads `now`.
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
            // Two jumps, of two hosts, and no more: what counters read was looked at before.
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

    /// In how many nanoseconds to look again: before the counters can have drifted apart by a step.
    pub fn look_ns(&self, now: u64) -> u64 {
        let rates = (0..self.shards.len()).map(|shard| self.lead(shard, now));
        let rate = rates
            .map(|lead| lead.rate_ppb.unsigned_abs() + lead.rate_error_ppb)
            .max();
        let (shortest, longest) = LOOK_NS.into_inner();
        let look_ns = STEP_NS * 1_000_000_000 / rate.unwrap_or(0).max(1);
        look_ns.clamp(shortest, longest)
    }

    /// Ticks as nanoseconds.
    pub fn nanoseconds(&self, ticks: i64) -> i64 {
        (i128::from(ticks) * 1_000_000 / i128::from(self.khz)) as i64
    }

    fn ticks(&self, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.khz) / 1_000_000) as u64
    }
}

#[cfg(test)]
mod tests;
