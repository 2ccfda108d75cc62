//! Devices as a shard without devices has them: every access goes to the home.

use std::sync::Arc;

use super::packet::{Access, Packet, Space};
use super::router::{HOME, Router};
use crate::arch::x86_64::layout::{Layout, MMIO32_BYTES, MMIO32_START};
use crate::bus::BusDevice;
use crate::pci::BAR_BYTES;
use crate::virtio::transport;

/// All of an address space, for one vCPU.
pub struct DeviceProxyClient {
    /// Which space.
    pub space: Space,
    /// The vCPU.
    pub vcpu: u8,
    /// The way to the home.
    pub router: Arc<Router>,
    /// Where the windows of the PCI bus are.
    pub layout: Arc<Layout>,
}

impl DeviceProxyClient {
    /// A write that a driver does not wait for: to the notification registers of a virtio device (Virtio 1.2, 4.1.4.4),
    /// each of whose BARs starts at a multiple of its size.
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
        if let Some(answer) = self.router.access(self.vcpu, access) {
            data.copy_from_slice(&answer.value.to_le_bytes()[..data.len()]);
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
            // The vCPU goes on when the device has taken it. None when the VM ends.
            let _ = self.router.access(self.vcpu, access);
        }
    }
}
