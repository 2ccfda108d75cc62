//! Rate limits of cards.

use std::time::Instant;

use policy::rate::Bucket;

/// Bytes that a limited card may always send at once: several frames of the largest size.
const BURST_BYTES_MIN: u64 = 256 * 1024;
/// Packets that a limited card may always send at once.
const BURST_PACKETS_MIN: u64 = 16;

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
            rate.map(|rate| Bucket::new(rate, (rate / 10).max(burst_min), now))
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
