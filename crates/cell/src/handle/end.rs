//! The end of a VM: by the power button, by order, or by force.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use shard_api::launch::Order;

use super::{ACKNOWLEDGEMENT_LIMIT, QUIT_LIMIT, State, VmHandle, after};

/// Time for a guest to power off before the power button is pressed again.
const PRESS_INTERVAL: Duration = Duration::from_secs(3);

impl VmHandle {
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
}
