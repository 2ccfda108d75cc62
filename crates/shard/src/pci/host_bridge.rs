//! The host bridge: device 0, there because guests expect one. It does nothing.

use serde_json::Value;

use super::PciFunction;
use super::config::{ConfigSpace, Identity};

/// A virtual PCIe host bridge (the one Cloud Hypervisor shows): guests have no quirks for it.
const IDENTITY: Identity = Identity {
    vendor: 0x8086,
    device: 0x0D57,
    revision: 0,
    class: 0x06_00_00,
    subsystem_vendor: 0,
    subsystem: 0,
};

/// The host bridge.
pub struct HostBridge {
    config: ConfigSpace,
}

impl HostBridge {
    pub fn new() -> Self {
        Self {
            config: ConfigSpace::new(IDENTITY),
        }
    }
}

impl PciFunction for HostBridge {
    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
    }

    fn decoded(&self) -> Option<u64> {
        None
    }

    fn read_bar(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
    }

    fn write_bar(&mut self, _offset: u64, _data: &[u8]) {}

    fn status(&self) -> Value {
        Value::Null
    }

    fn stop(&mut self) {}
}
