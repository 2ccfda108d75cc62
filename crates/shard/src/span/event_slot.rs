//! Slot from which a vCPU's thread takes its pending events, and which wakes or kicks that thread for new
//! ones.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use locks::IgnorePoison;

use super::pending_events::PendingEvents;
use super::run_state::{Notification, RunState};
use crate::kick;

/// Event slot of one vCPU in one shard.
#[derive(Debug, Default)]
pub struct EventSlot {
    state: Mutex<State>,
    posted: Condvar,
}

#[derive(Debug, Default)]
struct State {
    events: PendingEvents,
    thread: Option<libc::pthread_t>,
    run_state: RunState,
    /// The VM ends, so no thread blocks any more.
    is_over: bool,
    /// The next wait for any event returns at once, though none is pending.
    is_woken: bool,
}

impl EventSlot {
    /// Makes the calling thread the one that takes the events.
    pub fn attach(&self) {
        // SAFETY: the calling thread's own handle.
        self.lock().thread = Some(unsafe { libc::pthread_self() });
    }

    /// Detaches the thread.
    pub fn detach(&self) {
        self.lock().thread = None;
    }

    /// Posts an event and notifies the thread if necessary.
    pub fn post(&self, into: impl FnOnce(&mut PendingEvents)) {
        let mut state = self.lock();
        into(&mut state.events);
        self.notify(state);
    }

    /// Kicks the thread if it is in the guest.
    pub fn request_exit(&self) {
        let mut state = self.lock();
        let notification = state.run_state.request_exit();
        self.deliver(notification, state);
    }

    /// Ends the current or next [`EventSlot::wait`]. A wait for a certain event goes on
    /// ([`EventSlot::wait_for`]).
    pub fn wake(&self) {
        let mut state = self.lock();
        state.is_woken = true;
        self.notify(state);
    }

    /// Wakes all waiters permanently, as the VM ends.
    pub fn end(&self) {
        let mut state = self.lock();
        state.is_over = true;
        self.notify(state);
    }

    /// Takes all events that the vCPU's loop serves, without blocking.
    pub fn take(&self) -> PendingEvents {
        self.lock().events.take()
    }

    /// Records that the thread is about to enter the guest, and returns true. Returns false when events are
    /// pending. The caller has cleared the flag that a kick sets.
    pub fn enter_guest(&self) -> bool {
        let mut state = self.lock();
        let is_idle = state.events.is_empty() && !state.is_over;
        if is_idle {
            state.run_state.set_in_guest();
        }
        is_idle
    }

    /// Records that the thread has left the guest.
    pub fn leave_guest(&self) {
        self.lock().run_state.set_outside_guest();
    }

    /// Blocks until an event is pending, the VM ends, `limit` expires, or [`EventSlot::wake`] was called.
    pub fn wait(&self, limit: Option<Duration>) {
        self.wait_until(limit, |state| {
            (std::mem::take(&mut state.is_woken) || !state.events.is_empty()).then_some(())
        });
    }

    /// Blocks until `take` returns a value from the events. Returns none when the VM ends first or `limit`
    /// expires.
    pub fn wait_for<T>(
        &self,
        limit: Option<Duration>,
        mut take: impl FnMut(&mut PendingEvents) -> Option<T>,
    ) -> Option<T> {
        self.wait_until(limit, |state| take(&mut state.events))
    }

    fn wait_until<T>(
        &self,
        limit: Option<Duration>,
        mut take: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut state = self.lock();
        loop {
            if let Some(taken) = take(&mut state) {
                return Some(taken);
            }
            if state.is_over {
                return None;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return None;
            }
            state.run_state.set_blocked();
            state = match left {
                None => self.posted.wait(state).ignore_poison(),
                Some(left) => {
                    let waited = self.posted.wait_timeout(state, left);
                    waited.ignore_poison().0
                }
            };
            state.run_state.set_outside_guest();
        }
    }

    /// Notifies the thread of a new event if necessary.
    fn notify(&self, mut state: MutexGuard<'_, State>) {
        let notification = state.run_state.notify();
        self.deliver(notification, state);
    }

    fn deliver(&self, notification: Notification, state: MutexGuard<'_, State>) {
        match (notification, state.thread) {
            // SAFETY: a thread detaches itself before it ends, under the lock that is held here.
            (Notification::Kick, Some(thread)) => drop(unsafe { libc::pthread_kill(thread, kick::signal()) }),
            (Notification::Kick, None) | (Notification::None, _) => {}
            (Notification::Wake, _) => {
                drop(state);
                self.posted.notify_all();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete, so a panic of another thread left no partial one.
        self.state.lock().ignore_poison()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::super::pending_events::DeviceReply;
    use super::*;

    #[test]
    fn pending_event_prevents_guest_entry_and_wakes_a_waiter() {
        let slot = Arc::new(EventSlot::default());
        assert!(slot.enter_guest());
        slot.leave_guest();
        slot.post(|events| events.signals.nmis.add());
        assert!(!slot.enter_guest());
        assert!(!slot.take().signals.nmis.is_empty());
        assert!(slot.enter_guest());
        slot.leave_guest();
        let other = slot.clone();
        let waiter = thread::spawn(move || other.wait_for(None, |events| events.reply.take()));
        slot.post(|events| events.signals.nmis.add());
        slot.post(|events| events.reply = Some(DeviceReply { value: 3 }));
        assert_eq!(
            waiter.join().expect("the waiter returns"),
            Some(DeviceReply { value: 3 })
        );
        assert!(
            !slot.take().signals.nmis.is_empty(),
            "an event that the waiter did not ask for stays"
        );
    }

    #[test]
    fn wake_ends_a_wait_for_any_event_but_not_one_for_a_reply() {
        let slot = Arc::new(EventSlot::default());
        let other = slot.clone();
        let waiter = thread::spawn(move || {
            other.wait(None);
            other.wait_for(None, |events| events.reply.take())
        });
        slot.wake();
        // Also while the thread waits for the reply.
        thread::sleep(Duration::from_millis(50));
        slot.wake();
        thread::sleep(Duration::from_millis(50));
        assert!(!waiter.is_finished(), "the wake-up took the place of the reply");
        slot.post(|events| events.reply = Some(DeviceReply { value: 4 }));
        let reply = waiter.join().expect("the waiter returns");
        assert_eq!(reply, Some(DeviceReply { value: 4 }));
        // The second wake-up is pending.
        slot.wait(None);
        assert!(slot.enter_guest(), "a wake-up is no event");
    }

    #[test]
    fn shutdown_wakes_waiters_and_prevents_guest_entry() {
        let slot = Arc::new(EventSlot::default());
        let other = slot.clone();
        let waiter = thread::spawn(move || {
            other.wait(None);
            other.wait_for(None, |events| events.reply.take())
        });
        slot.end();
        assert_eq!(waiter.join().expect("the waiter returns"), None);
        assert!(!slot.enter_guest());
    }
}
