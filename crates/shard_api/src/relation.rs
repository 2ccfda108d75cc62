//! How the clocks of two hosts go together: their time-stamp counters' frequencies and what one reads when
//! the other does. Pure.
//!
//! The home asks and notes when it asked and when it was answered, by its own counter; the other answers with
//! what its counter reads. It read that at some time between the two: the middle is wrong by half of the
//! round trip at most (F. Cristian, "Probabilistic clock synchronization", 1989), and by less if the ways are
//! alike: with `there` and `back` the times on the way, the error is `(there - back) / 2`. Of many rounds the
//! shortest is the best.
//!
//! **What of the error a guest can see.** x86 promises nothing of counters on two CPUs, but software takes it
//! for granted that time does not run backwards from cause to effect. A cause on one host has an effect on
//! the other by a message between the hosts only, for a page of memory is one, too. Let D be the time of the
//! fastest one. The effect is seen by its host's counter at least D after the cause, and that counter is
//! behind by the error at most; so time is seen to run backwards only if the error is larger than D. The
//! error is `(there - back) / 2 <= (round trip) / 2 - D`, as neither way is shorter than D. So nothing is
//! seen unless the shortest round trip took longer than 4 D: two ways, each at twice the best. The rounds go
//! the same way, by the same kind of connection, as what the shards say to one another, and are shorter than
//! that; the best of hundreds is near 2 D. Between two parts both errors add up, and nothing is seen if each
//! of the rounds took no longer than 3 D.
//!
//! That holds when it is measured. Counters of two hosts are driven by two crystals, whose frequencies differ
//! by some parts of a million: each such part adds a microsecond of error in a second. So the home's monitor
//! goes on with rounds as long as the VM lives, and has the shards that fall behind step forward
//! (`shard::span::tsc_step_barrier`).

use serde::{Deserialize, Serialize};

/// KVM takes frequencies for equal that differ by less, parts of a million (`tsc_tolerance_ppm` of its
/// module, as it is by default), and changes nothing then.
const TOLERANCE_PPM: u64 = 250;

/// One round, in ticks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Round {
    /// When this host asked.
    pub asked: u64,
    /// What the other host's counter read.
    pub read: u64,
    /// When this host was answered.
    pub answered: u64,
}

impl Round {
    /// How long it took.
    pub fn trip(&self) -> u64 {
        self.answered.wrapping_sub(self.asked)
    }
}

/// What is known of two counters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Relation {
    /// What this host's read,
    pub here: u64,
    /// when the other's read this.
    pub there: u64,
    /// By how many ticks of this host's that may be wrong.
    pub error: u64,
}

impl Relation {
    /// By the shortest of some rounds; none without any.
    pub fn of(rounds: impl IntoIterator<Item = Round>) -> Option<Self> {
        rounds.into_iter().min_by_key(Round::trip).map(Self::from)
    }

    /// What is to be added to the other host's counter, scaled, so that the guest reads the same there as
    /// here, where `offset` is added.
    pub fn offset(self, offset: u64, ratio: Ratio) -> u64 {
        let guest = self.here.wrapping_add(offset);
        guest.wrapping_sub(ratio.scaled(self.there))
    }
}

impl From<Round> for Relation {
    /// By one round.
    fn from(round: Round) -> Self {
        let trip = round.trip();
        Self {
            here: round.asked.wrapping_add(trip / 2),
            there: round.read,
            error: trip.div_ceil(2),
        }
    }
}

/// What a host's counter is multiplied by for the guest: a number with so many binary digits behind the
/// point.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    multiplier: u64,
    digits: u32,
}

/// A host's time-stamp counter.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Counter {
    /// Ticks in a millisecond.
    pub khz: u32,
    /// Binary digits of the ratio by which the processor scales it for guests; none if it can't.
    pub digits: Option<u32>,
}

/// Two counters whose frequencies can't be made one.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "its time-stamp counter runs at {there} kHz, the home's at {here} kHz, and its processor cannot scale it"
)]
pub struct Apart {
    here: u32,
    there: u32,
}

impl Ratio {
    /// As it is.
    pub const ONE: Self = Self {
        multiplier: 1,
        digits: 0,
    };

    /// By what KVM multiplies the counter of a host, told that the guest's is to run at `khz` (`set_tsc_khz`
    /// in Linux's `arch/x86/kvm/x86.c`).
    ///
    /// # Errors
    /// If it can't.
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

    /// What becomes of a counter.
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
    fn the_shortest_round_counts_and_its_half_bounds_the_error() {
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

    /// Whatever the way takes in either direction: the error is within the bound, and so is what a message
    /// shows.
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
            // What the guest reads there at the home's time zero: the error.
            let error = offset.wrapping_add(true_offset) as i64;
            assert!(error.unsigned_abs() <= relation.error, "{error} {relation:?}");
            assert!(
                error.unsigned_abs() <= fastest,
                "{error} {relation:?}, fastest {fastest}"
            );
        }
    }

    /// xorshift64*.
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
                // The ratio is cut off, by less than one part of a thousand millions.
                let off = at_home.abs_diff(at_part);
                assert!(off <= 2 + at_home / 1_000_000_000, "{digits} {ms} {off}");
            }
        }
    }

    #[test]
    fn frequencies_that_nothing_can_make_one_are_refused() {
        let counter = |khz, digits| Counter { khz, digits };
        assert_eq!(Ratio::of(counter(2_000_000, None), 2_000_500), Ok(Ratio::ONE));
        assert_eq!(Ratio::of(counter(2_000_000, Some(32)), 1_999_500), Ok(Ratio::ONE));
        let apart = Ratio::of(counter(2_000_000, None), 2_000_501).expect_err("apart");
        assert_eq!(
            apart.to_string(),
            "its time-stamp counter runs at 2000000 kHz, the home's at 2000501 kHz, and its processor cannot scale it"
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
