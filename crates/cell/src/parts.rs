//! The processes of a spanning VM's shards beside its home, while it runs.
//!
//! Each has a thread that reads what it reports. When one ends before it was told to, the VM ends, and why is kept.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use shard::launch::{Ending, Order, Report};

use crate::link::{Reports, send_order};
use crate::vm::{wait_for, why};

/// How long a shard may take until it is ready.
const START_LIMIT: Duration = Duration::from_secs(30);

/// One of them, started.
#[derive(Debug)]
pub struct Part {
    /// Its cell.
    pub cell: u16,
    /// Its process.
    pub pid: i32,
    /// The control socket.
    pub socket: UnixStream,
    /// Its log.
    pub log: PathBuf,
}

/// All of them.
#[derive(Debug)]
pub struct Parts {
    running: Vec<Running>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Running {
    pid: i32,
    orders: UnixStream,
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
        let socket = self.socket.try_clone().map_err(failed)?;
        socket.set_read_timeout(Some(START_LIMIT)).map_err(failed)?;
        let report = Reports::new(socket).next_report();
        self.socket.set_read_timeout(None).map_err(failed)?;
        match report {
            // What its sandbox lacks, the home's lacks too.
            Some(Report::Running { .. }) => Ok(()),
            Some(Report::Ended(Ending::ShardFailed { detail })) => {
                Err(format!("its shard in cell {}: {detail}", self.cell))
            }
            _ => {
                let pid = Pid::from_raw(self.pid);
                let _ = kill(pid, Signal::SIGKILL);
                Err(format!(
                    "its shard in cell {}: {}",
                    self.cell,
                    why(wait_for(pid), &self.log)
                ))
            }
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
        let mut running = Vec::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate() {
            let (orders, pid) = (part.socket.try_clone()?, part.pid);
            let (shared, told, ended) = (shared.clone(), told.clone(), ended.clone());
            let watcher = std::thread::Builder::new()
                .name("part".into())
                .spawn(move || shared.watch(index, &part, &told, &ended))?;
            running.push(Running {
                pid,
                orders,
                watcher: Some(watcher),
            });
        }
        Ok(Self { running, shared })
    }

    /// Asks all what they have counted.
    pub fn ask_status(&self) {
        self.shared.lock().statuses.fill(None);
        for part in &self.running {
            // One that is gone ends the VM.
            let _ = send_order(&part.orders, &Order::Status);
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
        for part in &self.running {
            let _ = send_order(&part.orders, &Order::Quit);
        }
        for part in &mut self.running {
            // A child that does not go is killed.
            let _ = wait_for(Pid::from_raw(part.pid));
            // Whatever holds its end of the socket: the watcher is to read its end.
            let _ = part.orders.shutdown(std::net::Shutdown::Both);
            if let Some(watcher) = part.watcher.take() {
                let _ = watcher.join();
            }
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
        let mut reports = match part.socket.try_clone() {
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
