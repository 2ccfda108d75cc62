//! The place where a vCPU's thread finds its mail, and is woken or kicked for it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::pending_events::PendingEvents;
use super::run_state::{Notification, RunState};
use crate::kick;

/// One vCPU's, in one shard.
#[derive(Debug, Default)]
pub struct EventSlot {
    state: Mutex<State>,
    come: Condvar,
}

#[derive(Debug, Default)]
struct State {
    events: PendingEvents,
    thread: Option<libc::pthread_t>,
    run_state: RunState,
    /// The VM ends: nobody waits any more.
    is_over: bool,
}

impl EventSlot {
    /// The calling thread is the one that takes the mail from now on.
    pub fn attach(&self) {
        // SAFETY: the calling thread's own handle.
        self.lock().thread = Some(unsafe { libc::pthread_self() });
    }

    /// It is not any more.
    pub fn detach(&self) {
        self.lock().thread = None;
    }

    /// Puts something in, and sees that it is looked at soon.
    pub fn post(&self, into: impl FnOnce(&mut PendingEvents)) {
        let mut state = self.lock();
        into(&mut state.events);
        self.notify(state);
    }

    /// Calls the thread out of the guest, if it is there.
    pub fn request_exit(&self) {
        let mut state = self.lock();
        let notification = state.run_state.request_exit();
        self.deliver(notification, state);
    }

    /// Wakes who waits, for good.
    pub fn end(&self) {
        let mut state = self.lock();
        state.is_over = true;
        self.notify(state);
    }

    /// Takes all that is to be looked at, without waiting.
    pub fn take(&self) -> PendingEvents {
        self.lock().events.take()
    }

    /// Says that the thread is about to enter the guest; false, and it is not, when there is mail. The flag that a kick sets
    /// has been cleared before.
    pub fn enter_guest(&self) -> bool {
        let mut state = self.lock();
        let is_idle = state.events.is_empty() && !state.is_over;
        if is_idle {
            state.run_state.set_in_guest();
        }
        is_idle
    }

    /// The thread has left the guest.
    pub fn leave_guest(&self) {
        self.lock().run_state.set_outside_guest();
    }

    /// Waits until there is something to take, the VM ends, or for `limit`.
    pub fn wait(&self, limit: Option<Duration>) {
        self.wait_for(limit, |events| (!events.is_empty()).then_some(()));
    }

    /// Waits for what `take` takes out of the mail; none when the VM ends first, or `limit` is over.
    pub fn wait_for<T>(
        &self,
        limit: Option<Duration>,
        mut take: impl FnMut(&mut PendingEvents) -> Option<T>,
    ) -> Option<T> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut state = self.lock();
        loop {
            if let Some(taken) = take(&mut state.events) {
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
                None => self.come.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    let waited = self.come.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            state.run_state.set_outside_guest();
        }
    }

    /// Calls the thread, if it must be, to what has been put in.
    fn notify(&self, mut state: MutexGuard<'_, State>) {
        let notification = state.run_state.notify();
        self.deliver(notification, state);
    }

    fn deliver(&self, notification: Notification, state: MutexGuard<'_, State>) {
        match (notification, state.thread) {
            // SAFETY: a thread takes itself out of the slot, under the lock that is held here, before it ends.
            (Notification::Kick, Some(thread)) => drop(unsafe { libc::pthread_kill(thread, kick::signal()) }),
            (Notification::Kick, None) | (Notification::None, _) => {}
            (Notification::Wake, _) => {
                drop(state);
                self.come.notify_all();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is whole, whoever panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::super::pending_events::Answer;
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
        let waiter = thread::spawn(move || other.wait_for(None, |events| events.answer.take()));
        slot.post(|events| events.signals.nmis.add());
        slot.post(|events| events.answer = Some(Answer { value: 3 }));
        assert_eq!(
            waiter.join().expect("it waits and goes"),
            Some(Answer { value: 3 })
        );
        assert!(
            !slot.take().signals.nmis.is_empty(),
            "what it did not wait for stays"
        );
    }

    #[test]
    fn shutdown_wakes_waiters_and_prevents_guest_entry() {
        let slot = Arc::new(EventSlot::default());
        let other = slot.clone();
        let waiter = thread::spawn(move || {
            other.wait(None);
            other.wait_for(None, |events| events.answer.take())
        });
        slot.end();
        assert_eq!(waiter.join().expect("it goes"), None);
        assert!(!slot.enter_guest());
    }
}
