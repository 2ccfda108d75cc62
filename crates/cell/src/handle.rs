//! A running VM as others of its monitor have it: its console, orders to its shards, what they answer.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shard::launch::{MoveReport, Order};

use crate::console::Console;
use crate::frozen::Freezable;
use crate::link::send_order;
use crate::parts::Parts;
use crate::remote::clock::keeper::Clocks;
use crate::remote::clock::leader::Step;
use crate::shard_process::ShardProcess;

/// How long a shard may take to end when it is told to; disks finish what is under way.
pub const QUIT_LIMIT: Duration = Duration::from_secs(5);
/// How long a shard may take to say what it counted.
const STATUS_LIMIT: Duration = Duration::from_secs(5);
/// How long a vCPU may take to move; the shard gives up before.
const MOVE_LIMIT: Duration = Duration::from_secs(8);
/// How long a client may take to read its answer when the VM has ended.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// What others may do with a running VM. Cheap to clone; all clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Handle(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    console: Console,
    /// Locked while the VM is being frozen.
    freezable: Mutex<Option<Freezable>>,
    /// Locked while a vCPU moves.
    moving: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Where orders go, while a shard runs.
    pub(crate) orders: Option<UnixStream>,
    /// The home's process, while it runs.
    pub(crate) home: Option<Arc<ShardProcess>>,
    /// The home has said that it runs: from then on it looks at orders.
    pub(crate) runs: bool,
    /// The home was killed because a part ended.
    pub(crate) is_cut_off: bool,
    pub(crate) status: Option<Value>,
    /// No shard starts any more.
    over: bool,
    /// Somebody wants the end: a reboot ends it too.
    pub(crate) ending: bool,
    /// Clients that wait for an answer.
    asking: usize,
    /// The cells of a VM that spans them, in the order of its shards.
    pub(crate) cells: Vec<u16>,
    /// Frames that its cards were not allowed to send.
    pub(crate) filtered: Arc<AtomicU64>,
    /// Of a VM over several hosts.
    pub(crate) clocks: Option<Clocks>,
    /// Its shards beside the home, while they run.
    pub(crate) parts: Option<Parts>,
    /// What became of the last move.
    pub(crate) moved: Option<MoveReport>,
    /// Why a cell that it spans is lost, if one is.
    pub(crate) lost: Option<String>,
}

/// A client that waits for an answer, until dropped.
pub struct Asking<'a>(&'a Handle);

impl State {
    /// The home's process has started.
    pub(crate) fn start(&mut self, home: Arc<ShardProcess>, orders: UnixStream, parts: Option<Parts>) {
        (self.home, self.orders, self.parts) = (Some(home), Some(orders), parts);
        (self.runs, self.is_cut_off) = (false, false);
        // One that ended before could only tell that there was no home yet.
        if self.parts.as_ref().is_some_and(Parts::have_ended) {
            self.end_without_part();
        }
    }

    /// A part has ended before it was told to, and the home must end too. While it is being loaded it looks at no orders, and may
    /// wait for memory that the part had.
    fn end_without_part(&mut self) {
        if let (Some(home), false) = (&self.home, self.runs) {
            home.cut_off();
            self.is_cut_off = true;
        } else if let Some(socket) = &self.orders {
            // One that is gone has ended.
            let _ = send_order(socket, &Order::Quit);
        }
    }

    /// Whether the shard that has just started is to end at once.
    pub(crate) fn is_to_end(&self) -> bool {
        self.ending || self.parts.as_ref().is_some_and(Parts::have_ended)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.state().asking -= 1;
        self.0.0.changed.notify_all();
    }
}

impl Handle {
    /// The console.
    pub fn console(&self) -> &Console {
        &self.0.console
    }

    /// Gives an order to the shard.
    pub fn order(&self, order: &Order) -> io::Result<()> {
        match &self.state().orders {
            Some(socket) => send_order(socket, order),
            None => Err(io::Error::other("the VM is not running just now")),
        }
    }

    /// Has a shard's clock step forward.
    pub(crate) fn step(&self, step: Step) {
        let Step { shard, offset } = step;
        let order = Order::Step { offset };
        // One that is gone ends the VM.
        let _ = match shard.checked_sub(1) {
            None => self.order(&order),
            Some(index) => {
                let state = self.state();
                let parts = state.parts.as_ref();
                parts.map_or(Ok(()), |parts| parts.order(index, &order))
            }
        };
    }

    /// One of the shards beside the home has ended before it was told to.
    pub(crate) fn part_ended(&self) {
        self.state().end_without_part();
    }

    /// Freezes the VM for `client`.
    pub fn freeze(&self, client: &mut UnixStream) -> io::Result<()> {
        if !self.state().cells.is_empty() {
            return Err(io::Error::other(
                "a VM that spans cells cannot be cloned or kept as a snapshot; start it without `span`",
            ));
        }
        match &mut *self.freezable() {
            Some(freezable) => freezable.serve(client),
            None => Err(io::Error::other("the VM is not running just now")),
        }
    }

    /// Runs of pages that the VM has touched so far, by their first and their number.
    pub fn touched(&self) -> io::Result<Vec<(u64, u64)>> {
        match &mut *self.freezable() {
            Some(freezable) => freezable.touched(),
            None => Err(io::Error::other("the VM is not running just now")),
        }
    }

    pub(crate) fn set_freezable(&self, freezable: Option<Freezable>) {
        *self.freezable() = freezable;
    }

    fn freezable(&self) -> MutexGuard<'_, Option<Freezable>> {
        self.0.freezable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the shards counted.
    pub fn status(&self) -> io::Result<Value> {
        let clocks = {
            let mut state = self.state();
            state.status = None;
            state.parts.iter().for_each(Parts::ask_status);
            state.clocks.clone()
        };
        // Not under the lock: who keeps the clocks gives orders under theirs.
        let clocks = clocks.map_or_else(Vec::new, |clocks| clocks.status());
        self.order(&Order::Status)?;
        let all = |state: &State| {
            let parts = state.parts.as_ref();
            state.status.is_some() && parts.is_none_or(|parts| parts.statuses().is_some())
        };
        let state = self.wait(STATUS_LIMIT, |state| all(state) || state.over);
        let mut status = state
            .status
            .clone()
            .ok_or_else(|| io::Error::other("the VM does not answer"))?;
        add_filtered(&mut status, state.filtered.load(Ordering::Relaxed));
        if let Some(parts) = &state.parts {
            let statuses = parts
                .statuses()
                .ok_or_else(|| io::Error::other("a shard of the VM does not answer"))?;
            add_span(&mut status, &state.cells, clocks, statuses);
        }
        Ok(status)
    }

    /// Moves a vCPU of a VM that spans cells; returns how long it stood still, nanoseconds.
    pub fn move_vcpu(&self, vcpu: u8, cell: u16) -> io::Result<u64> {
        // One after another: an answer does not say of which move it is.
        let _moving = self.0.moving.lock().unwrap_or_else(PoisonError::into_inner);
        let shard = {
            let mut state = self.state();
            if state.cells.is_empty() {
                return Err(io::Error::other(
                    "the VM does not span cells; start it with `span = { cells = [0, 1] }` or `--span 0,1`",
                ));
            }
            state.moved = None;
            let shard = (0_u8..).zip(&state.cells).find(|(_, known)| **known == cell);
            let (shard, _) = shard.ok_or_else(|| {
                let cells: Vec<_> = state.cells.iter().map(u16::to_string).collect();
                io::Error::other(format!("the VM spans the cells {}, not {cell}", cells.join(", ")))
            })?;
            shard
        };
        self.order(&Order::Move { vcpu, shard })?;
        let state = self.wait(MOVE_LIMIT, |state| state.moved.is_some() || state.over);
        match &state.moved {
            Some(MoveReport::Done { still_ns }) => Ok(*still_ns),
            Some(MoveReport::Refused { why }) => Err(io::Error::other(why.clone())),
            None => Err(io::Error::other("the VM does not answer")),
        }
    }

    /// Presses the power button and waits; kills the VM after `limit`. True when it had to.
    pub fn stop(&self, limit: Duration) -> bool {
        self.state().ending = true;
        // A VM between two boots sees `ending` instead.
        let _ = self.order(&Order::PowerButton);
        if self.wait(limit, |state| state.over).over {
            return false;
        }
        self.kill();
        true
    }

    /// Ends the VM now: by order, and if it does not obey, by force. Returns when it has ended.
    pub fn kill(&self) {
        self.state().ending = true;
        let _ = self.order(&Order::Quit);
        let state = self.wait(QUIT_LIMIT, |state| state.over);
        state.home.iter().for_each(|home| home.cut_off());
        drop(state);
        drop(self.wait(QUIT_LIMIT, |state| state.over));
    }

    /// The VM has ended: nobody waits for it any more.
    pub fn over(&self) {
        self.state().over = true;
        self.0.changed.notify_all();
        self.0.console.close();
    }

    /// Notes that a client waits for an answer.
    pub fn asking(&self) -> Asking<'_> {
        self.state().asking += 1;
        Asking(self)
    }

    /// Waits until nobody waits for an answer: a monitor must not end before it has told how its VM did.
    pub fn all_answered(&self) {
        drop(self.wait(ANSWER_LIMIT, |state| state.asking == 0));
    }

    fn wait(&self, limit: Duration, mut until: impl FnMut(&State) -> bool) -> MutexGuard<'_, State> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        while !until(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self
                .0
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state
    }

    /// Something in the state has changed that others may wait for.
    pub(crate) fn changed(&self) {
        self.0.changed.notify_all();
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds to the home's status how many frames were kept from the host and the cluster.
fn add_filtered(status: &mut Value, frames: u64) {
    if let Some(status) = status.as_object_mut() {
        status.insert("filtered_frames".to_owned(), frames.into());
    }
}

/// Adds to the home's status where each vCPU is, and what the other shards counted.
fn add_span(status: &mut Value, cells: &[u16], clocks: Vec<Value>, parts: Vec<Value>) {
    let Some(status) = status.as_object_mut() else {
        return;
    };
    let cell = |shard: &Value| {
        let shard = shard.as_u64().and_then(|shard| usize::try_from(shard).ok());
        shard.and_then(|shard| cells.get(shard))
    };
    let shards = status.remove("vcpu_shards").unwrap_or_default();
    let vcpus: Vec<_> = shards.as_array().into_iter().flatten().map(cell).collect();
    let home = json!({
        "exits": status.get("exits"),
        "coherence": status.remove("coherence"),
        "clock": status.remove("clock"),
    });
    let counted: Vec<_> = std::iter::once(home).chain(parts).collect();
    let coherent = |(cell, shard)| Some((cell, coherence_of(shard)?));
    let (told, coherence): (Vec<_>, Vec<_>) = cells
        .iter()
        .zip(&counted)
        .filter_map(coherent)
        .map(|(cell, coherence)| (with_cell(coherence, *cell), coherence))
        .unzip();
    let mut shards: Vec<Value> = cells
        .iter()
        .zip(&counted)
        .map(|(cell, counted)| json!({ "cell": cell, "exits": counted.get("exits") }))
        .collect();
    // On one host there is one clock.
    for ((shard, mut clock), counted) in shards.iter_mut().zip(clocks).zip(&counted) {
        let made = counted.get("clock").and_then(Value::as_object).cloned();
        if let Some(steps) = clock.get_mut("steps").and_then(Value::as_object_mut) {
            steps.extend(made.unwrap_or_default());
        }
        shard["clock"] = clock;
    }
    let mut span = json!({ "cells": cells, "vcpus": vcpus, "shards": shards });
    if let (Some(span), false) = (span.as_object_mut(), coherence.is_empty()) {
        let heat = crate::coherence::hottest(&coherence);
        let told = json!({ "shards": told, "heat": heat });
        span.insert("coherence".to_owned(), told);
    }
    status.insert("span".to_owned(), span);
}

/// What a shard counted of its coherent memory. One that did not answer has told nothing.
fn coherence_of(shard: &Value) -> Option<&Value> {
    shard.get("coherence").filter(|coherence| coherence.is_object())
}

fn with_cell(coherence: &Value, cell: u16) -> Value {
    let mut told = coherence.clone();
    told["cell"] = cell.into();
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_where_vcpus_are_and_what_clocks_are_worth() {
        let mut status = json!({ "exits": [1], "vcpu_shards": [0, 1, 1] });
        let clocks = vec![
            json!({ "steps": { "ordered": 2 } }),
            json!({ "error_ns": 15_000, "steps": { "ordered": 5 } }),
        ];
        let part = json!({ "exits": [2], "clock": { "made": 4, "late": 1 } });
        add_span(&mut status, &[3, 5], clocks, vec![part]);
        let shards = json!([
            { "cell": 3, "exits": [1], "clock": { "steps": { "ordered": 2 } } },
            { "cell": 5, "exits": [2], "clock": { "error_ns": 15_000, "steps": { "ordered": 5, "made": 4, "late": 1 } } },
        ]);
        assert_eq!(
            status["span"],
            json!({ "cells": [3, 5], "vcpus": [3, 5, 5], "shards": shards })
        );
    }

    #[test]
    fn a_status_counts_filtered_frames() {
        let mut status = json!({ "exits": [] });
        add_filtered(&mut status, 3);
        assert_eq!(status, json!({ "exits": [], "filtered_frames": 3 }));
    }

    #[test]
    fn a_shard_that_did_not_answer_does_not_make_others_be_in_its_cell() {
        let mut status = json!({ "coherence": { "pages": 1 } });
        let parts = vec![Value::Null, json!({ "coherence": { "pages": 2 } })];
        add_span(&mut status, &[3, 5, 8], Vec::new(), parts);
        assert_eq!(
            status["span"]["coherence"]["shards"],
            json!([{ "cell": 3, "pages": 1 }, { "cell": 8, "pages": 2 }])
        );
    }
}
