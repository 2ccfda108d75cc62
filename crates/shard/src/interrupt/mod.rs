//! Message-signalled interrupts: their numbers (GSIs), their routes in KVM, and an event file each.
//!
//! A [`Vector`] is one MSI-X vector. Its event file is bound to KVM once, when the vector is created, before
//! the vCPUs run. Later only the routing table changes, when the guest writes a message and unmasks it. A
//! vector that is signalled while masked is pending, and is delivered when it is unmasked. A signal takes one
//! uncontended lock and one `write`.
//!
//! Devices use KVM through [`Wiring`], so that all code above it runs without KVM. The receiver, a vCPU's
//! local interrupt controller, is a [`LocalController`]: KVM's or the shard's.

mod local;
mod vector;
mod wiring;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use locks::IgnorePoison;

use crate::arch::x86_64::layout::{IOAPIC_PINS, MSI_GSI_END, MSI_GSI_START};

pub use local::{InKernel, LocalController, Next};
pub use vector::Vector;
pub use wiring::{Route, Wiring};

/// Message that a device writes to raise an interrupt (PCI 3.0, 6.8.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Address of the write, which selects the target processors.
    pub address: u64,
    /// Data of the write: the vector and its delivery.
    pub data: u32,
}

/// The VM's interrupt numbers and routes. One for each VM.
pub struct Interrupts {
    wiring: Arc<dyn Wiring>,
    messages: Mutex<Vec<Option<Message>>>,
}

impl Interrupts {
    /// Creates the table without vectors. KVM's interrupt chip must exist before [`Interrupts::vector`] is
    /// called.
    pub fn new(wiring: Arc<dyn Wiring>) -> Arc<Self> {
        Arc::new(Self {
            wiring,
            messages: Mutex::new(Vec::new()),
        })
    }

    /// Creates a vector, which is masked and has no message.
    ///
    /// # Errors
    /// Fails if the numbers are used up, or KVM refuses the event file.
    pub fn vector(self: &Arc<Self>) -> io::Result<Vector> {
        let gsi = {
            let mut messages = self.lock();
            // The table is never longer than the few thousand numbers of KVM.
            let gsi = MSI_GSI_START + messages.len() as u32;
            if gsi >= MSI_GSI_END {
                return Err(io::Error::other("all interrupt numbers are in use"));
            }
            messages.push(None);
            gsi
        };
        Vector::new(self.clone(), gsi)
    }

    pub(crate) fn wiring(&self) -> &dyn Wiring {
        &*self.wiring
    }

    /// Routes number `gsi` to `message`. KVM's table is replaced only if something changes, since a
    /// replacement waits for every vCPU.
    fn route(&self, gsi: u32, message: Message) -> io::Result<()> {
        let mut messages = self.lock();
        let index = (gsi - MSI_GSI_START) as usize;
        if messages[index] == Some(message) {
            return Ok(());
        }
        let before = messages[index].replace(message);
        let mut routes: Vec<Route> = (0..IOAPIC_PINS).map(Route::Pin).collect();
        routes.extend(
            messages
                .iter()
                .zip(MSI_GSI_START..)
                .filter_map(|(message, gsi)| message.map(|message| Route::Message { gsi, message })),
        );
        let taken = self.wiring.set_routes(&routes);
        if taken.is_err() {
            // KVM keeps its old table, and so does this one: the next change must not contain the refused
            // message.
            messages[index] = before;
        }
        taken
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Message>>> {
        // The table is consistent between statements, even after a panic.
        self.messages.lock().ignore_poison()
    }
}

#[cfg(test)]
mod tests;
