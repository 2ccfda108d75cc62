//! The VM's generation id (Microsoft, "Virtual Machine Generation ID"): 16 bytes of guest memory. The id
//! changes whenever the VM continues from a state from which other VMs may continue too. A kernel with a
//! driver for it then draws new random numbers.

use std::io;

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::layout::GENERATION_ID;
use crate::memory::GuestRam;

const ID_BYTES: usize = 16;

/// The id, and the interrupt that reports its change.
pub struct Generation(EventFd);

impl Generation {
    /// Creates the interrupt alone.
    pub fn new() -> io::Result<Self> {
        EventFd::new(EFD_NONBLOCK).map(Self)
    }

    /// Writes an id that no other VM has.
    pub fn write(&self, memory: &GuestRam) -> io::Result<()> {
        let mut id = [0; ID_BYTES];
        // SAFETY: fills a live buffer of that length; requests this small are never cut short.
        let filled = unsafe { libc::getrandom(id.as_mut_ptr().cast(), id.len(), 0) };
        if filled != ID_BYTES as isize {
            return Err(io::Error::last_os_error());
        }
        memory
            .write_slice(&id, GuestAddress(GENERATION_ID))
            .map_err(io::Error::other)
    }

    /// Returns the event file to register as irqfd.
    pub fn event(&self) -> &EventFd {
        &self.0
    }

    /// Notifies the guest that the id has changed.
    pub fn changed(&self) -> io::Result<()> {
        self.0.write(1)
    }
}
