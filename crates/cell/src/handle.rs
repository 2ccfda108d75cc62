//! Handle of a running VM for other parts of its monitor: its console, orders to its shards, and their
//! answers.

mod memory;
mod pause;
mod pins;
mod state;
mod status;
mod update;
mod vcpu_stops;
mod vcpus;

use std::convert::Infallible;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fault_point::fault_point;
use locks::IgnorePoison;
use nix::sys::eventfd::{EfdFlags, EventFd};
use shard_api::launch::{Answer, MoveReport, Order};

pub(crate) use self::pins::ShardHost;
pub(crate) use self::state::Helper;
use self::state::State;
use crate::console::Console;
use crate::frozen::Freezable;
use crate::recorder::Recorder;
use crate::remote::clock::leader::Step;
pub use crate::shard_process::{ACKNOWLEDGEMENT_LIMIT, QUIT_LIMIT};

/// Time for a guest to power off before the power button is pressed again.
const PRESS_INTERVAL: Duration = Duration::from_secs(3);
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
    /// The console.
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

    /// Freezes the VM for `client`.
    pub fn freeze(&self, client: &mut UnixStream) -> io::Result<()> {
        if !self.state().cells.is_empty() {
            return Err(io::Error::other(
                "a VM that spans cells cannot be cloned or kept as a snapshot; start it without `span`",
            ));
        }
        let spec = self.recorder().read(|record| record.spec.clone());
        match &mut *self.freezable() {
            Some(freezable) => {
                // With the limits that were changed since the start.
                spec.into_iter().for_each(|spec| freezable.set_spec(spec));
                fault_point!(freeze_begun);
                let served = freezable.serve(client);
                fault_point!(freeze_served);
                served
            }
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

    /// Sets the way to freeze the VM from now on.
    pub(crate) fn set_freezable(&self, freezable: Option<Freezable>) {
        let socket = freezable.as_ref().and_then(|freezable| freezable.socket().ok());
        // A freeze that can't be ended would delay the VM's end.
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
        self.0.freezing.lock().ignore_poison()
    }

    fn freezable(&self) -> MutexGuard<'_, Option<Freezable>> {
        self.0.freezable.lock().ignore_poison()
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

    /// Presses the power button until the VM ends; kills it after `limit`. True when it had to.
    pub fn stop(&self, limit: Duration) -> bool {
        let deadline = after(limit);
        self.state().ending = true;
        self.changed();
        loop {
            if self.state().is_paused {
                // A paused guest can't power off. A VM that can't be resumed is killed below.
                let _ = self.resume();
            }
            // A VM between two boots sees `ending` instead. A guest that still boots, and has no driver for
            // the button yet, does not notice a press.
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

    /// Ends the VM now: by order, and if it does not obey, by force. Returns when it has ended. The order
    /// never blocks.
    pub fn kill(&self) {
        {
            let mut state = self.state();
            (state.ending, state.is_killed) = (true, true);
        }
        // The VM may be between two boots.
        self.changed();
        let home = {
            let mut state = self.state();
            let _ = state.order_to_quit();
            state.home.clone()
        };
        // A keeper ends a VM that is to end, and whose cell does not end it.
        let keeper = home.as_ref().and_then(|home| home.keeper());
        keeper.into_iter().for_each(|keeper| keeper.note_ending());
        let state = self.wait_to_quit(|state| state.over);
        state.home.iter().for_each(|home| home.cut_off());
        drop(state);
        drop(self.wait(QUIT_LIMIT, |state| state.over));
    }

    /// Waits until the shard has obeyed an order to quit, for [`State::quit_limit`] at most.
    fn wait_to_quit(&self, has_obeyed: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let begun = Instant::now();
        let is_slow = |state: &State| state.quit_limit() > ACKNOWLEDGEMENT_LIMIT;
        let state = self.wait(ACKNOWLEDGEMENT_LIMIT, |state| has_obeyed(state) || is_slow(state));
        if !is_slow(&state) {
            return state;
        }
        drop(state);
        self.wait(QUIT_LIMIT.saturating_sub(begun.elapsed()), has_obeyed)
    }

    /// Ends the VM for an external reason: by order, and if it does not obey in time, by force.
    pub(crate) fn quit(&self) {
        self.changed();
        let ordered = self.state().order_to_quit();
        if ordered.is_ok() {
            let state = self.wait_to_quit(|state| state.orders.is_none());
            state.orders.iter().for_each(|home| home.cut_off());
        }
    }

    /// Ends the VM, since it has lost a part. Its client receives the reason. No boot follows.
    pub(crate) fn end_as_lost(&self, why: String) {
        self.state().lost = Some(why);
        self.quit();
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

    /// Records that the VM has ended, and wakes all that wait for it.
    pub fn over(&self) {
        {
            let mut state = self.state();
            state.over = true;
            // The counter can't be full.
            state.over_event.iter().for_each(|event| _ = event.write(1));
        }
        self.0.changed.notify_all();
        self.0.console.close();
    }

    /// A descriptor that is readable once the VM has ended. There is one at most.
    ///
    /// # Errors
    /// If this process has no descriptors left.
    pub(crate) fn over_event(&self) -> io::Result<OwnedFd> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let watched = event.as_fd().try_clone_to_owned()?;
        let mut state = self.state();
        if state.over {
            // The counter can't be full.
            let _ = event.write(1);
        }
        state.over_event = Some(event);
        Ok(watched)
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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use serde_json::json;
    use shard_api::control::ControlSocket;
    use shard_api::launch::{NumberedOrder, OrderId};
    use shard_api::version::VERSIONS;
    use urpc::version::Versions;

    use super::*;
    use crate::shard_process::ShardProcess;

    /// The next order that a shard receives; none at the end.
    fn next_order(shard: &ControlSocket) -> Option<NumberedOrder> {
        let (message, _) = shard.receive_with_files().ok()?;
        Some(serde_json::from_slice(&message).expect("an order"))
    }

    /// A VM whose shard is a process that reads nothing, and the shard's end of the socket.
    fn hung() -> (VmHandle, Arc<ShardProcess>, ControlSocket) {
        let (shard, theirs) = ShardProcess::of(Command::new("sleep").arg("100"));
        let (handle, shard) = (VmHandle::default(), Arc::new(shard));
        handle.state().start(shard.clone(), None);
        (handle, shard, theirs)
    }

    /// The steps of the VM's own thread when its shard has ended.
    fn end(handle: &VmHandle, shard: &ShardProcess) -> String {
        let why = shard.wait();
        handle.end_orders();
        handle.over();
        why
    }

    /// Promise HOSTILE-39.
    #[test]
    fn a_kill_ends_a_shard_whose_orders_fill_the_socket() {
        let (handle, shard, _unread) = hung();
        while shard.link.order(&Order::Status).is_ok() {}
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
            // A client that requests the status waits no longer than the kill takes.
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
                // Later than the limit after which it would kill the shard itself.
                std::thread::sleep(ACKNOWLEDGEMENT_LIMIT + Duration::from_millis(200));
                end(&handle, &shard)
            });
            handle.quit();
            assert_eq!(ended.join().unwrap(), "its process was ended by SIGKILL");
        });
    }

    /// Time for which `kill` lets a shard live that obeys no order. Once the shard has read the order to
    /// quit, `played` plays its part with the order's number.
    fn killed_after(versions: Versions, played: impl FnOnce(&VmHandle, OrderId) + Send) -> Duration {
        let (handle, shard, orders) = hung();
        handle.state().runs = true;
        shard.note_versions(versions);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                let NumberedOrder { id, order } = next_order(&orders).unwrap();
                assert_eq!(order, Order::Quit);
                played(&handle, id);
                while !shard.has_ended() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let took = begun.elapsed();
                end(&handle, &shard);
                took
            });
            handle.kill();
            ended.join().unwrap()
        })
    }

    #[test]
    fn shard_that_does_not_acknowledge_its_end_is_killed_within_a_second() {
        let took = killed_after(VERSIONS, |_, _| ());
        assert!(
            (ACKNOWLEDGEMENT_LIMIT..Duration::from_secs(1)).contains(&took),
            "{took:?}"
        );
        // An answer to another order is no acknowledgement.
        let took = killed_after(VERSIONS, |handle, id| {
            let to = OrderId {
                request: id.request + 1,
                ..id
            };
            handle.state().note_answer(to, Answer::Done);
            handle.changed();
        });
        assert!(took < Duration::from_secs(1), "{took:?}");
    }

    #[test]
    fn shard_that_flushes_its_disks_or_is_of_the_release_before_has_5_s() {
        let acknowledged = |handle: &VmHandle, id| {
            handle.state().note_answer(id, Answer::Done);
            handle.changed();
        };
        std::thread::scope(|scope| {
            let flushes = scope.spawn(|| killed_after(VERSIONS, acknowledged));
            let of_version_1 = killed_after(Versions::FIRST, |_, _| ());
            for took in [flushes.join().unwrap(), of_version_1] {
                assert!(
                    (QUIT_LIMIT..QUIT_LIMIT + ACKNOWLEDGEMENT_LIMIT * 2).contains(&took),
                    "{took:?}"
                );
            }
        });
    }

    #[test]
    fn many_clients_that_ask_for_the_status_send_one_order() {
        let (handle, shard, orders) = hung();
        std::thread::scope(|scope| {
            let asked: Vec<_> = (0..20).map(|_| scope.spawn(|| handle.status())).collect();
            let NumberedOrder { id, order } = next_order(&orders).unwrap();
            assert_eq!(order, Order::Status);
            std::thread::sleep(Duration::from_secs(1));
            let answer = Answer::Status(json!({ "exits": [] }));
            handle.state().note_answer(id, answer);
            handle.changed();
            for one in asked {
                assert_eq!(one.join().unwrap().unwrap()["exits"], json!([]));
            }
        });
        shard.kill();
        assert_eq!(next_order(&orders), None);
    }

    #[test]
    fn a_pause_between_two_boots_ends_when_the_vm_is_to_end() {
        let handle = VmHandle::default();
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                handle.stop(Duration::ZERO);
            });
            handle.wait_between_boots(Duration::from_secs(100));
            handle.over();
        });
        assert!(started.elapsed() < Duration::from_secs(50));
    }

    /// Promise CMD-14.
    #[test]
    fn the_power_button_is_pressed_again_for_a_guest_that_did_not_notice() {
        let (handle, shard, orders) = hung();
        handle.state().runs = true;
        let guest = handle.clone();
        let booting = std::thread::spawn(move || {
            let mut presses = 0;
            while let Some(NumberedOrder { order, .. }) = next_order(&orders) {
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
}
