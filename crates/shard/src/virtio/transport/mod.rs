//! Virtio over PCI (Virtio 1.2, section 4.1), modern only, MSI-X only.
//!
//! BAR 0, 64 bits:
//!
//! ```text
//! 0x0000  common configuration      0x3000  notifications, 4 bytes for each queue (ioeventfd)
//! 0x1000  interrupt status          0x4000  MSI-X table
//! 0x2000  device configuration      0x5000  MSI-X pending bits
//! ```

mod common_config;
mod registers;
mod signals;
mod state;

use std::io;
use std::sync::Arc;

use serde_json::{Value, json};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::interrupt::Interrupts;
use crate::memory::GuestRam;
use crate::pci::config::{ConfigSpace, Identity};
use crate::pci::msix::{ENTRY_BYTES, Msix, VECTORS_MAX};
use crate::pci::{BAR_BYTES, PciFunction};
use crate::virtio::{VirtioDevice, VirtioId};
use registers::{COMMON_BYTES, QueueRegisters};
use signals::Signals;

/// Receives a line for the VM's log, from any thread.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const PENDING: u64 = 0x5000;
const REGION_BYTES: u64 = 0x1000;
const NOTIFY_MULTIPLIER: u32 = 4;

const VENDOR_VIRTIO: u16 = 0x1AF4;
const DEVICE_BASE: u16 = 0x1040;
const CAPABILITY_VENDOR: u8 = 0x09;

const TYPE_COMMON: u8 = 1;
const TYPE_NOTIFY: u8 = 2;
const TYPE_ISR: u8 = 3;
const TYPE_DEVICE: u8 = 4;
const TYPE_PCI_ACCESS: u8 = 5;

/// Returns whether this offset in a BAR is a notification register. A driver only writes those, and does not
/// wait for a result.
pub fn is_notification(offset: u64) -> bool {
    (NOTIFY..NOTIFY + REGION_BYTES).contains(&offset)
}

/// A virtio device on the PCI bus.
pub struct VirtioPci {
    name: String,
    device: Box<dyn VirtioDevice>,
    memory: GuestRam,
    interrupts: Arc<Interrupts>,
    config: ConfigSpace,
    msix: Msix,
    signals: Arc<Signals>,
    doorbells: Vec<EventFd>,
    /// Address to which the doorbells are bound now.
    bound: Option<u64>,
    /// Offset of the PCI configuration access capability.
    access: usize,
    offered: u64,
    accepted: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    status: u8,
    active: bool,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
}

impl VirtioPci {
    /// Puts `device`, called `name` in logs and status, on the bus with its BAR at `bar`.
    ///
    /// # Errors
    /// Fails if KVM has no interrupt for it, or it has more queues than a BAR has room for.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        name: &str,
        memory: GuestRam,
        interrupts: &Arc<Interrupts>,
        log: Log,
        bar: u64,
    ) -> io::Result<Self> {
        let queues: Vec<QueueRegisters> = device
            .queue_sizes()
            .iter()
            .copied()
            .map(QueueRegisters::new)
            .collect();
        if queues.len() >= VECTORS_MAX {
            return Err(io::Error::other("a virtio device has at most 255 queues"));
        }
        let id = device.id();
        let mut config = ConfigSpace::new(Identity {
            vendor: VENDOR_VIRTIO,
            device: DEVICE_BASE + id as u16,
            revision: 1,
            class: class(id),
            subsystem_vendor: VENDOR_VIRTIO,
            subsystem: DEVICE_BASE + id as u16,
        });
        config.set_bar(bar, BAR_BYTES);
        let access = add_capabilities(&mut config)?;
        let msix = Msix::new(
            interrupts,
            queues.len() + 1,
            &mut config,
            TABLE as u32,
            PENDING as u32,
        )?;
        let signals = Arc::new(Signals::new(name, log, msix.vectors(), queues.len()));
        let doorbells = queues
            .iter()
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<io::Result<_>>()?;
        let offered = device.features() | 1 << virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
        Ok(Self {
            name: name.to_owned(),
            device,
            memory,
            interrupts: interrupts.clone(),
            config,
            msix,
            signals,
            doorbells,
            bound: None,
            access,
            offered,
            accepted: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            status: 0,
            active: false,
            queue_select: 0,
            queues,
        })
    }

    /// Binds the doorbells to the BAR's current address.
    fn follow_bar(&mut self) {
        let decoded = self.config.decoded();
        if decoded == self.bound {
            return;
        }
        let wiring = self.interrupts.wiring();
        let place = |bar: u64, index: usize| bar + NOTIFY + u64::from(NOTIFY_MULTIPLIER) * index as u64;
        for (index, doorbell) in self.doorbells.iter().enumerate() {
            if let Some(old) = self.bound {
                // Only an address that was never bound is refused, and then there is nothing to unbind.
                let _ = wiring.unbind_doorbell(doorbell, place(old, index));
            }
            if let Some(new) = decoded
                && let Err(error) = wiring.bind_doorbell(doorbell, place(new, index))
            {
                // Notifications then arrive through `write_bar`, which is slower.
                self.signals.log(&format!(
                    "notifications of queue {index} take the slow path: {error}"
                ));
            }
        }
        self.bound = decoded;
    }

    fn notify(&self, offset: u64) {
        let index = (offset / u64::from(NOTIFY_MULTIPLIER)) as usize;
        if let Some(doorbell) = self.doorbells.get(index) {
            // The one possible error is a full counter, with which the device's thread wakes anyway.
            let _ = doorbell.write(1);
        }
    }

    /// Returns offset and length of the BAR access that the PCI configuration access capability selects now.
    fn access_target(&self) -> Option<(u64, usize)> {
        let mut fields = [0; 16];
        self.config.read(self.access, &mut fields);
        let word =
            |at: usize| u32::from_le_bytes([fields[at], fields[at + 1], fields[at + 2], fields[at + 3]]);
        let (bar, offset, length) = (fields[4], u64::from(word(8)), word(12));
        let fits = bar == 0 && matches!(length, 1 | 2 | 4) && offset + u64::from(length) <= BAR_BYTES;
        fits.then_some((offset, length as usize))
    }

    /// Returns whether a configuration access includes the data register of that capability.
    fn touches_access_data(&self, offset: usize, length: usize) -> bool {
        let data = self.access + 16;
        offset < data + 4 && offset.saturating_add(length) > data
    }
}

/// Adds the virtio capabilities; returns the offset of the configuration access capability.
fn add_capabilities(config: &mut ConfigSpace) -> io::Result<usize> {
    let full = || io::Error::other("no room for the virtio capabilities");
    let body = |kind: u8, offset: u64, length: u32, extra: &[u8]| {
        let mut body = vec![16 + extra.len() as u8, kind, 0, 0, 0, 0];
        body.extend_from_slice(&(offset as u32).to_le_bytes());
        body.extend_from_slice(&length.to_le_bytes());
        body.extend_from_slice(extra);
        body
    };
    let region = REGION_BYTES as u32;
    for body in [
        body(TYPE_COMMON, COMMON, COMMON_BYTES as u32, &[]),
        body(TYPE_ISR, ISR, 4, &[]),
        body(TYPE_DEVICE, DEVICE, region, &[]),
        body(TYPE_NOTIFY, NOTIFY, region, &NOTIFY_MULTIPLIER.to_le_bytes()),
    ] {
        config
            .add_capability(CAPABILITY_VENDOR, &body, &[])
            .ok_or_else(full)?;
    }
    let access = body(TYPE_PCI_ACCESS, 0, 0, &[0; 4]);
    let mut writable = [0xFF; 18];
    writable[..2].fill(0);
    writable[3..6].fill(0);
    config
        .add_capability(CAPABILITY_VENDOR, &access, &writable)
        .ok_or_else(full)
}

/// PCI class codes, for tools that show them.
fn class(id: VirtioId) -> u32 {
    match id {
        VirtioId::Net => 0x02_00_00,
        VirtioId::Block => 0x01_80_00,
        _ => 0xFF_00_00,
    }
}

impl PciFunction for VirtioPci {
    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
        if self.touches_access_data(offset, data.len())
            && let Some((target, length)) = self.access_target()
        {
            let mut value = [0; 4];
            self.read_bar(target, &mut value[..length]);
            for (index, byte) in data.iter_mut().enumerate() {
                if let Some(at) = (offset + index).checked_sub(self.access + 16)
                    && let Some(value) = value.get(at)
                {
                    *byte = *value;
                }
            }
        }
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        self.follow_bar();
        if let Err(error) = self.msix.configured(&self.config) {
            self.signals.log(&format!("cannot route an interrupt: {error}"));
        }
        if self.touches_access_data(offset, data.len())
            && let Some((target, length)) = self.access_target()
        {
            let mut value = [0; 4];
            self.config.read(self.access + 16, &mut value);
            self.write_bar(target, &value[..length]);
        }
    }

    fn decoded(&self) -> Option<u64> {
        self.config.decoded()
    }

    fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let inner = (offset % REGION_BYTES) as usize;
        match offset - offset % REGION_BYTES {
            COMMON => self.read_common(inner, data),
            ISR if inner == 0 && !data.is_empty() => data[0] = self.signals.take_isr(),
            DEVICE => self.device.read_config(inner as u64, data),
            TABLE => self.msix.read_table(inner, data),
            PENDING => self.msix.read_pending(inner, data),
            _ => {}
        }
    }

    fn write_bar(&mut self, offset: u64, data: &[u8]) {
        let inner = (offset % REGION_BYTES) as usize;
        match offset - offset % REGION_BYTES {
            COMMON => self.write_common(inner, data),
            DEVICE => self.device.write_config(inner as u64, data),
            NOTIFY => self.notify(inner as u64),
            TABLE => {
                if let Err(error) = self.msix.write_table(inner, data) {
                    self.signals.log(&format!("cannot route an interrupt: {error}"));
                }
            }
            _ => {}
        }
    }

    fn status(&self) -> Value {
        json!({
            "name": self.name,
            "device": format!("{:?}", self.device.id()).to_lowercase(),
            "active": self.active,
            "needs_reset": self.signals.reset_wanted(),
            "features": format!("{:#x}", self.accepted),
            "counters": self.device.status(),
        })
    }

    fn save(&self) -> io::Result<Value> {
        self.state()
    }

    fn restore(&mut self, state: &Value) -> io::Result<()> {
        self.resume(state)
    }

    fn stop(&mut self) {
        self.reset();
    }
}

const _: () = assert!(VECTORS_MAX * ENTRY_BYTES <= REGION_BYTES as usize);

#[cfg(test)]
mod tests;
