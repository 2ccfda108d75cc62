//! Handle of a running VM for other parts of its monitor: its console, orders to its shards, and their
//! answers.

mod borrowed_cpus;
pub(crate) mod cell_requests;
mod cpu_reservation;
mod disk_limits;
mod end;
mod freeze;
mod gate;
mod memory;
mod pause;
mod pins;
mod placing;
mod regions;
mod resident;
#[cfg(test)]
mod shard_threads;
mod span_threads;
mod state;
mod status;
#[cfg(test)]
mod tests;
mod update;
mod vcpu_stops;
mod vcpus;

use std::convert::Infallible;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use locks::IgnorePoison;
use shard_api::launch::{Answer, MoveReport, Order};

pub(crate) use self::gate::{UNANSWERED_MAX, VmChange, VmObserver};
pub(crate) use self::pins::ShardHost;
pub(crate) use self::resident::TrimmableVm;
#[cfg(test)]
pub(crate) use self::span_threads::SpanThread;
pub(crate) use self::span_threads::SpanThreads;
pub(crate) use self::state::CardPidfd;
use self::state::State;
use crate::console::Console;
use crate::frozen::Freezable;
use crate::recorder::Recorder;
use crate::remote::clock::leader::Step;
pub use crate::shard_process::{ACKNOWLEDGEMENT_LIMIT, QUIT_LIMIT};

/// Time limit for a shard to answer an order; one that moves a vCPU or pauses the VM gives up before.
const ORDER_LIMIT: Duration = Duration::from_secs(8);
/// Time limit for a reset VM to start again: its memory may have to be allocated first.
const RESET_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a client to read its answer when the VM has ended.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Handle of a running VM. Cheap to clone; all clones are the same.
#[derive(Clone, Debug, Default)]
pub struct VmHandle(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    console: Console,
    recorder: Recorder,
    /// Locked during an update of the VM's host resources, or a move of a vCPU.
    updating: Mutex<()>,
    /// Locked before `updating` by a client that stops a vCPU of a VM that spans cells.
    stopping: Mutex<()>,
    /// Locked while the VM is being frozen.
    freezable: Mutex<Option<Freezable>>,
    /// The socket that a freeze waits for.
    freezing: Mutex<Option<UnixStream>>,
    /// Locked while a client waits for the answer to an order.
    acting: Mutex<()>,
    /// Locked while a client waits for statistics of vCPUs.
    counting: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
    /// The drivers of its cell, if that has any.
    observer: gate::Observer,
}

/// A vCPU that has moved to another cell.
#[derive(Debug, PartialEq, Eq)]
pub struct Moved {
    /// Time for which it stood still, nanoseconds.
    pub still_ns: u64,
    /// The CPUs that it was pinned to, if the move has ended a pin.
    pub dropped_pin: Option<Vec<usize>>,
}

/// A client that waits for an answer, until dropped.
pub struct Asking<'a>(&'a VmHandle);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.state().asking -= 1;
        self.0.0.changed.notify_all();
    }
}

impl VmHandle {
    /// The guest's serial port, with its clients and the last lines.
    pub fn console(&self) -> &Console {
        &self.0.console
    }

    /// Its record in the registry.
    pub(crate) fn recorder(&self) -> &Recorder {
        &self.0.recorder
    }

    /// Sends an order to the shard, and never blocks.
    pub fn order(&self, order: &Order) -> io::Result<()> {
        self.state().order(order).map(drop)
    }

    /// Orders a shard's clock to step forward.
    pub(crate) fn step(&self, step: Step) {
        let Step { shard, offset } = step;
        let order = Order::Step { offset };
        // A shard that is gone ends the VM.
        let _ = match shard.checked_sub(1) {
            None => self.order(&order),
            Some(index) => {
                let part = self.state().parts.as_ref().and_then(|parts| parts.get(index));
                // This is not under the lock: a shard on another host may take a while.
                part.map_or(Ok(()), |part| part.order(&order).map(drop))
            }
        };
    }

    /// One of the shards beside the home has ended without an order.
    pub(crate) fn part_ended(&self) {
        self.state().end_without_part();
    }

    /// Moves a vCPU of a VM that spans cells, and ends its pin. An error of a move that takes too long leaves
    /// the pin until the vCPU is known to have moved.
    pub fn move_vcpu(&self, vcpu: u8, cell: u16) -> io::Result<Moved> {
        let _updating = self.begin_update();
        let shard = {
            let state = self.state();
            if state.cells.is_empty() {
                return Err(io::Error::other(
                    "the VM does not span cells; start it with `span = { cells = [0, 1] }` or `--span 0,1`",
                ));
            }
            let shard = (0_u8..).zip(&state.cells).find(|(_, known)| **known == cell);
            let (shard, _) = shard.ok_or_else(|| {
                let cells: Vec<_> = state.cells.iter().map(u16::to_string).collect();
                io::Error::other(format!("the VM spans the cells {}, not {cell}", cells.join(", ")))
            })?;
            shard
        };
        // Also if the move fails: it may take place after its time limit.
        self.state().located = None;
        match self.act(&Order::Move { vcpu, shard })? {
            Answer::Moved(MoveReport::Done { still_ns }) => Ok(Moved {
                still_ns,
                dropped_pin: self.end_pin_elsewhere(vcpu, cell),
            }),
            Answer::Moved(MoveReport::Refused { why }) => Err(io::Error::other(why)),
            other => Err(not_an_answer(&other)),
        }
    }

    /// Sends an order and waits for its answer; an order that is refused is an error. The shard carries out
    /// one at a time, and each may take the whole time.
    fn act(&self, order: &Order) -> io::Result<Answer> {
        let _acting = self.0.acting.lock().ignore_poison();
        let starts = {
            // Sending never blocks, so the lock may be held: the answer finds the order that it belongs to.
            let mut state = self.state();
            let id = state.order(order)?;
            (state.asked, state.answer) = (Some(id), None);
            match order {
                Order::Pause => state.pausing = Some((id, true)),
                Order::Resume => state.pausing = Some((id, false)),
                _ => {}
            }
            state.starts
        };
        let mut state = self.wait(ORDER_LIMIT, |state| {
            state.answer.is_some() || state.orders.is_none() || state.starts != starts
        });
        state.asked = None;
        match state.answer.take() {
            Some(Answer::Refused { why }) => Err(io::Error::other(why)),
            Some(answer) => Ok(answer),
            None if state.orders.is_none() || state.starts != starts => {
                Err(io::Error::other("the VM ended or rebooted meanwhile"))
            }
            None => Err(io::Error::other("the VM does not answer")),
        }
    }

    /// Starts the VM again, as by a machine's reset button. Returns when its next shard has started.
    pub fn reset(&self) -> io::Result<()> {
        let starts = {
            let state = self.state();
            state.order(&Order::Reset)?;
            state.starts
        };
        let state = self.wait(RESET_LIMIT, |state| state.over || state.starts != starts);
        if state.over {
            return Err(io::Error::other("the VM has ended"));
        }
        if state.starts == starts {
            return Err(io::Error::other("the VM does not start again"));
        }
        Ok(())
    }

    /// Waits until the VM's vCPUs run, for `limit` at most: true when they do, false when the VM has ended.
    pub fn wait_running(&self, limit: Duration) -> Option<bool> {
        let state = self.wait(limit, |state| state.runs || state.over);
        match state.over {
            true => Some(false),
            false => state.runs.then_some(true),
        }
    }

    /// Records that the VM runs and that its client has the report. `is_left` says whether its keeper has all
    /// that another process needs to serve it.
    pub(crate) fn set_left(&self, is_left: bool) {
        self.state().is_left = is_left;
        self.changed();
    }

    /// Waits until another process can serve the VM. Returns false when the VM has ended.
    pub(crate) fn wait_until_left(&self) -> bool {
        let mut state = self.state();
        while !state.is_left && !state.over {
            state = self.0.changed.wait(state).ignore_poison();
        }
        !state.over
    }

    /// Calls `end`, which does not return, if another process can serve the VM now.
    pub(crate) fn if_left(&self, end: impl FnOnce() -> Infallible) {
        let state = self.state();
        if state.is_left {
            end();
        }
    }

    /// Waits until the VM has ended, for `limit` at most. Returns whether it has.
    pub fn wait_over(&self, limit: Duration) -> bool {
        self.wait(limit, |state| state.over).over
    }

    /// Pauses between two boots; for a shorter time when the VM is to end.
    pub(crate) fn wait_between_boots(&self, pause: Duration) {
        drop(self.wait(pause, |state| state.ending || state.lost.is_some()));
    }

    /// Records that the home takes no orders any more.
    pub(crate) fn end_orders(&self) {
        self.state().orders = None;
        self.changed();
    }

    /// Records that a client waits for an answer.
    pub fn asking(&self) -> Asking<'_> {
        self.state().asking += 1;
        Asking(self)
    }

    /// Waits until no client waits for an answer: a monitor must not end before it has reported how its VM
    /// ended.
    pub fn all_answered(&self) {
        drop(self.wait(ANSWER_LIMIT, |state| state.asking == 0));
    }

    fn wait(&self, limit: Duration, mut until: impl FnMut(&State) -> bool) -> MutexGuard<'_, State> {
        let deadline = after(limit);
        let mut state = self.state();
        while !until(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.0.changed.wait_timeout(state, left).ignore_poison().0;
        }
        state
    }

    /// Wakes threads that wait for a change of the state.
    pub(crate) fn changed(&self) {
        self.0.changed.notify_all();
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().ignore_poison()
    }
}

/// The time when `limit` will have passed. A time beyond the clock's range becomes a year.
fn after(limit: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(limit).unwrap_or(now + YEAR)
}

fn not_an_answer(answer: &Answer) -> io::Error {
    io::Error::other(format!("the VM gave an answer to another order: {answer:?}"))
}
