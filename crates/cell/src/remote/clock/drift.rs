//! How another host's time-stamp counter runs against this one's: how far it is ahead, how fast that changes,
//! and how wrong both may be. Pure.
//!
//! [`shard_api::relation`] says what one round tells. Many say more: the shortest of each few seconds are
//! kept, as the minimum filters of NTP (RFC 5905, section 10) and PTP do, since what a round took longer than
//! another it spent in queues. Two of them tell the rate, and by the rate an old short round can be better
//! than a new long one.
//!
//! The bound that is told holds if the counters' rates differ by [`RATE_MAX_PPB`] at most, and if that
//! difference stays the same to within [`WANDER_PPB`] as long as rounds are kept, about a minute. What
//! contradicts that is refused, and if it keeps on, believed: then one of the counters was set, or stood
//! still, and all that was known is forgotten.

use shard_api::relation::{Ratio, Relation, Round};

/// Counters whose rates differ by more are no clocks, parts of a thousand millions: what Linux and NTP
/// correct at most (RFC 5905, section 7.1). KVM takes frequencies for equal that are 250 parts of a million
/// apart; crystals add 100 at most.
pub const RATE_MAX_PPB: u64 = 500_000;
/// By how much the difference of two rates changes in a minute, parts of a thousand millions: a crystal's by
/// some tenths of a part of a million for each degree.
pub const WANDER_PPB: u64 = 500;
/// Nobody's clock jumps further, seconds: a host that stood still for longer is given up by then.
pub const JUMP_MAX_S: u64 = 10;
/// Rounds are kept for so many times [`SLOT_MS`].
const SLOTS: usize = 32;
/// Of so long a time the best round is kept.
const SLOT_MS: u64 = 2_000;
/// So many rounds in a row that contradict what was known, and agree with one another, are believed.
const DOUBTS: u32 = 8;

const BILLION: f64 = 1e9;

/// What is known of another host's counter.
#[derive(Clone, Debug)]
pub struct Drift {
    /// Ticks in a millisecond.
    khz: u64,
    /// What the other counter is multiplied by.
    ratio: Ratio,
    /// The first slot begins then.
    start: u64,
    /// By time; never empty.
    kept: Vec<Point>,
    rate: Rate,
    doubt: Option<(Point, u32)>,
}

/// What one round tells.
#[derive(Clone, Copy, Debug)]
struct Point {
    /// When, by this host's counter.
    at: u64,
    /// What the other's read more then.
    ahead: i64,
    error: u64,
}

/// A difference of rates.
#[derive(Clone, Copy, Debug)]
struct Rate {
    ppb: f64,
    error_ppb: f64,
}

/// What is known for one moment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Estimate {
    /// What the other counter, scaled, reads more than this one, ticks; less if negative.
    pub ahead: i64,
    /// By how much that is wrong at most, ticks.
    pub error: u64,
    /// By how much faster it runs, parts of a thousand millions.
    pub rate_ppb: i64,
    /// By how much that is wrong at most.
    pub rate_error_ppb: u64,
}

/// Why a round is not believed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refused {
    /// It says nothing about the time at which it was made.
    #[error("a round took {0} ms")]
    Long(u64),
    /// Either the other host lies, or it was away for longer than anybody waits.
    #[error("its counter reads {0} ms off what it must read; it stood still, was set, or lies")]
    Far(i64),
    /// Not what the rounds before have shown.
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

    /// Moved to another moment.
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

    /// By the two points that tell it best.
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
    /// Known by one relation of a host's counter to this one, which has so many ticks in a millisecond.
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

    /// For the moment at which this host's counter reads `now`.
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

    /// A round has come back.
    ///
    /// # Errors
    /// If it can't be. Then it changes nothing, unless it is one of many that agree.
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

    /// Keeps a point if it is worth it.
    fn keep(&mut self, point: Point) -> bool {
        let slot = SLOT_MS * self.khz;
        let number = |at: u64| (at.wrapping_sub(self.start) as i64).div_euclid(slot as i64);
        match &mut self.kept[..] {
            // Of the same time, and by now worth less. The first is left alone: at the beginning it tells the
            // rate.
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
