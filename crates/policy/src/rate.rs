//! A token bucket: the limit of a rate.

use std::time::{Duration, Instant};

/// Largest rate and burst, tokens. Sums and products of them can't overflow.
const TOKENS_MAX: u64 = 1 << 48;
const NANOS_PER_S: u128 = 1_000_000_000;

/// A token bucket. It is full at first.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Tokens per second.
    rate: u64,
    /// Largest number of tokens.
    burst: i64,
    /// Below zero while more was taken than there was.
    tokens: i64,
    filled: Instant,
}

impl Bucket {
    /// Creates a full bucket of `burst` tokens, at least 1, which earns `rate` tokens per second, or none.
    /// Both are at most 2^48.
    pub fn new(rate: u64, burst: u64, now: Instant) -> Self {
        let burst = burst.clamp(1, TOKENS_MAX).cast_signed();
        Self {
            rate: rate.min(TOKENS_MAX),
            burst,
            tokens: burst,
            filled: now,
        }
    }

    /// Returns whether the bucket has so many tokens at this time.
    pub fn has(&mut self, cost: u64, now: Instant) -> bool {
        self.fill(now);
        u64::try_from(self.tokens).is_ok_and(|tokens| tokens >= cost)
    }

    /// Takes tokens, as far as there are any.
    pub fn take(&mut self, cost: u64) {
        let cost = i64::try_from(cost).unwrap_or(i64::MAX);
        self.tokens = self.tokens.min(self.tokens.saturating_sub(cost).max(0));
    }

    /// Takes tokens, also those that are not earned yet: the next ones repay them.
    pub fn owe(&mut self, cost: u64) {
        let cost = cost.min(TOKENS_MAX).cast_signed();
        self.tokens = self.tokens.saturating_sub(cost).max(-TOKENS_MAX.cast_signed());
    }

    /// Returns the time until the bucket has a token; zero if it has one.
    pub fn wait(&mut self, now: Instant) -> Duration {
        self.fill(now);
        if self.tokens > 0 {
            return Duration::ZERO;
        }
        let missing = u128::from(1 + self.tokens.unsigned_abs());
        let nanos = match self.rate {
            0 => u128::MAX,
            rate => (missing * NANOS_PER_S).div_ceil(u128::from(rate)),
        };
        let since = now.saturating_duration_since(self.filled);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).saturating_sub(since)
    }

    fn fill(&mut self, now: Instant) {
        let nanos = now.saturating_duration_since(self.filled).as_nanos();
        let nanos = nanos.min(u128::from(u64::MAX));
        let earned = nanos * u128::from(self.rate) / NANOS_PER_S;
        if earned == 0 {
            // The time counts further, or a slow rate would never earn a token.
            return;
        }
        let room = u128::from(self.burst.abs_diff(self.tokens));
        if earned >= room {
            self.tokens = self.burst;
            self.filled = now;
            return;
        }
        // Smaller than the room, so it is a token's number.
        self.tokens += earned as i64;
        // The rest of a token's time is kept.
        let used = earned * NANOS_PER_S / u128::from(self.rate);
        self.filled += Duration::from_nanos(u64::try_from(used).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn debt_is_repaid_before_the_next_token() {
        let start = Instant::now();
        let mut bucket = Bucket::new(1000, 100, start);
        assert_eq!(bucket.wait(start), Duration::ZERO);
        bucket.owe(600);
        // 500 tokens of debt and one more.
        assert_eq!(bucket.wait(start), Duration::from_millis(501));
        let later = start + Duration::from_millis(300);
        assert_eq!(bucket.wait(later), Duration::from_millis(201));
        assert!(!bucket.has(1, start + Duration::from_millis(500)));
        assert!(bucket.has(1, start + Duration::from_millis(501)));
        assert_eq!(bucket.wait(start + Duration::from_secs(9)), Duration::ZERO);
        assert!(bucket.has(100, start + Duration::from_secs(9)));
        assert!(!bucket.has(101, start + Duration::from_secs(9)));
    }

    #[test]
    fn tokens_taken_without_debt_are_never_below_zero() {
        let now = Instant::now();
        let mut bucket = Bucket::new(10, 5, now);
        bucket.take(3);
        assert!(bucket.has(2, now) && !bucket.has(3, now));
        bucket.take(30);
        assert!(bucket.has(0, now) && !bucket.has(1, now));
        bucket.owe(4);
        bucket.take(1);
        assert_eq!(bucket.wait(now), Duration::from_millis(500));
        let mut empty = Bucket::new(0, 1, now);
        empty.owe(1);
        assert!(empty.wait(now + Duration::from_secs(9)) > Duration::from_secs(1 << 33));
    }

    proptest! {
        /// No schedule of requests that wait for a token gets more than burst, rate and one request.
        #[test]
        fn no_schedule_exceeds_the_rate(
            rate in 1_u64..1 << 40, burst in 1_u64..1 << 40,
            costs in prop::collection::vec(0_u64..1 << 41, 1..50),
            pauses in prop::collection::vec(0_u64..3_000_000_000, 50),
        ) {
            let start = Instant::now();
            let mut now = start;
            let mut bucket = Bucket::new(rate, burst, now);
            let mut taken = 0_u128;
            for (cost, pause) in costs.iter().zip(pauses) {
                now += Duration::from_nanos(pause) + bucket.wait(now + Duration::from_nanos(pause));
                prop_assert_eq!(bucket.wait(now), Duration::ZERO);
                let earned = (now - start).as_nanos() * u128::from(rate) / NANOS_PER_S;
                prop_assert!(taken < earned + u128::from(burst), "{} of {}", taken, earned);
                bucket.owe(*cost);
                taken += u128::from(*cost);
            }
        }

        #[test]
        fn any_numbers_are_handled(
            rate: u64, burst: u64, costs in prop::collection::vec(any::<u64>(), 0..20), nanos: u64,
        ) {
            let mut now = Instant::now();
            let mut bucket = Bucket::new(rate, burst, now);
            for cost in costs {
                bucket.owe(cost);
                bucket.take(cost);
                bucket.has(cost, now);
                now += Duration::from_nanos(nanos / 64);
                bucket.wait(now);
            }
        }
    }
}
