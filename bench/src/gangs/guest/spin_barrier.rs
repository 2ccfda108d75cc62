//! A barrier whose waiters spin.

use std::sync::atomic::{AtomicU32, Ordering};

/// A barrier of a fixed number of threads, which is used again and again.
pub struct SpinBarrier {
    threads: u32,
    arrived: AtomicU32,
    /// Number of completed rounds, modulo 2^32.
    round: AtomicU32,
}

impl SpinBarrier {
    pub fn new(threads: u32) -> Self {
        Self {
            threads,
            arrived: AtomicU32::new(0),
            round: AtomicU32::new(0),
        }
    }

    /// Returns when all threads have called it in this round. The waiters use no system call.
    pub fn wait(&self) {
        // The round can't end before this thread arrives, so that the value is that of this round.
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            // Before the round ends, since the others arrive anew right after it.
            self.arrived.store(0, Ordering::Relaxed);
            self.round.store(round.wrapping_add(1), Ordering::Release);
            return;
        }
        while self.round.load(Ordering::Acquire) == round {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_is_a_round_ahead_of_another() {
        const ROUNDS: u32 = 200;
        let barrier = SpinBarrier::new(2);
        let counts = [AtomicU32::new(0), AtomicU32::new(0)];
        let run = |own: usize| {
            for round in 1..=ROUNDS {
                counts[own].store(round, Ordering::Relaxed);
                barrier.wait();
                let other = counts[1 - own].load(Ordering::Relaxed);
                assert!(other == round || other == round + 1, "{other} in round {round}");
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| run(0));
            run(1);
        });
        assert_eq!(barrier.round.load(Ordering::Relaxed), ROUNDS);
    }
}
