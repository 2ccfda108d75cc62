//! Queries that are answered on threads of their own, at most one of each key at a time.
//!
//! A query that is late delays nothing: [`InFlight::wait`] waits for it once, and not again before it has
//! answered in time. Its late answer is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Stack of a query's thread, bytes.
const STACK_BYTES: usize = 512 << 10;

/// An answer, and the time at which it came.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Arrived<T> {
    pub(super) at: Instant,
    pub(super) answer: T,
}

/// Queries and their answers.
#[derive(Debug)]
pub(super) struct InFlight<K, T> {
    /// Time after which an answer is late.
    limit: Duration,
    /// Time at which each query began that has not answered.
    asked: BTreeMap<K, Instant>,
    /// Queries whose last answer was late, or has not come.
    late: BTreeSet<K>,
    arrived: BTreeMap<K, Arrived<T>>,
    sender: Sender<(K, Arrived<T>)>,
    receiver: Receiver<(K, Arrived<T>)>,
}

impl<K: Clone + Ord + Send + 'static, T: Send + 'static> InFlight<K, T> {
    pub(super) fn new(limit: Duration) -> Self {
        let (sender, receiver) = channel();
        Self {
            limit,
            asked: BTreeMap::new(),
            late: BTreeSet::new(),
            arrived: BTreeMap::new(),
            sender,
            receiver,
        }
    }

    /// Begins a query, unless it has not answered yet, or an answer of it has not been taken.
    ///
    /// # Errors
    /// If the host has no thread left.
    pub(super) fn ask(&mut self, key: K, query: impl FnOnce() -> T + Send + 'static) -> io::Result<()> {
        self.collect();
        if self.asked.contains_key(&key) || self.arrived.contains_key(&key) {
            return Ok(());
        }
        let sender = self.sender.clone();
        let own = key.clone();
        let answer = move || {
            let answer = query();
            let at = Instant::now();
            // The collector may be gone.
            let _ = sender.send((own, Arrived { at, answer }));
        };
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        thread.name("top-query".to_owned()).spawn(answer)?;
        self.asked.insert(key, Instant::now());
        Ok(())
    }

    /// Waits until each of these queries has answered, but for those that were late before, until the
    /// `deadline`.
    pub(super) fn wait(&mut self, keys: &BTreeSet<K>, deadline: Instant) {
        while keys
            .iter()
            .any(|key| self.asked.contains_key(key) && !self.late.contains(key))
        {
            match self
                .receiver
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok((key, arrived)) => self.note(key, arrived),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let unanswered = keys.iter().filter(|key| self.asked.contains_key(key));
                    self.late.extend(unanswered.cloned());
                    return;
                }
            }
        }
        self.collect();
    }

    /// Takes the answer of a query, if it has come.
    pub(super) fn take(&mut self, key: &K) -> Option<Arrived<T>> {
        self.collect();
        self.arrived.remove(key)
    }

    /// Drops answers of queries that are not wanted any more.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(&K) -> bool) {
        self.collect();
        self.arrived.retain(|key, _| is_wanted(key));
        self.late.retain(|key| is_wanted(key));
    }

    fn collect(&mut self) {
        while let Ok((key, arrived)) = self.receiver.try_recv() {
            self.note(key, arrived);
        }
    }

    fn note(&mut self, key: K, arrived: Arrived<T>) {
        let begun = self.asked.remove(&key);
        let is_late = begun.is_some_and(|begun| arrived.at.saturating_duration_since(begun) > self.limit);
        if is_late {
            self.late.insert(key.clone());
        } else {
            self.late.remove(&key);
        }
        self.arrived.insert(key, arrived);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);
    /// Far above [`LIMIT`], for a machine under load.
    const SOON: Duration = Duration::from_secs(20);

    fn keys(all: &[&'static str]) -> BTreeSet<&'static str> {
        all.iter().copied().collect()
    }

    #[test]
    fn query_that_does_not_answer_is_waited_for_once_and_delays_no_other() {
        let mut flight = InFlight::new(LIMIT);
        let (release, stopped) = channel::<()>();
        flight
            .ask("stopped", move || {
                let _ = stopped.recv();
                0
            })
            .unwrap();
        let wanted = keys(&["stopped", "quick"]);
        let mut waits = Vec::new();
        for round in 1..4 {
            // Not begun anew while it has not answered.
            flight.ask("stopped", || panic!("a second query")).unwrap();
            flight.ask("quick", move || round).unwrap();
            let begun = Instant::now();
            flight.wait(&keys(&["quick"]), begun + SOON);
            assert_eq!(flight.take(&"quick").unwrap().answer, round);
            let begun = Instant::now();
            flight.wait(&wanted, begun + LIMIT);
            waits.push(begun.elapsed());
            assert_eq!(flight.take(&"stopped"), None);
        }
        assert!(waits[0] >= LIMIT, "{waits:?}");
        assert!(waits[1..].iter().all(|wait| *wait < LIMIT), "{waits:?}");
        // Its late answer is not lost.
        release.send(()).unwrap();
        let begun = Instant::now();
        let answer = loop {
            if let Some(arrived) = flight.take(&"stopped") {
                break arrived.answer;
            }
            assert!(begun.elapsed() < SOON, "no answer");
            thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(answer, 0);
    }

    #[test]
    fn answer_that_nobody_wants_any_more_is_dropped() {
        let mut flight = InFlight::new(SOON);
        for key in ["gone", "here"] {
            flight.ask(key, || ()).unwrap();
        }
        flight.wait(&keys(&["gone", "here"]), Instant::now() + SOON);
        flight.retain(|key| *key == "here");
        assert_eq!(flight.take(&"gone"), None);
        assert!(flight.take(&"here").is_some());
    }

    #[test]
    fn query_is_waited_for_again_once_it_has_answered_in_time() {
        let mut flight = InFlight::new(SOON);
        let (release, stopped) = channel::<()>();
        flight.ask("a", move || _ = stopped.recv()).unwrap();
        flight.wait(&keys(&["a"]), Instant::now() + Duration::from_millis(1));
        assert!(flight.late.contains("a"));
        release.send(()).unwrap();
        let begun = Instant::now();
        while flight.take(&"a").is_none() {
            assert!(begun.elapsed() < SOON, "no answer");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(flight.late.is_empty() && flight.asked.is_empty());
        flight.ask("a", || ()).unwrap();
        flight.wait(&keys(&["a"]), Instant::now() + SOON);
        assert!(flight.take(&"a").is_some());
    }
}
