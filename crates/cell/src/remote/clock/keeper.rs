//! Keeps the clocks of a VM's shards together while it runs: a thread for each other host makes rounds, and
//! one orders steps of the shards that are behind.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use locks::IgnorePoison;
use serde_json::{Value, json};

use super::leader::{Leader, Step};
use super::{End, Rounds, counter};

/// Rounds in one measurement. The first is slow, as a thread that has just been woken is.
const ROUNDS: usize = 4;

/// The clocks of one boot. Cheap to clone; all clones are the same.
#[derive(Clone, Debug)]
pub struct Clocks(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    leader: Leader,
    /// The reason why the rounds with a shard's host have ended.
    lost: Vec<Option<String>>,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    /// The shards take no orders yet.
    Waiting,
    Going,
    Over,
}

/// Keeps the clocks from its begin until it is dropped.
#[derive(Debug)]
pub struct ClockKeeper {
    clocks: Clocks,
    ends: Vec<End>,
    threads: Vec<JoinHandle<()>>,
}

impl Clocks {
    /// The clocks of a leader.
    pub fn new(leader: Leader) -> Self {
        let lost = vec![None; leader.clocks().len()];
        Self(Arc::new(Shared {
            state: Mutex::new(State {
                leader,
                lost,
                phase: Phase::Waiting,
            }),
            changed: Condvar::new(),
        }))
    }

    /// The state of each shard's clock; null on the home's host, which has the guest's.
    pub fn status(&self) -> Vec<Value> {
        let (state, now) = (self.lock(), counter());
        let leader = &state.leader;
        let ns = |ticks: u64| leader.nanoseconds(i64::try_from(ticks).unwrap_or(i64::MAX));
        let clocks = leader.clocks().iter().zip(&state.lost).enumerate();
        let told = clocks.map(|(shard, (clock, lost))| {
            let steps = json!({ "ordered": clock.steps, "ns": ns(clock.stepped) });
            if clock.drift.is_none() {
                return json!({ "steps": steps });
            }
            let known = leader.lead(shard, now);
            json!({
                "ahead_ns": leader.nanoseconds(known.ahead),
                "error_ns": ns(known.error),
                "rate_ppb": known.rate_ppb,
                "rate_error_ppb": known.rate_error_ppb,
                "steps": steps,
                "refused": clock.refused,
                "why": clock.why.map(|why| why.to_string()),
                "lost": lost,
            })
        });
        told.collect()
    }

    /// Passes a step for every shard that is behind to `order`. Returns the time until the next call; none
    /// when the clocks have ended.
    fn look(&self, order: &impl Fn(Step)) -> Option<Duration> {
        let mut state = self.lock();
        if state.phase == Phase::Over {
            return None;
        }
        // Under the lock, so that the orders of one shard come in their order.
        state.leader.steps(counter()).into_iter().for_each(order);
        Some(Duration::from_nanos(state.leader.look_ns(counter())))
    }

    /// Blocks until the clocks begin; false when they have ended.
    fn wait_for_begin(&self) -> bool {
        let is_early = |state: &mut State| state.phase == Phase::Waiting;
        let waited = self.0.changed.wait_while(self.lock(), is_early);
        waited.ignore_poison().phase == Phase::Going
    }

    /// Blocks for so long; false when the clocks have ended.
    fn wait(&self, time: Duration) -> bool {
        let is_going = |state: &mut State| state.phase == Phase::Going;
        let waited = self.0.changed.wait_timeout_while(self.lock(), time, is_going);
        waited.ignore_poison().0.phase == Phase::Going
    }

    fn enter(&self, phase: Phase) {
        self.lock().phase = phase;
        self.0.changed.notify_all();
    }

    fn make_rounds(&self, shard: usize, rounds: &mut Rounds, order: &impl Fn(Step)) -> io::Result<()> {
        let mut is_going = self.wait_for_begin();
        while is_going {
            for _ in 0..ROUNDS {
                if let Some(round) = rounds.round()? {
                    self.lock().leader.learn(shard, round);
                }
            }
            is_going = self.look(order).is_some_and(|time| self.wait(time));
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is whole, whichever thread panicked.
        self.0.state.lock().ignore_poison()
    }
}

impl ClockKeeper {
    /// Keeps the clocks, by rounds with the hosts of these shards. `order` is called from several threads,
    /// one at a time.
    pub fn start(
        clocks: Clocks,
        rounds: Vec<(usize, Rounds)>,
        order: impl Fn(Step) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let mut keeper = Self {
            clocks: clocks.clone(),
            ends: Vec::new(),
            threads: Vec::new(),
        };
        let thread = |name: String| std::thread::Builder::new().name(name);
        for (shard, mut rounds) in rounds {
            keeper.ends.push(rounds.end()?);
            let (clocks, order) = (clocks.clone(), order.clone());
            keeper
                .threads
                .push(thread(format!("clock{shard}")).spawn(move || {
                    if let Err(error) = clocks.make_rounds(shard, &mut rounds, &order) {
                        clocks.lock().lost[shard] = Some(error.to_string());
                    }
                })?);
        }
        // A round may take long, and the estimate still holds meanwhile.
        keeper.threads.push(thread("clocks".to_owned()).spawn(move || {
            let mut is_going = clocks.wait_for_begin();
            while is_going {
                is_going = clocks.look(&order).is_some_and(|time| clocks.wait(time));
            }
        })?);
        Ok(keeper)
    }

    /// Begins: the shards take orders.
    pub fn begin(&self) {
        self.clocks.enter(Phase::Going);
    }
}

impl Drop for ClockKeeper {
    fn drop(&mut self) {
        self.clocks.enter(Phase::Over);
        self.ends.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
