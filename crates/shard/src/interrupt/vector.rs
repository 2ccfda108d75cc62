//! One interrupt vector: its event file, and whether it may be delivered.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Interrupts, Message};

/// One message-signalled interrupt. Signalled from any thread.
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

    /// Raises the interrupt, or leaves it pending while masked.
    pub fn signal(&self) {
        let mut state = self.lock();
        if state.masked {
            state.pending = true;
        } else {
            self.deliver();
        }
    }

    /// Allows the interrupt, as `message`, and delivers it if it is pending.
    ///
    /// # Errors
    /// When KVM refuses the message: the vector stays masked.
    pub fn unmask(&self, message: Message) -> io::Result<()> {
        let mut state = self.lock();
        self.interrupts.route(self.gsi, message)?;
        state.masked = false;
        if std::mem::take(&mut state.pending) {
            self.deliver();
        }
        Ok(())
    }

    /// Holds the interrupt back from now on.
    pub fn mask(&self) {
        self.lock().masked = true;
    }

    /// Whether it was signalled while masked.
    pub fn pending(&self) -> bool {
        self.lock().pending
    }

    /// Forgets that it was signalled.
    pub fn clear(&self) {
        self.lock().pending = false;
    }

    fn deliver(&self) {
        self.interrupts.wiring().raise(&self.event, self.gsi);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Two flags are whole whoever panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Vector {
    fn drop(&mut self) {
        // Nothing else can be done: the VM is ending.
        let _ = self.interrupts.wiring().unbind_interrupt(&self.event, self.gsi);
    }
}
