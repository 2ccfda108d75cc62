//! The home's desk: a thread that does for other shards what only the home can do, one thing after the other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use apic::{Interrupt, IoApic, Shorthand};

use super::packet::{Access, Packet, Space};
use super::router::Router;
use crate::bus::{Bus, BusDevice};

/// Jobs that wait at most; then who brings more waits.
pub const JOBS_MAX: usize = 1024;

/// Something to do.
#[derive(Debug)]
pub enum Job {
    /// Access a device for a vCPU of another shard, which waits for the answer.
    Access {
        /// Its shard.
        from: u8,
        /// The vCPU.
        vcpu: u8,
        /// What it wants.
        access: Access,
    },
    /// Ring a doorbell.
    Doorbell {
        /// Which, and with what.
        access: Access,
    },
    /// Tell the IOAPIC.
    EndOfInterrupt {
        /// What was served.
        vector: u8,
    },
}

/// The IOAPIC on the bus.
pub struct IoApicDevice {
    chip: Mutex<IoApic>,
    router: Arc<Router>,
}

impl IoApicDevice {
    /// A new one, which sends its interrupts through `router`.
    pub fn new(router: Arc<Router>) -> Self {
        Self {
            chip: Mutex::new(IoApic::new()),
            router,
        }
    }

    /// An edge on a pin.
    pub fn pulse(&self, pin: u8) {
        let sent = {
            let mut chip = self.chip();
            let sent = chip.set_line(pin, true);
            // A line that falls sends nothing.
            let _ = chip.set_line(pin, false);
            sent
        };
        self.send(sent);
    }

    fn end_of_interrupt(&self, vector: u8) {
        let sent = self.chip().end_of_interrupt(vector);
        self.send(sent);
    }

    fn send(&self, interrupts: impl IntoIterator<Item = Interrupt>) {
        for interrupt in interrupts {
            self.router.interrupt(&interrupt, Shorthand::None, None);
        }
    }

    fn chip(&self) -> MutexGuard<'_, IoApic> {
        self.chip.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BusDevice for IoApicDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let Ok(data) = <&mut [u8; 4]>::try_from(data) {
            *data = self.chip().read(offset).to_le_bytes();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Ok(data) = <[u8; 4]>::try_from(data) {
            let sent = self.chip().write(offset, u32::from_le_bytes(data));
            self.send(sent);
        }
    }
}

/// What the desk works with.
pub struct Desk {
    /// What is to be done.
    pub jobs: mpsc::Receiver<Job>,
    /// Where the answers go.
    pub router: Arc<Router>,
    /// I/O ports.
    pub ports: Arc<Bus>,
    /// Addresses outside RAM.
    pub memory: Arc<Bus>,
    /// The IOAPIC.
    pub ioapic: Arc<IoApicDevice>,
}

impl Desk {
    /// Works until nobody can bring anything.
    pub fn run(self) {
        while let Ok(job) = self.jobs.recv() {
            match job {
                Job::Access { from, vcpu, access } => {
                    let value = self.access(access);
                    self.router.send(from, &Packet::Answer { vcpu, value });
                }
                Job::Doorbell { access } => {
                    self.access(access);
                }
                Job::EndOfInterrupt { vector } => self.ioapic.end_of_interrupt(vector),
            }
        }
    }

    /// What was read; zero of a write.
    fn access(&self, access: Access) -> u64 {
        let bus = match access.space {
            Space::Ports => &self.ports,
            Space::Memory => &self.memory,
        };
        let mut bytes = access.value.unwrap_or_default().to_le_bytes();
        let Some(data) = bytes.get_mut(..usize::from(access.size)) else {
            return u64::MAX;
        };
        if access.value.is_some() {
            bus.write(access.address, data);
            return 0;
        }
        bus.read(access.address, data);
        u64::from_le_bytes(bytes)
    }
}
