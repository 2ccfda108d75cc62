//! The VM's generation id (Microsoft, "Virtual Machine Generation ID"): 16 bytes of guest memory that differ
//! whenever the VM goes on from a state that others may go on from too. A kernel with its driver then draws
//! new random numbers.

use std::io;

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::layout::GENERATION_ID;
use crate::memory::GuestRam;

const ID_BYTES: usize = 16;

/// The id and the interrupt that tells of its change.
pub struct Generation(EventFd);

impl Generation {
    /// The interrupt alone.
    pub fn new() -> io::Result<Self> {
        EventFd::new(EFD_NONBLOCK).map(Self)
    }

    /// Gives the VM with this memory its id: one that no other has.
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

    /// What to register as irqfd.
    pub fn event(&self) -> &EventFd {
        &self.0
    }

    /// Tells the guest that the id is not the one it knows.
    pub fn changed(&self) -> io::Result<()> {
        self.0.write(1)
    }
}
