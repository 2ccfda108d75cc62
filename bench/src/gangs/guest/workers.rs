//! The workers, and the timing of their rounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;

use crate::program::{Common, Program, WORKERS};

/// Program and length of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub program: Program,
    /// Work of each worker in a round.
    pub work: u64,
    /// Number of timed rounds.
    pub rounds: u64,
    /// Time of the rounds before the timed ones.
    pub warm_up: Duration,
    /// Time after which fewer rounds are enough.
    pub limit: Duration,
}

/// Timed rounds: all of the plan, or those until its limit.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    pub rounds: u64,
    pub time: Duration,
}

/// Counts of rounds, each in a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Count(AtomicU64);

#[derive(Default)]
struct Shared {
    common: Common,
    counts: [Count; WORKERS],
}

impl Shared {
    /// Rounds that all workers have completed.
    fn completed(&self) -> u64 {
        let counts = self.counts.iter().map(|count| count.0.load(Ordering::Acquire));
        counts.min().unwrap_or(0)
    }

    /// Runs a round of the worker of this index.
    fn run_round(&self, plan: &Plan, index: usize) {
        plan.program.run_round(plan.work, &self.common);
        self.counts[index].0.fetch_add(1, Ordering::Release);
    }
}

/// Starts the workers, and returns when the timed rounds are over. The workers go on.
///
/// # Errors
/// If there is one CPU only.
pub fn run_rounds(plan: &Plan) -> Outcome<Timed> {
    let (sender, receiver) = mpsc::channel();
    let shared = Arc::new(Shared::default());
    let (first, second) = bench::cpu::two()?;
    for (index, cpu) in [first, second].into_iter().enumerate() {
        let (plan, shared, sender) = (*plan, shared.clone(), sender.clone());
        thread::spawn(move || {
            if let Err(error) = bench::cpu::pin(cpu) {
                let _ = sender.send(Err(error.to_string()));
                return;
            }
            if index == 0 {
                let _ = sender.send(Ok(time_rounds(&plan, &shared)));
            }
            loop {
                shared.run_round(&plan, index);
            }
        });
    }
    Ok(receiver.recv()??)
}

/// Times the rounds of all workers, as the first of them.
fn time_rounds(plan: &Plan, shared: &Shared) -> Timed {
    let begin = Instant::now();
    while begin.elapsed() < plan.warm_up {
        shared.run_round(plan, 0);
    }
    let (start, before) = (Instant::now(), shared.completed());
    loop {
        shared.run_round(plan, 0);
        let (rounds, time) = (shared.completed() - before, start.elapsed());
        if rounds >= plan.rounds || time >= plan.limit {
            return Timed { rounds, time };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(program: Program, rounds: u64, limit: Duration) -> Timed {
        let plan = Plan {
            program,
            work: 1,
            rounds,
            warm_up: Duration::from_millis(1),
            limit,
        };
        run_rounds(&plan).expect("two CPUs")
    }

    #[test]
    fn each_program_runs_its_rounds() {
        for program in [Program::Sleep, Program::Lock] {
            let timed = timed(program, 50, Duration::from_secs(60));
            assert!(timed.rounds >= 50, "{program:?}: {timed:?}");
            assert!(timed.time > Duration::ZERO);
        }
    }

    #[test]
    fn rounds_end_at_the_limit() {
        let limit = Duration::from_millis(5);
        let timed = timed(Program::Sleep, u64::MAX, limit);
        assert!(timed.time >= limit, "{timed:?}");
    }
}
