//! Relation between the clocks of two hosts: the frequencies of their time-stamp counters, and the difference
//! of their values. Pure.
//!
//! The home sends a request and records the times of request and reply by its own counter. The other host
//! replies with the value of its counter, which it read at some time between the two. The middle is wrong by
//! at most half of the round trip (F. Cristian, "Probabilistic clock synchronization", 1989), and by less if
//! both directions are alike: with the times `there` and `back` of the directions, the error is `(there -
//! back) / 2`. The shortest of many rounds is the best.
//!
//! **The part of the error that a guest can see.** x86 guarantees nothing for counters on two CPUs, but
//! software relies on a time that does not run backwards from cause to effect. A cause on one host has an
//! effect on the other only by a message between the hosts; a page of memory is one, too. Let D be the time
//! of the fastest message. The effect is seen at least D after the cause by its host's counter, which is
//! behind by at most the error. So time is seen to run backwards only if the error is larger than D. The
//! error is `(there - back) / 2 <= (round trip) / 2 - D`, as neither direction takes less than D. So nothing
//! is seen unless the shortest round trip took longer than 4 D: two directions, each at twice the best. The
//! rounds use the same path and kind of connection as the shards' messages, and are shorter than those; the
//! best of hundreds is near 2 D. Between two secondary shards both errors add up, and nothing is seen if each
//! of the rounds took at most 3 D.
//!
//! That holds at the time of the measurement. Two crystals drive the counters of two hosts, and their
//! frequencies differ by some parts in a million: each such part adds a microsecond of error per second. The
//! home's monitor therefore continues the rounds as long as the VM lives, and steps the shards that fall
//! behind forward (`shard::span::tsc_step_barrier`).

use serde::{Deserialize, Serialize};

/// Difference of frequencies below which KVM treats them as equal and changes nothing, parts per million
/// (default of `tsc_tolerance_ppm` of its module).
const TOLERANCE_PPM: u64 = 250;

/// One round, in ticks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Round {
    /// This host's counter at the request.
    pub asked: u64,
    /// The other host's counter.
    pub read: u64,
    /// This host's counter at the reply.
    pub answered: u64,
}

impl Round {
    /// Returns the length of the round.
    pub fn trip(&self) -> u64 {
        self.answered.wrapping_sub(self.asked)
    }
}

/// Measured relation of two counters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Relation {
    /// Value of this host's counter.
    pub here: u64,
    /// Value of the other host's counter at the same time.
    pub there: u64,
    /// Greatest error, ticks of this host's counter.
    pub error: u64,
}

impl Relation {
    /// Returns the relation by the shortest of some rounds; none without rounds.
    pub fn of(rounds: impl IntoIterator<Item = Round>) -> Option<Self> {
        rounds.into_iter().min_by_key(Round::trip).map(Self::from)
    }

    /// Returns the offset to add to the other host's counter, scaled, so that the guest reads the same there
    /// as here, where `offset` is added.
    pub fn offset(self, offset: u64, ratio: Ratio) -> u64 {
        let guest = self.here.wrapping_add(offset);
        guest.wrapping_sub(ratio.scaled(self.there))
    }
}

impl From<Round> for Relation {
    /// Returns the relation by one round.
    fn from(round: Round) -> Self {
        let trip = round.trip();
        Self {
            here: round.asked.wrapping_add(trip / 2),
            there: round.read,
            error: trip.div_ceil(2),
        }
    }
}

/// Factor of a host's counter for the guest, as a binary fixed-point number.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    multiplier: u64,
    digits: u32,
}

/// A host's time-stamp counter.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Counter {
    /// Frequency, kHz.
    pub khz: u32,
    /// Binary digits after the point of the processor's scaling factor for guests; none if it can't scale.
    pub digits: Option<u32>,
}

/// Error: the frequencies of two counters can't be made equal.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "its time-stamp counter runs at {there} kHz, the home's at {here} kHz, and its processor cannot scale it"
)]
pub struct Apart {
    here: u32,
    there: u32,
}

impl Ratio {
    /// The counter without scaling.
    pub const ONE: Self = Self {
        multiplier: 1,
        digits: 0,
    };

    /// Returns the factor that KVM uses for the counter of a host if the guest's is to run at `khz`
    /// (`set_tsc_khz` in Linux's `arch/x86/kvm/x86.c`).
    ///
    /// # Errors
    /// Fails if the processor can't scale to that frequency.
    pub fn of(counter: Counter, khz: u32) -> Result<Self, Apart> {
        let host = u64::from(counter.khz);
        let tolerance = host * TOLERANCE_PPM / 1_000_000;
        if u64::from(khz).abs_diff(host) <= tolerance {
            return Ok(Self::ONE);
        }
        let apart = Apart {
            here: khz,
            there: counter.khz,
        };
        let digits = counter.digits.filter(|_| host > 0).ok_or(apart)?;
        let multiplier = (u128::from(khz) << digits) / u128::from(host);
        let multiplier = u64::try_from(multiplier).map_err(|_| apart)?;
        Ok(Self { multiplier, digits })
    }

    /// Returns the scaled value of a counter.
    pub fn scaled(self, ticks: u64) -> u64 {
        ((u128::from(ticks) * u128::from(self.multiplier)) >> self.digits) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MHZ: u64 = 1_000_000;

    fn round(asked: u64, read: u64, answered: u64) -> Round {
        Round {
            asked,
            read,
            answered,
        }
    }

    #[test]
    fn shortest_round_counts_and_its_half_bounds_the_error() {
        let rounds = [
            round(100, 7000, 300),
            round(400, 7251, 501),
            round(600, 7500, 900),
        ];
        let relation = Relation::of(rounds).expect("some rounds");
        assert_eq!((relation.here, relation.there, relation.error), (450, 7251, 51));
        assert_eq!(Relation::of([]), None);
        // Counters wrap.
        let around = Relation::of([round(u64::MAX - 9, 5, 10)]).expect("a round");
        assert_eq!((around.here, around.error), (0, 10));
    }

    /// With any times of both directions the error is within the bound, and no message is seen before it was
    /// sent.
    #[test]
    fn no_message_is_seen_to_arrive_before_it_was_sent() {
        let mut random = fastrand();
        for _ in 0..20_000 {
            let (start, true_offset) = (random() >> 1, random());
            // The fastest message takes this long; rounds are at most twice as slow each way.
            let fastest = 1 + random() % 10_000;
            let mut way = || fastest + random() % (fastest + 1);
            let rounds: Vec<Round> = (0..5)
                .map(|number| {
                    let (there, back) = (way(), way());
                    let asked = start.wrapping_add(number * 100_000);
                    let read = asked.wrapping_add(there).wrapping_add(true_offset);
                    round(asked, read, asked.wrapping_add(there + back))
                })
                .collect();
            let relation = Relation::of(rounds).expect("some rounds");
            let offset = relation.offset(0, Ratio::ONE);
            // The guest's time there at the home's time zero: the error.
            let error = offset.wrapping_add(true_offset) as i64;
            assert!(error.unsigned_abs() <= relation.error, "{error} {relation:?}");
            assert!(
                error.unsigned_abs() <= fastest,
                "{error} {relation:?}, fastest {fastest}"
            );
        }
    }

    /// The generator xorshift64*.
    fn fastrand() -> impl FnMut() -> u64 {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        move || {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_F491_4F6C_DD1D)
        }
    }

    #[test]
    fn a_guest_reads_the_same_on_both_hosts_at_other_frequencies() {
        // AMD's processors have 32 digits, Intel's 48.
        for (digits, here_khz, there_khz) in [(32, 3_000_000, 2_000_000), (48, 2_100_000, 3_700_000)] {
            let counter = Counter {
                khz: there_khz,
                digits: Some(digits),
            };
            let ratio = Ratio::of(counter, here_khz).expect("it scales");
            let (here, there) = (90_000 * MHZ, 123_456 * MHZ);
            let relation = Relation::of([round(here, there, here)]).expect("a round");
            let (home, part) = (5 * MHZ, relation.offset(5 * MHZ, ratio));
            for ms in [0, 1, 1000, 3_600_000] {
                let at_home = here + ms * u64::from(here_khz) + home;
                let at_part = ratio.scaled(there + ms * u64::from(there_khz)).wrapping_add(part);
                // The ratio is truncated, by less than one part in 10^9.
                let off = at_home.abs_diff(at_part);
                assert!(off <= 2 + at_home / 1_000_000_000, "{digits} {ms} {off}");
            }
        }
    }

    #[test]
    fn frequencies_that_cannot_be_made_equal_are_refused() {
        let counter = |khz, digits| Counter { khz, digits };
        assert_eq!(Ratio::of(counter(2_000_000, None), 2_000_500), Ok(Ratio::ONE));
        assert_eq!(Ratio::of(counter(2_000_000, Some(32)), 1_999_500), Ok(Ratio::ONE));
        let apart = Ratio::of(counter(2_000_000, None), 2_000_501).expect_err("apart");
        assert_eq!(
            apart.to_string(),
            "its time-stamp counter runs at 2000000 kHz, the home's at 2000501 kHz, and its processor \
             cannot scale it"
        );
        assert!(Ratio::of(counter(0, Some(48)), 1).is_err());
        assert!(Ratio::of(counter(1, Some(48)), u32::MAX).is_err());
        assert_eq!(
            Ratio::of(counter(2_000_000, Some(1)), 3_000_000)
                .expect("it scales")
                .scaled(7),
            10
        );
    }
}
