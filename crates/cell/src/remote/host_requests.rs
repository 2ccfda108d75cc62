//! Requests of the home about a part's host, and their answers. There is one at a time.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use locks::IgnorePoison;

use super::protocol::HostAnswer;

/// The requests to one part's monitor.
#[derive(Debug, Default)]
pub struct HostRequests {
    /// Locked while a request waits for its answer.
    asking: Mutex<()>,
    pending: Mutex<Pending>,
    changed: Condvar,
}

/// The last request.
#[derive(Debug, Default)]
struct Pending {
    number: u64,
    answer: Option<HostAnswer>,
    /// Whether no answer can come any more.
    is_lost: bool,
}

impl HostRequests {
    /// Sends a request by `send`, which receives its number, and waits for its answer.
    ///
    /// # Errors
    /// If the connection fails or is lost; [`io::ErrorKind::TimedOut`] without an answer within `limit`.
    pub fn ask(&self, limit: Duration, send: impl FnOnce(u64) -> io::Result<()>) -> io::Result<HostAnswer> {
        let _asking = self.asking.lock().ignore_poison();
        let deadline = Instant::now() + limit;
        let number = {
            let mut pending = self.lock();
            pending.number += 1;
            pending.answer = None;
            pending.number
        };
        send(number)?;
        let mut pending = self.lock();
        loop {
            if let Some(answer) = pending.answer.take() {
                return Ok(answer);
            }
            if pending.is_lost {
                return Err(io::Error::other("its monitor has ended"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = format!("it does not answer within {} s", limit.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            pending = self.changed.wait_timeout(pending, left).ignore_poison().0;
        }
    }

    /// Takes an answer. One to an earlier request, or to none, is dropped.
    pub fn answered(&self, number: u64, answer: HostAnswer) {
        let mut pending = self.lock();
        if pending.number == number {
            pending.answer = Some(answer);
        }
        self.changed.notify_all();
    }

    /// Records that the connection is lost permanently.
    pub fn lost(&self) {
        self.lock().is_lost = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().ignore_poison()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn answer_to_an_earlier_request_is_dropped() {
        let requests = HostRequests::default();
        let late = requests.ask(Duration::from_millis(1), |number| {
            assert_eq!(number, 1);
            Ok(())
        });
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let answered = requests.ask(LONG, |number| {
            // The late answer to the first request, and one to none.
            for wrong in [number - 1, number + 1] {
                let why = "another request".to_owned();
                requests.answered(wrong, HostAnswer::Refused { why });
            }
            requests.answered(number, HostAnswer::Done);
            Ok(())
        });
        assert_eq!(answered.unwrap(), HostAnswer::Done);
    }

    #[test]
    fn request_fails_at_once_if_the_connection_is_lost() {
        let requests = HostRequests::default();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| requests.ask(LONG, |_| Ok(())));
            std::thread::sleep(Duration::from_millis(20));
            requests.lost();
            assert!(asked.join().unwrap().is_err());
        });
        assert!(requests.ask(LONG, |_| Ok(())).is_err(), "from then on");
        assert!(begun.elapsed() < LONG / 2);
    }
}
