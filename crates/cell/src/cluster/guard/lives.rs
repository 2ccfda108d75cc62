//! The time at which the guard starts the next process of its cell. Without I/O, clock or threads.

use std::time::Duration;

/// A process that lived for a shorter time may have died of its start.
pub const SHORT: Duration = Duration::from_secs(10);
/// Short lives in a row, after which the cell is given up.
pub const SHORT_LIVES_MAX: u32 = 10;
/// Pause before another attempt of a cell that would be given up, by a guard with other duties.
pub const RETRY_PAUSE: Duration = Duration::from_secs(60);
/// Pause before another attempt, for each of the short lives so far.
const PAUSE: Duration = Duration::from_millis(20);
/// Longest pause after starts that failed.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The lives of a cell's processes so far.
#[derive(Debug, Default)]
pub struct Lives {
    /// Short lives in a row.
    short: u32,
    /// Starts in a row that failed.
    failed_starts: u32,
}

impl Lives {
    /// Records the death of a process. Returns the pause before the next start; none if the cell is given up.
    pub fn died(&mut self, lived: Duration) -> Option<Duration> {
        self.failed_starts = 0;
        self.short = if lived < SHORT { self.short + 1 } else { 0 };
        (self.short < SHORT_LIVES_MAX).then(|| PAUSE * self.short)
    }

    /// Records that the host has started no process, as without memory. Returns the pause before the next
    /// start: the host may have room later, so the cell is never given up for that.
    pub fn not_started(&mut self) -> Duration {
        let pause = PAUSE.saturating_mul(1 << self.failed_starts.min(16));
        self.failed_starts = self.failed_starts.saturating_add(1);
        pause.min(PAUSE_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_is_given_up_after_short_lives_in_a_row_only() {
        let mut lives = Lives::default();
        for number in 1..SHORT_LIVES_MAX {
            assert_eq!(lives.died(Duration::ZERO), Some(PAUSE * number));
        }
        assert_eq!(lives.died(SHORT), Some(Duration::ZERO));
        for _ in 1..SHORT_LIVES_MAX {
            assert!(lives.died(Duration::ZERO).is_some());
        }
        assert_eq!(lives.died(Duration::ZERO), None);
    }

    #[test]
    fn failed_start_is_tried_again_forever_with_growing_pauses() {
        let mut lives = Lives::default();
        let pauses: Vec<Duration> = (0..1000).map(|_| lives.not_started()).collect();
        assert_eq!(pauses[..3], [PAUSE, PAUSE * 2, PAUSE * 4]);
        assert!(pauses.is_sorted());
        assert_eq!(pauses[999], PAUSE_MAX);
        assert_eq!(lives.died(SHORT), Some(Duration::ZERO));
        assert_eq!(lives.not_started(), PAUSE);
    }
}
