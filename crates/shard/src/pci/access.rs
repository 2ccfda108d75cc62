//! Access paths to the bus: configuration mechanism 1, ECAM, memory windows.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::bus::BusDevice;

use super::PciBus;

/// Configuration mechanism 1: an address at 0xCF8, data at 0xCFC to 0xCFF.
pub struct ConfigPorts {
    bus: PciBus,
    address: AtomicU32,
}

const ADDRESS_ENABLE: u32 = 1 << 31;
/// Offset of the data registers from the address register.
const DATA: u64 = 4;

impl ConfigPorts {
    pub(super) fn new(bus: PciBus) -> Self {
        Self {
            bus,
            address: AtomicU32::new(0),
        }
    }

    /// Returns slot and register that the data port selects, if they are on bus 0, function 0.
    fn target(&self, offset: u64) -> Option<(usize, usize)> {
        let address = self.address.load(Ordering::Relaxed);
        let (bus, slot, function) = (address >> 16 & 0xFF, address >> 11 & 0x1F, address >> 8 & 0x7);
        let register = (address & 0xFC) as usize + (offset - DATA) as usize;
        (address & ADDRESS_ENABLE != 0 && bus == 0 && function == 0).then_some((slot as usize, register))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address.load(Ordering::Relaxed).to_le_bytes());
        } else if in_data_port(offset, data.len())
            && let Some((slot, register)) = self.target(offset)
        {
            self.bus.read_config(slot, register, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0
            && let Ok(address) = data.try_into()
        {
            self.address.store(u32::from_le_bytes(address), Ordering::Relaxed);
        } else if in_data_port(offset, data.len())
            && let Some((slot, register)) = self.target(offset)
        {
            self.bus.write_config(slot, register, data);
        }
    }
}

/// Returns whether an access is inside the four data ports.
fn in_data_port(offset: u64, length: usize) -> bool {
    (DATA..2 * DATA).contains(&offset) && length as u64 <= 2 * DATA - offset
}

/// Memory-mapped configuration space of bus 0: 4 KiB for each function, 8 functions for each device.
pub struct Ecam {
    bus: PciBus,
}

const ECAM_FUNCTION_BYTES: u64 = 4096;
const ECAM_DEVICE_BYTES: u64 = 8 * ECAM_FUNCTION_BYTES;

impl Ecam {
    pub(super) fn new(bus: PciBus) -> Self {
        Self { bus }
    }

    /// Returns slot and register of an access; only function 0 exists.
    fn target(offset: u64, length: usize) -> Option<(usize, usize)> {
        let (slot, register) = (offset / ECAM_DEVICE_BYTES, offset % ECAM_DEVICE_BYTES);
        let inside = register < ECAM_FUNCTION_BYTES && length as u64 <= ECAM_FUNCTION_BYTES - register;
        inside.then_some((slot as usize, register as usize))
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match Self::target(offset, data.len()) {
            Some((slot, register)) => self.bus.read_config(slot, register, data),
            None => data.fill(0xFF),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((slot, register)) = Self::target(offset, data.len()) {
            self.bus.write_config(slot, register, data);
        }
    }
}

/// A window of memory addresses that BARs can have.
pub struct Window {
    bus: PciBus,
    base: u64,
}

impl Window {
    pub(super) fn new(bus: PciBus, base: u64) -> Self {
        Self { bus, base }
    }
}

impl BusDevice for Window {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.base.checked_add(offset) {
            Some(address) => self.bus.read_memory(address, data),
            None => data.fill(0xFF),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(address) = self.base.checked_add(offset) {
            self.bus.write_memory(address, data);
        }
    }
}
