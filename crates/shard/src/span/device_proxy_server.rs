//! Device proxy server: a thread of the home that performs I/O requests of other shards, one after the other.

use std::sync::{Arc, mpsc};

use super::ioapic::IoApicDevice;
use super::packet::{Access, Packet, Space};
use super::router::Router;
use crate::bus::Bus;

/// Largest number of queued requests, at which a sender blocks.
pub const IO_REQUESTS_MAX: usize = 1024;

/// Request of another shard.
#[derive(Debug)]
pub enum IoRequest {
    /// Access to a device for a vCPU of another shard, which awaits the reply.
    Access {
        /// Shard of the vCPU.
        from: u8,
        /// vCPU that makes the access.
        vcpu: u8,
        /// Address, width and data of the access.
        access: Access,
    },
    /// Write to a doorbell, without a reply.
    Doorbell {
        /// Address and value of the write.
        access: Access,
    },
    /// End of a level-triggered interrupt, for the IOAPIC.
    EndOfInterrupt {
        /// Vector of the interrupt.
        vector: u8,
    },
}

/// Device proxy server of the home.
pub struct DeviceProxyServer {
    /// Queue of requests.
    pub io_requests: mpsc::Receiver<IoRequest>,
    /// Router for the replies.
    pub router: Arc<Router>,
    /// Bus of I/O ports.
    pub ports: Arc<Bus>,
    /// Bus of physical addresses outside RAM.
    pub memory: Arc<Bus>,
    /// The IOAPIC of the home.
    pub ioapic: Arc<IoApicDevice>,
}

impl DeviceProxyServer {
    /// Performs requests until all senders are dropped.
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

    /// Performs an access; returns the value that was read, or 0 for a write.
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
