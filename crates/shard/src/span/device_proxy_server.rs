//! The home's device proxy server: a thread that does for other shards what only the home can do, one thing after the other.

use std::sync::{Arc, mpsc};

use super::ioapic::IoApicDevice;
use super::packet::{Access, Packet, Space};
use super::router::Router;
use crate::bus::Bus;

/// Jobs that wait at most; then who brings more waits.
pub const IO_REQUESTS_MAX: usize = 1024;

/// Something to do.
#[derive(Debug)]
pub enum IoRequest {
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

/// What the device proxy server works with.
pub struct DeviceProxyServer {
    /// What is to be done.
    pub io_requests: mpsc::Receiver<IoRequest>,
    /// Where the answers go.
    pub router: Arc<Router>,
    /// I/O ports.
    pub ports: Arc<Bus>,
    /// Addresses outside RAM.
    pub memory: Arc<Bus>,
    /// The IOAPIC.
    pub ioapic: Arc<IoApicDevice>,
}

impl DeviceProxyServer {
    /// Works until nobody can bring anything.
    pub fn run(self) {
        while let Ok(request) = self.io_requests.recv() {
            match request {
                IoRequest::Access { from, vcpu, access } => {
                    let value = self.access(access);
                    self.router.send(from, &Packet::Answer { vcpu, value });
                }
                IoRequest::Doorbell { access } => {
                    self.access(access);
                }
                IoRequest::EndOfInterrupt { vector } => self.ioapic.end_of_interrupt(vector),
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
