//! Offset and rate of another host's time-stamp counter against this one's, with the error of both. Pure.
//!
//! [`shard_api::relation`] computes the relation of one round. Many rounds give a better one: the shortest of
//! each few seconds are kept, as the minimum filters of NTP (RFC 5905, section 10) and PTP do, since the
//! additional time of a longer round was spent in queues. Two of them give the rate, and by the rate an old
//! short round can be better than a new long one.
//!
//! The reported bound holds if the counters' rates differ by [`RATE_MAX_PPB`] at most, and if that difference
//! stays the same to within [`WANDER_PPB`] as long as rounds are kept, about a minute. A round that
//! contradicts this is refused. If such rounds continue, they are accepted: then one of the counters was set,
//! or stopped, and all earlier rounds are dropped.

use shard_api::relation::{Ratio, Relation, Round};

/// Maximum difference of two counters' rates, parts of a thousand millions: the most that Linux and NTP
/// correct (RFC 5905, section 7.1). KVM treats frequencies as equal that are 250 parts of a million apart;
/// crystals add 100 at most.
pub const RATE_MAX_PPB: u64 = 500_000;
/// Maximum change in a minute of the difference of two rates, parts of a thousand millions: a crystal's
/// changes by some tenths of a part of a million for each degree.
pub const WANDER_PPB: u64 = 500;
/// Maximum jump of a clock, seconds: a host that stood still for longer is given up by then.
pub const JUMP_MAX_S: u64 = 10;
/// Number of kept rounds, each of [`SLOT_MS`].
const SLOTS: usize = 32;
/// Time of which the best round is kept, milliseconds.
const SLOT_MS: u64 = 2_000;
/// Number of rounds in a row that contradict the estimate, and agree with one another, after which they are
/// accepted.
const DOUBTS: u32 = 8;

const BILLION: f64 = 1e9;

/// Estimate of another host's counter.
#[derive(Clone, Debug)]
pub struct Drift {
    /// Ticks in a millisecond.
    khz: u64,
    /// The factor of the other counter.
    ratio: Ratio,
    /// The time at which the first slot begins.
    start: u64,
    /// The kept rounds, by time; never empty.
    kept: Vec<Point>,
    rate: Rate,
    doubt: Option<(Point, u32)>,
}

/// The relation that one round gives.
#[derive(Clone, Copy, Debug)]
struct Point {
    /// The time, by this host's counter.
    at: u64,
    /// The other counter's lead at that time, ticks.
    ahead: i64,
    error: u64,
}

/// A difference of rates.
#[derive(Clone, Copy, Debug)]
struct Rate {
    ppb: f64,
    error_ppb: f64,
}

/// The estimate for one moment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Estimate {
    /// Lead of the other counter, scaled, over this one, ticks; negative if it is behind.
    pub ahead: i64,
    /// Maximum error of the lead, ticks.
    pub error: u64,
    /// Difference of the rates, parts of a thousand millions; positive if the other counter is faster.
    pub rate_ppb: i64,
    /// Maximum error of that difference.
    pub rate_error_ppb: u64,
}

/// The reason why a round is refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refused {
    /// The round took too long to show when the counter was read.
    #[error("a round took {0} ms")]
    Long(u64),
    /// The other host lies, or it was away for longer than any peer waits.
    #[error("its counter reads {0} ms off what it must read; it stood still, was set, or lies")]
    Far(i64),
    /// The reading contradicts the rounds before.
    #[error("its counter reads {0} us off what it must read by the rounds before")]
    Odd(i64),
}

impl Point {
    fn of(relation: Relation, ratio: Ratio) -> Self {
        let Relation { here, there, error } = relation;
        Self {
            at: here,
            ahead: ratio.scaled(there).wrapping_sub(here) as i64,
            error,
        }
    }

    fn age(&self, now: u64) -> i64 {
        now.wrapping_sub(self.at) as i64
    }

    /// The lead and its error at another moment.
    fn moved(&self, now: u64, rate: Rate) -> (i64, u64) {
        let age = self.age(now) as f64;
        let ahead = self.ahead.wrapping_add((age * rate.ppb / BILLION) as i64);
        let grown = (age.abs() * rate.error_ppb / BILLION).ceil();
        (ahead, self.error.saturating_add(grown as u64))
    }
}

impl Rate {
    const UNKNOWN: Self = Self {
        ppb: 0.0,
        error_ppb: RATE_MAX_PPB as f64,
    };

    /// The rate by the two points that give it best.
    fn of(points: &[Point]) -> Self {
        let mut best = Self::UNKNOWN;
        for (index, old) in points.iter().enumerate() {
            for new in &points[index + 1..] {
                let time = new.age(old.at).wrapping_neg() as f64;
                let error_ppb = (old.error as f64 + new.error as f64) * BILLION / time + WANDER_PPB as f64;
                if time > 0.0 && error_ppb < best.error_ppb {
                    let change = new.ahead.wrapping_sub(old.ahead) as f64;
                    let ppb = change * BILLION / time;
                    best = Self { ppb, error_ppb };
                }
            }
        }
        best
    }
}

impl Drift {
    /// The estimate after one relation of a host's counter to this one, which has so many ticks in a
    /// millisecond.
    pub fn new(relation: Relation, ratio: Ratio, khz: u32) -> Self {
        let point = Point::of(relation, ratio);
        Self {
            khz: u64::from(khz.max(1)),
            ratio,
            start: point.at,
            kept: vec![point],
            rate: Rate::UNKNOWN,
            doubt: None,
        }
    }

    /// The estimate for the moment at which this host's counter reads `now`.
    pub fn at(&self, now: u64) -> Estimate {
        let moved = self.kept.iter().map(|point| point.moved(now, self.rate));
        let (ahead, error) = moved.min_by_key(|(_, error)| *error).unwrap_or((0, u64::MAX));
        Estimate {
            ahead,
            error,
            rate_ppb: self.rate.ppb as i64,
            rate_error_ppb: self.rate.error_ppb as u64,
        }
    }

    /// Takes the result of a round.
    ///
    /// # Errors
    /// If the round is impossible. Then it changes nothing, unless it is one of many that agree.
    pub fn learn(&mut self, round: Round) -> Result<(), Refused> {
        let trip_ms = round.answered.wrapping_sub(round.asked) / self.khz;
        if trip_ms > 1_000 * JUMP_MAX_S {
            return Err(Refused::Long(trip_ms));
        }
        let point = Point::of(round.into(), self.ratio);
        let known = self.at(point.at);
        let apart = point.ahead.wrapping_sub(known.ahead);
        if apart.unsigned_abs() > point.error.saturating_add(known.error) {
            return Err(self.doubt(point, apart));
        }
        self.doubt = None;
        if self.keep(point) {
            self.rate = Rate::of(&self.kept);
        }
        Ok(())
    }

    /// Keeps a point if it improves the estimate.
    fn keep(&mut self, point: Point) -> bool {
        let slot = SLOT_MS * self.khz;
        let number = |at: u64| (at.wrapping_sub(self.start) as i64).div_euclid(slot as i64);
        match &mut self.kept[..] {
            // The point is of the same time, and by now worth less. The first is left alone: at the beginning
            // it gives the rate.
            [_, .., last] if number(last.at) == number(point.at) => {
                if point.error > last.moved(point.at, self.rate).1 {
                    return false;
                }
                *last = point;
            }
            _ => self.kept.push(point),
        }
        if self.kept.len() > SLOTS {
            self.kept.remove(0);
        }
        true
    }

    fn doubt(&mut self, point: Point, apart: i64) -> Refused {
        let khz = self.khz as i64;
        if apart.unsigned_abs() > 1_000 * JUMP_MAX_S * self.khz {
            return Refused::Far(apart / khz);
        }
        let agrees = self.doubt.filter(|(other, _)| {
            let (ahead, error) = other.moved(point.at, Rate::UNKNOWN);
            let off = point.ahead.wrapping_sub(ahead).unsigned_abs();
            off <= point.error.saturating_add(error)
        });
        let count = 1 + agrees.map_or(0, |(_, count)| count);
        self.doubt = Some((point, count));
        if count >= DOUBTS {
            (self.kept, self.rate, self.doubt) = (vec![point], Rate::UNKNOWN, None);
        }
        Refused::Odd((i128::from(apart) * 1000 / i128::from(khz)) as i64)
    }
}

#[cfg(test)]
mod tests;
