//! Clock of a driver: the caller's times without jumps.

use super::Nanos;

/// Clock that never goes back and never skips.
///
/// A step back counts as none, and a step forward of more than `step_max` as one of `pause`. A driver's
/// decisions then do not change with the host's clock: nothing is charged for a jump back, and one slice at
/// most for a jump forward.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Last time of the caller.
    raw: Nanos,
    /// The same in this clock.
    own: Nanos,
    step_max: Nanos,
    pause: Nanos,
    has_begun: bool,
}

impl Clock {
    /// A clock that takes steps beyond `step_max` for jumps, and counts a jump forward as `pause`.
    pub fn new(step_max: Nanos, pause: Nanos) -> Self {
        Self {
            raw: 0,
            own: 0,
            step_max,
            pause,
            has_begun: false,
        }
    }

    /// Time of this clock at the caller's time `raw`. The first call sets the clock.
    pub fn advance(&mut self, raw: Nanos) -> Nanos {
        if !self.has_begun {
            self.has_begun = true;
            self.own = raw;
        } else if let Some(step) = raw.checked_sub(self.raw) {
            let step = if step > self.step_max { self.pause } else { step };
            self.own = self.own.saturating_add(step);
        }
        self.raw = raw;
        self.own
    }

    /// The last time of this clock.
    pub fn now(&self) -> Nanos {
        self.own
    }

    /// The caller's time at which this clock shows `own`, if no jump follows.
    pub fn raw_at(&self, own: Nanos) -> Nanos {
        self.raw.saturating_add(own.saturating_sub(self.own))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jump_back_counts_as_nothing_and_a_jump_forward_as_one_pause() {
        let mut clock = Clock::new(1_000, 10);
        assert_eq!(
            [5_000, 5_100, 4_000, 4_050].map(|raw| clock.advance(raw)),
            [5_000, 5_100, 5_100, 5_150]
        );
        assert_eq!(clock.raw_at(5_160), 4_060);
        assert_eq!(clock.advance(1_000_000), 5_160);
        assert_eq!(clock.advance(1_001_000), 6_160);
        assert_eq!(clock.raw_at(6_000), 1_001_000);
    }
}
