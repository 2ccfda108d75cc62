use shard_api::relation::Counter;

use super::*;

const KHZ: u32 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// A round: at `at` the other counter read `at`, and `ahead` more; the round took `trip`.
fn round(at: u64, ahead: u64, trip: u64) -> Round {
    Round {
        asked: at.wrapping_sub(trip / 2),
        read: at.wrapping_add(ahead),
        answered: at.wrapping_add(trip / 2),
    }
}

fn drift(ahead: u64, error: u64) -> Drift {
    let relation = Relation {
        here: 0,
        there: ahead,
        error,
    };
    Drift::new(relation, Ratio::ONE, KHZ)
}

#[test]
fn one_round_is_worth_less_as_time_goes_by() {
    let drift = drift(7, 100);
    let Estimate { ahead, error, .. } = drift.at(0);
    assert_eq!((ahead, error), (7, 100));
    // 500 us in each second.
    assert_eq!(drift.at(SECOND).error, 100 + SECOND / 2_000);
    assert_eq!(drift.at(SECOND).ahead, 7);
}

#[test]
fn the_rate_is_as_good_as_two_rounds_are_short_and_far_apart() {
    let mut drift = drift(0, 1_000);
    // 40 parts of a million.
    for second in 1..=50 {
        let way = round(second * SECOND, second * 40_000, 2_000);
        drift.learn(way).expect("a valid round");
    }
    let known = drift.at(60 * SECOND);
    assert_eq!(known.rate_ppb, 40_000);
    // 2 us in 50 s, and the wander of crystals.
    assert_eq!(known.rate_error_ppb, 40 + WANDER_PPB);
    assert_eq!(known.ahead, 60 * 40_000);
    assert_eq!(known.error, 1_000 + 540 * 10);
}

/// A long round after a short one improves nothing; of two long ones the later is as good.
#[test]
fn the_shortest_of_some_rounds_counts_until_it_is_too_old() {
    let mut drift = drift(0, 10);
    for number in 1..40 {
        drift.learn(round(number * SECOND / 10, 0, 20)).expect("right");
    }
    let known = drift.at(4 * SECOND);
    // Asymmetric by all that it may be.
    drift
        .learn(round(4 * SECOND, 4_000, 8_200))
        .expect("a possible round");
    assert_eq!(drift.at(4 * SECOND).error, known.error);
    assert_eq!(drift.at(4 * SECOND).ahead, 0);
    // Much later, all that is left of the short ones is worse.
    drift
        .learn(round(200 * SECOND, 4_000, 8_200))
        .expect("a possible round");
    assert_eq!(drift.at(200 * SECOND).ahead, 4_000);
}

#[test]
fn impossible_round_is_refused_and_changes_nothing() {
    let mut drift = drift(0, 100);
    let known = drift.at(SECOND);
    assert_eq!(
        drift.learn(round(SECOND, 10 * SECOND + SECOND, 10)),
        Err(Refused::Far(11_000))
    );
    assert_eq!(
        drift.learn(round(SECOND, 0_u64.wrapping_sub(20 * SECOND), 10)),
        Err(Refused::Far(-20_000))
    );
    assert_eq!(drift.learn(round(SECOND, 800_000, 10)), Err(Refused::Odd(800)));
    let endless = Round {
        asked: 0,
        read: 0,
        answered: 11 * SECOND,
    };
    assert_eq!(drift.learn(endless), Err(Refused::Long(11_000)));
    let backwards = Round {
        asked: 5,
        read: 0,
        answered: 4,
    };
    assert!(matches!(drift.learn(backwards), Err(Refused::Long(_))));
    assert_eq!(drift.at(SECOND), known);
}

#[test]
fn contradicting_round_is_accepted_when_it_continues_and_not_when_it_changes() {
    let mut drift = drift(0, 100);
    for number in 0..100 {
        // No two agree.
        let ahead = 2_000_000 + number * 1_000_000;
        assert!(
            drift
                .learn(round(SECOND + number * 1_000_000, ahead, 10))
                .is_err()
        );
    }
    assert_eq!(drift.at(SECOND).ahead, 0);
    let start = 2 * SECOND;
    for number in 1..DOUBTS {
        let at = start + u64::from(number) * 1_000_000;
        assert_eq!(
            drift.learn(round(at, 3 * SECOND, 10)),
            Err(Refused::Odd(3_000_000))
        );
    }
    assert_eq!(drift.at(start).ahead, 0);
    assert!(drift.learn(round(start + 9_000_000, 3 * SECOND, 10)).is_err());
    assert_eq!(drift.at(start).ahead, 3 * SECOND as i64);
    drift
        .learn(round(start + 10_000_000, 3 * SECOND, 10))
        .expect("the counter was set");
}

/// Counters wrap, and may be any distance apart.
#[test]
fn nothing_depends_on_where_counters_began() {
    let mut drifts = [0, 1 << 63, u64::MAX - 5 * SECOND].map(|start| {
        let counter = Counter {
            khz: KHZ * 2,
            digits: Some(32),
        };
        let ratio = Ratio::of(counter, KHZ).expect("it scales");
        let relation = Relation {
            here: start,
            there: start / 4,
            error: 100,
        };
        (start, Drift::new(relation, ratio, KHZ))
    });
    for (start, drift) in &mut drifts {
        for tenth in 1..=100 {
            let at = start.wrapping_add(tenth * SECOND / 10);
            let mut way = round(at, 0, 200);
            way.read = (*start / 4).wrapping_add(tenth * SECOND / 5);
            drift.learn(way).expect("a valid round");
        }
        let known = drift.at(start.wrapping_add(10 * SECOND));
        assert_eq!(known.rate_ppb, 0, "{start}");
        assert!(known.error < 200, "{known:?}");
    }
}
