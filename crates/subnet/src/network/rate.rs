//! Rate limits: token buckets.

use std::time::{Duration, Instant};

/// Bytes that a limited card may always send at once: several frames of the largest size.
const BURST_BYTES_MIN: u64 = 256 * 1024;
/// Packets that a limited card may always send at once.
const BURST_PACKETS_MIN: u64 = 16;
/// Largest limit. Sums of it can't overflow.
const RATE_MAX: u64 = 1 << 48;

/// Limit of a direction of a card. A burst of a tenth of a second, and at least of a few frames, passes at
/// once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Bytes per second; none is no limit.
    pub bytes: Option<u64>,
    /// Packets per second; none is no limit.
    pub packets: Option<u64>,
}

/// Buckets of bytes and packets.
#[derive(Clone, Debug)]
pub struct Limiter {
    bytes: Option<Bucket>,
    packets: Option<Bucket>,
}

impl Limiter {
    /// Creates full buckets.
    pub fn new(rate: Rate, now: Instant) -> Self {
        let bucket = |rate: Option<u64>, burst_min: u64| {
            rate.map(|rate| {
                let rate = rate.min(RATE_MAX);
                Bucket::new(rate, (rate / 10).max(burst_min), now)
            })
        };
        Self {
            bytes: bucket(rate.bytes, BURST_BYTES_MIN),
            packets: bucket(rate.packets, BURST_PACKETS_MIN),
        }
    }

    /// Takes the tokens of a frame; returns whether both buckets have them. Otherwise it takes none.
    pub fn admits(&mut self, bytes: usize, now: Instant) -> bool {
        let bytes = bytes as u64;
        let has =
            |bucket: &mut Option<Bucket>, cost| bucket.as_mut().is_none_or(|bucket| bucket.has(cost, now));
        if !has(&mut self.bytes, bytes) || !has(&mut self.packets, 1) {
            return false;
        }
        for (bucket, cost) in [(&mut self.bytes, bytes), (&mut self.packets, 1)] {
            if let Some(bucket) = bucket {
                bucket.take(cost);
            }
        }
        true
    }
}

/// A token bucket.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Tokens per second.
    rate: u64,
    /// Largest number of tokens.
    burst: u64,
    tokens: u64,
    filled: Instant,
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(rate: u64, burst: u64, now: Instant) -> Self {
        Self {
            rate,
            burst,
            tokens: burst,
            filled: now,
        }
    }

    /// Returns whether the bucket has so many tokens at this time.
    pub fn has(&mut self, cost: u64, now: Instant) -> bool {
        self.fill(now);
        self.tokens >= cost
    }

    /// Takes tokens, as far as there are any.
    pub fn take(&mut self, cost: u64) {
        self.tokens = self.tokens.saturating_sub(cost);
    }

    fn fill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.filled);
        let nanos = elapsed.as_nanos().min(u128::from(u64::MAX));
        let earned = nanos * u128::from(self.rate) / 1_000_000_000;
        if earned == 0 {
            // The time counts further, or a slow rate would never earn a token.
            return;
        }
        let room = u128::from(self.burst - self.tokens);
        if earned >= room {
            self.tokens = self.burst;
            self.filled = now;
            return;
        }
        // Smaller than the room, so it is a token's number.
        self.tokens += earned as u64;
        // The rest of a token's time is kept.
        let used = earned * 1_000_000_000 / u128::from(self.rate);
        self.filled += Duration::from_nanos(u64::try_from(used).unwrap_or(u64::MAX));
    }
}
