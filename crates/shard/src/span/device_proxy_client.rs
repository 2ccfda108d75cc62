//! Client of the device proxy: the bus of a shard without devices, which sends every access to the home.

use std::sync::Arc;

use super::packet::{Access, Packet, Space};
use super::router::{HOME, Router};
use crate::arch::x86_64::layout::{Layout, MMIO32_BYTES, MMIO32_START};
use crate::bus::BusDevice;
use crate::pci::BAR_BYTES;
use crate::virtio::transport;

/// Device proxy client of one vCPU for one whole address space.
pub struct DeviceProxyClient {
    /// Address space.
    pub space: Space,
    /// vCPU that makes the accesses.
    pub vcpu: u8,
    /// Router to the home.
    pub router: Arc<Router>,
    /// Memory layout, with the windows of the PCI bus.
    pub layout: Arc<Layout>,
}

impl DeviceProxyClient {
    /// Returns whether a write to `address` needs no reply: a write to the notification registers of a virtio
    /// device (Virtio 1.2, 4.1.4.4). Each BAR starts at a multiple of its size.
    fn is_doorbell(&self, address: u64) -> bool {
        let low = MMIO32_START..MMIO32_START + MMIO32_BYTES;
        let in_window = low.contains(&address) || self.layout.mmio64.contains(&address);
        self.space == Space::Memory && in_window && transport::is_notification(address % BAR_BYTES)
    }
}

impl BusDevice for DeviceProxyClient {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let Ok(size @ 1..=8) = u8::try_from(data.len()) else {
            return;
        };
        let access = Access {
            space: self.space,
            address: offset,
            size,
            value: None,
        };
        if let Some(reply) = self.router.access(self.vcpu, access) {
            data.copy_from_slice(&reply.value.to_le_bytes()[..data.len()]);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 8];
        let Ok(size @ 1..=8) = u8::try_from(data.len()) else {
            return;
        };
        bytes[..data.len()].copy_from_slice(data);
        let access = Access {
            space: self.space,
            address: offset,
            size,
            value: Some(u64::from_le_bytes(bytes)),
        };
        if self.is_doorbell(offset) {
            self.router.send(HOME, &Packet::Doorbell { access });
        } else {
            // The vCPU continues after the device has taken the write. There is no reply when the VM ends.
            let _ = self.router.access(self.vcpu, access);
        }
    }
}
