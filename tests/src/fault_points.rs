//! Stops threads of the program under test at its fault points, by breakpoints.
//!
//! A fault point is a static probe of the program: a no-op and a note with its address ([`notes`]). Here a
//! thread traces the processes (ptrace(2)) and replaces each no-op by a breakpoint instruction. A thread that
//! comes to it stops, stays for as long as the test holds the point, and goes on behind it. Breakpoints stay
//! until their process ends.

mod notes;
mod trace;

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use trace::Tracees;

/// Longest hold of a point. A test that fails while it holds one lets the threads go on.
const HOLD_LIMIT: Duration = Duration::from_secs(60);

/// Processes whose threads stop at fault points.
pub struct FaultPoints {
    shared: Arc<Shared>,
    names: Vec<String>,
    tracer: Option<JoinHandle<()>>,
}

/// The state that the tracing thread and the test share.
#[derive(Default)]
struct Shared {
    hits: Mutex<BTreeMap<String, usize>>,
    held: Mutex<BTreeMap<String, Hold>>,
}

/// The tracing thread's side of a [`Held`].
struct Hold {
    reached: Sender<u32>,
    release: Receiver<()>,
}

/// A point at which the next thread stops. Dropping it lets the thread go on.
pub struct Held {
    point: String,
    reached: Receiver<u32>,
    _release: Sender<()>,
}

impl Held {
    /// Waits until a thread stands at the point, and returns its process.
    #[track_caller]
    pub fn reached(&self, limit: Duration) -> u32 {
        let pid = self.reached.recv_timeout(limit);
        pid.unwrap_or_else(|error| panic!("no thread came to {} within {limit:?}: {error}", self.point))
    }
}

impl FaultPoints {
    /// Puts breakpoints at all fault points of these processes.
    #[track_caller]
    pub fn of(pids: &[u32]) -> Self {
        let shared = Arc::new(Shared::default());
        let (ready, is_ready) = channel();
        // Only the thread that traces a process may wait for it and let it go on.
        let tracer = std::thread::spawn({
            let (pids, shared) = (pids.to_vec(), shared.clone());
            move || match Tracees::attach(&pids) {
                Ok(mut tracees) => {
                    let _ = ready.send(Ok(tracees.points()));
                    tracees.run(|point, pid| shared.hit(point, pid));
                }
                Err(error) => {
                    let _ = ready.send(Err(error.to_string()));
                }
            }
        });
        let names = is_ready.recv().expect("the tracing thread reports");
        Self {
            shared,
            names: names.unwrap_or_else(|error| panic!("fault points of {pids:?}: {error}")),
            tracer: Some(tracer),
        }
    }

    /// The names of the program's points that begin with `prefix`, sorted.
    pub fn names(&self, prefix: &str) -> Vec<&str> {
        let names = self.names.iter().map(String::as_str);
        names.filter(|name| name.starts_with(prefix)).collect()
    }

    /// Holds the next thread that comes to a point.
    #[track_caller]
    pub fn hold(&self, point: &str) -> Held {
        assert!(
            self.names.iter().any(|name| name == point),
            "the program has no {point}"
        );
        let (reached, is_reached) = channel();
        let (release, is_released) = channel();
        let hold = Hold {
            reached,
            release: is_released,
        };
        locked(&self.shared.held).insert(point.to_owned(), hold);
        Held {
            point: point.to_owned(),
            reached: is_reached,
            _release: release,
        }
    }

    /// The number of times that threads came to each point.
    pub fn hits(&self) -> BTreeMap<String, usize> {
        locked(&self.shared.hits).clone()
    }

    /// Waits until the processes have ended.
    #[track_caller]
    pub fn wait(mut self) {
        let tracer = self.tracer.take().expect("waited for once");
        tracer.join().expect("the tracing thread does not panic");
    }
}

impl Shared {
    /// A thread of `pid` stands at a point. It goes on when this returns.
    fn hit(&self, point: &str, pid: u32) {
        *locked(&self.hits).entry(point.to_owned()).or_default() += 1;
        let hold = locked(&self.held).remove(point);
        if let Some(Hold { reached, release }) = hold
            && reached.send(pid).is_ok()
        {
            // An error is the end of the hold.
            let _ = release.recv_timeout(HOLD_LIMIT);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
