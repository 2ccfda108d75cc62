//! A running VM as others of its monitor have it: its console, orders to its shards, what they answer.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shard_api::launch::{MoveReport, Order};

use crate::console::Console;
use crate::frozen::Freezable;
use crate::parts::Parts;
use crate::remote::clock::keeper::Clocks;
use crate::remote::clock::leader::Step;
use crate::shard_process::ShardProcess;

/// How long a shard may take to end when it is told to; disks finish what is under way.
pub const QUIT_LIMIT: Duration = Duration::from_secs(5);
/// How long a guest may take to end before the power button is pressed again.
const PRESS_INTERVAL: Duration = Duration::from_secs(3);
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
    /// The socket that a freeze waits for.
    freezing: Mutex<Option<UnixStream>>,
    /// Locked while a vCPU moves.
    moving: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Where orders go, while the home takes them.
    pub(crate) orders: Option<Arc<ShardProcess>>,
    /// The home's process, while it runs.
    pub(crate) home: Option<Arc<ShardProcess>>,
    /// The home has said that it runs: from then on it looks at orders.
    pub(crate) runs: bool,
    /// The home was killed because a part ended.
    pub(crate) is_cut_off: bool,
    pub(crate) status: Option<Value>,
    /// When the home was asked for its status, if it has not answered yet.
    pub(crate) status_asked: Option<Instant>,
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
    pub(crate) fn start(&mut self, home: Arc<ShardProcess>, parts: Option<Parts>) {
        (self.home, self.orders, self.parts) = (Some(home.clone()), Some(home), parts);
        (self.runs, self.is_cut_off, self.status_asked) = (false, false, None);
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
        } else if let Some(home) = &self.orders {
            // One that is gone has ended. No order waits, so the lock may be held.
            let _ = home.order(&Order::Quit);
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

    /// Gives an order to the shard, and never waits for it.
    pub fn order(&self, order: &Order) -> io::Result<()> {
        let home = self.state().orders.clone();
        match home {
            Some(home) => home.order(order),
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
                let part = self.state().parts.as_ref().and_then(|parts| parts.get(index));
                // Not under the lock: one on another host may take a while.
                part.map_or(Ok(()), |part| part.order(&order))
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

    /// The VM can be frozen from now on.
    pub(crate) fn set_freezable(&self, freezable: Option<Freezable>) {
        let socket = freezable.as_ref().and_then(|freezable| freezable.socket().ok());
        // A freeze that nothing could end would hold up the VM's end.
        *self.freezable() = freezable.filter(|_| socket.is_some());
        *self.freezing() = socket;
    }

    /// The VM can't be frozen any more. A freeze that is under way fails now, whatever the shard does.
    pub(crate) fn end_freezable(&self) {
        if let Some(socket) = self.freezing().take() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        *self.freezable() = None;
    }

    fn freezing(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.0.freezing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn freezable(&self) -> MutexGuard<'_, Option<Freezable>> {
        self.0.freezable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the shards counted.
    pub fn status(&self) -> io::Result<Value> {
        let now = Instant::now();
        let (parts, clocks, asks) = {
            let mut state = self.state();
            // One order for all that ask meanwhile: many of them would fill the socket of a shard that is busy for a while.
            let is_asked = |at: Instant| now.saturating_duration_since(at) < STATUS_LIMIT;
            let asks = state.orders.is_some() && !state.status_asked.is_some_and(is_asked);
            let mut parts = Vec::new();
            if asks {
                (state.status, state.status_asked) = (None, Some(now));
                parts = state.parts.as_ref().map_or_else(Vec::new, Parts::begin_status);
            }
            (parts, state.clocks.clone(), asks)
        };
        // Not under the lock: the keeper of the clocks gives orders under its own, and a part on another host may take a while.
        let clocks = clocks.map_or_else(Vec::new, |clocks| clocks.status());
        for part in parts {
            // One that is gone ends the VM.
            let _ = part.order(&Order::Status);
        }
        if asks || self.state().orders.is_none() {
            self.order(&Order::Status)?;
        }
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

    /// Presses the power button until the VM ends; kills it after `limit`. True when it had to.
    pub fn stop(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        self.state().ending = true;
        self.changed();
        loop {
            // A VM between two boots sees `ending` instead. A guest that still boots, and has no driver for the button yet,
            // does not notice a press.
            let _ = self.order(&Order::PowerButton);
            let left = deadline.saturating_duration_since(Instant::now());
            if self.wait(left.min(PRESS_INTERVAL), |state| state.over).over {
                return false;
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        self.kill();
        true
    }

    /// Ends the VM now: by order, and if it does not obey, by force. Returns when it has ended. The order never waits.
    pub fn kill(&self) {
        self.state().ending = true;
        // The VM may be between two boots.
        self.changed();
        let _ = self.order(&Order::Quit);
        let state = self.wait(QUIT_LIMIT, |state| state.over);
        state.home.iter().for_each(|home| home.cut_off());
        drop(state);
        drop(self.wait(QUIT_LIMIT, |state| state.over));
    }

    /// The VM is to end because of something beside it: by order, and if it does not obey in time, by force.
    pub(crate) fn quit(&self) {
        self.changed();
        if self.order(&Order::Quit).is_ok() {
            let state = self.wait(QUIT_LIMIT, |state| state.orders.is_none());
            state.orders.iter().for_each(|home| home.cut_off());
        }
    }

    /// Waits between two boots; less when the VM is to end.
    pub(crate) fn pause(&self, pause: Duration) {
        drop(self.wait(pause, |state| state.ending || state.lost.is_some()));
    }

    /// The home takes no orders any more.
    pub(crate) fn end_orders(&self) {
        self.state().orders = None;
        self.changed();
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
    use std::io::{BufRead, BufReader};
    use std::process::Command;

    use super::*;
    use crate::link::send_order;

    /// A VM whose shard is a process that reads nothing, and the shard's end of the socket.
    fn hung() -> (Handle, Arc<ShardProcess>, UnixStream) {
        let (shard, theirs) = ShardProcess::of(Command::new("sleep").arg("100"));
        let (handle, shard) = (Handle::default(), Arc::new(shard));
        handle.state().start(shard.clone(), None);
        (handle, shard, theirs)
    }

    /// The steps of the VM's own thread when its shard has ended.
    fn end(handle: &Handle, shard: &ShardProcess) -> String {
        let why = shard.wait();
        handle.end_orders();
        handle.over();
        why
    }

    #[test]
    fn a_kill_ends_a_shard_whose_orders_fill_the_socket() {
        let (handle, shard, _unread) = hung();
        while send_order(&shard.socket, &Order::Status).is_ok() {}
        let started = Instant::now();
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                loop {
                    if handle.state().ending {
                        break end(&handle, &shard);
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            // A client that asks for the status has to wait no longer than the kill takes.
            let asked = scope.spawn(|| handle.status());
            handle.kill();
            assert_eq!(
                ended.join().unwrap(),
                "its process read no orders any more and was killed"
            );
            assert!(asked.join().unwrap().is_err());
        });
        assert!(started.elapsed() < QUIT_LIMIT, "{:?}", started.elapsed());
    }

    #[test]
    fn a_quit_is_enforced_on_a_shard_that_does_not_obey() {
        let (handle, shard, _unread) = hung();
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                // Later than the limit within which it would kill the shard itself.
                std::thread::sleep(QUIT_LIMIT + Duration::from_millis(200));
                end(&handle, &shard)
            });
            handle.quit();
            assert_eq!(ended.join().unwrap(), "its process was ended by SIGKILL");
        });
    }

    #[test]
    fn many_clients_that_ask_for_the_status_send_one_order() {
        let (handle, shard, orders) = hung();
        let mut orders = BufReader::new(orders).lines();
        std::thread::scope(|scope| {
            let asked: Vec<_> = (0..20).map(|_| scope.spawn(|| handle.status())).collect();
            let order = orders.next().unwrap().unwrap();
            assert_eq!(serde_json::from_str::<Order>(&order).unwrap(), Order::Status);
            std::thread::sleep(Duration::from_secs(1));
            {
                let mut state = handle.state();
                (state.status, state.status_asked) = (Some(json!({ "exits": [] })), None);
            }
            handle.changed();
            for one in asked {
                assert_eq!(one.join().unwrap().unwrap()["exits"], json!([]));
            }
        });
        shard.kill();
        assert_eq!(orders.map_while(Result::ok).count(), 0);
    }

    #[test]
    fn a_pause_between_two_boots_ends_when_the_vm_is_to_end() {
        let handle = Handle::default();
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                handle.stop(Duration::ZERO);
            });
            handle.pause(Duration::from_secs(100));
            handle.over();
        });
        assert!(started.elapsed() < Duration::from_secs(50));
    }

    #[test]
    fn the_power_button_is_pressed_again_for_a_guest_that_did_not_notice() {
        let (handle, shard, orders) = hung();
        handle.state().runs = true;
        let guest = handle.clone();
        let booting = std::thread::spawn(move || {
            let mut presses = 0;
            for order in BufReader::new(orders).lines() {
                let order: Order = serde_json::from_str(&order.expect("an order")).expect("an order");
                assert!(matches!(order, Order::PowerButton), "{order:?}");
                presses += 1;
                if presses == 2 {
                    guest.over();
                    break;
                }
            }
            presses
        });
        let is_killed = handle.stop(Duration::from_secs(60));
        assert!(!is_killed);
        assert_eq!(booting.join().expect("it ends"), 2);
        shard.kill();
    }

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
