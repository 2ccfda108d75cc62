//! The processes of a spanning VM's shards beside its home, while it runs.
//!
//! Each has a thread that reads what it reports. When one ends before it was told to, the VM ends, and why is kept.

use std::io;
use std::net::Shutdown;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;
use shard::launch::{Ending, Order, Report};

use crate::link::{Reports, send_order};
use crate::shard_process::ShardProcess;

/// How long a shard may take until it is ready.
const START_LIMIT: Duration = Duration::from_secs(30);

/// One of them, started.
#[derive(Debug)]
pub struct Part {
    /// Its cell.
    pub cell: u16,
    /// Its process.
    pub process: ShardProcess,
}

/// All of them.
#[derive(Debug)]
pub struct Parts {
    running: Vec<Running>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Running {
    part: Arc<Part>,
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What each has counted, since it was last asked.
    statuses: Vec<Option<Value>>,
    /// Why the VM ended, if it was one of them.
    cause: Option<Ending>,
    /// They were told to end.
    ending: bool,
}

impl Part {
    /// Waits until the shard says that it is ready; if not, says why.
    pub fn wait_until_ready(&self) -> Result<(), String> {
        let failed = |error: io::Error| format!("its shard in cell {}: {error}", self.cell);
        let socket = self.process.socket.try_clone().map_err(failed)?;
        socket.set_read_timeout(Some(START_LIMIT)).map_err(failed)?;
        let report = Reports::new(socket).next_report();
        self.process.socket.set_read_timeout(None).map_err(failed)?;
        match report {
            // What its sandbox lacks, the home's lacks too.
            Some(Report::Running { .. }) => Ok(()),
            Some(Report::Ended(Ending::ShardFailed { detail })) => {
                Err(format!("its shard in cell {}: {detail}", self.cell))
            }
            _ => Err(format!(
                "its shard in cell {}: {}",
                self.cell,
                self.process.kill()
            )),
        }
    }
}

impl Parts {
    /// Watches them. From other threads, `told` is called when one has answered, `ended` when the VM must end because of one.
    pub fn watch(
        parts: Vec<Part>,
        told: impl Fn() + Clone + Send + 'static,
        ended: impl Fn() + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        shared.lock().statuses = vec![None; parts.len()];
        let mut all = Self {
            running: parts.into_iter().map(Running::from).collect(),
            shared,
        };
        for (index, one) in all.running.iter_mut().enumerate() {
            let (shared, part) = (all.shared.clone(), one.part.clone());
            let (told, ended) = (told.clone(), ended.clone());
            let watcher = std::thread::Builder::new()
                .name("part".into())
                .spawn(move || shared.watch(index, &part, &told, &ended))?;
            one.watcher = Some(watcher);
        }
        Ok(all)
    }

    /// Their processes.
    pub fn pids(&self) -> Vec<i32> {
        self.running.iter().map(|one| one.part.process.pid).collect()
    }

    /// Whether one has ended before it was told to.
    pub fn have_ended(&self) -> bool {
        self.shared.lock().cause.is_some()
    }

    /// Asks all what they have counted.
    pub fn ask_status(&self) {
        self.shared.lock().statuses.fill(None);
        for one in &self.running {
            // One that is gone ends the VM.
            let _ = send_order(&one.part.process.socket, &Order::Status);
        }
    }

    /// What they have counted, when all have said so.
    pub fn statuses(&self) -> Option<Vec<Value>> {
        self.shared.lock().statuses.iter().cloned().collect()
    }

    /// The VM has ended: ends them all. Returns why, if it was one of them.
    pub fn end(mut self) -> Option<Ending> {
        self.stop();
        self.shared.lock().cause.take()
    }

    fn stop(&mut self) {
        self.shared.lock().ending = true;
        for one in &self.running {
            let _ = send_order(&one.part.process.socket, &Order::Quit);
        }
        for one in &mut self.running {
            let process = &one.part.process;
            process.wait();
            // Whatever holds its end of the socket: the watcher is to read its end.
            let _ = process.socket.shutdown(Shutdown::Both);
            if let Some(watcher) = one.watcher.take() {
                let _ = watcher.join();
            }
        }
    }
}

impl From<Part> for Running {
    fn from(part: Part) -> Self {
        Self {
            part: Arc::new(part),
            watcher: None,
        }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn watch(&self, index: usize, part: &Part, told: &impl Fn(), ended: &impl Fn()) {
        let mut reports = match part.process.socket.try_clone() {
            Ok(socket) => Reports::new(socket),
            Err(_) => return,
        };
        let ending = loop {
            match reports.next_report() {
                Some(Report::Status(status)) => {
                    self.lock().statuses[index] = Some(status);
                    told();
                }
                Some(Report::Ended(ending)) => break Some(ending),
                Some(_) => {}
                None => break None,
            }
        };
        let mut state = self.lock();
        if state.ending {
            return;
        }
        let cell = part.cell;
        state.cause.get_or_insert(match ending {
            Some(Ending::ShardFailed { detail }) => Ending::ShardFailed {
                detail: format!("in cell {cell}: {detail}"),
            },
            Some(ending) => ending,
            None => Ending::ShardFailed {
                detail: format!("in cell {cell}: its process is gone; the VM ends with any of its shards"),
            },
        });
        drop(state);
        ended();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
