//! One interrupt vector: its event file, its mask and its pending bit.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use locks::IgnorePoison;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Interrupts, Message};

/// One message-signalled interrupt. Any thread may signal it.
pub struct Vector {
    interrupts: Arc<Interrupts>,
    gsi: u32,
    event: EventFd,
    state: Mutex<State>,
}

struct State {
    masked: bool,
    pending: bool,
}

impl Vector {
    pub(super) fn new(interrupts: Arc<Interrupts>, gsi: u32) -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK)?;
        interrupts.wiring().bind_interrupt(&event, gsi)?;
        Ok(Self {
            interrupts,
            gsi,
            event,
            state: Mutex::new(State {
                masked: true,
                pending: false,
            }),
        })
    }

    /// Raises the interrupt, or leaves it pending if masked.
    pub fn signal(&self) {
        let mut state = self.lock();
        if state.masked {
            state.pending = true;
        } else {
            self.deliver();
        }
    }

    /// Unmasks the interrupt, which is sent as `message`, and delivers it if it is pending.
    ///
    /// # Errors
    /// Fails if KVM refuses the message; the vector stays masked.
    pub fn unmask(&self, message: Message) -> io::Result<()> {
        let mut state = self.lock();
        self.interrupts.route(self.gsi, message)?;
        state.masked = false;
        if std::mem::take(&mut state.pending) {
            self.deliver();
        }
        Ok(())
    }

    /// Masks the interrupt.
    pub fn mask(&self) {
        self.lock().masked = true;
    }

    /// Returns whether the interrupt was signalled while masked.
    pub fn pending(&self) -> bool {
        self.lock().pending
    }

    /// Clears the pending bit.
    pub fn clear(&self) {
        self.lock().pending = false;
    }

    fn deliver(&self) {
        self.interrupts.wiring().raise(&self.event, self.gsi);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Two flags are consistent even after a panic.
        self.state.lock().ignore_poison()
    }
}

impl Drop for Vector {
    fn drop(&mut self) {
        // An error has no remedy: the VM is ending.
        let _ = self.interrupts.wiring().unbind_interrupt(&self.event, self.gsi);
    }
}
