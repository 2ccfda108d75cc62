//! The host bridge, device 0, which guests expect. It does nothing.

use std::io;

use serde_json::Value;

use super::PciFunction;
use super::config::{CONFIG_BYTES, ConfigSpace, Identity};

/// A virtual PCIe host bridge, the same as Cloud Hypervisor's: guests have no quirks for it.
const IDENTITY: Identity = Identity {
    vendor: 0x8086,
    device: 0x0D57,
    revision: 0,
    class: 0x06_00_00,
    subsystem_vendor: 0,
    subsystem: 0,
};

/// Function 0 of the bus: an inert bridge to the host.
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

    fn save(&self) -> io::Result<Value> {
        let mut config = vec![0; CONFIG_BYTES];
        self.config.read(0, &mut config);
        Ok(serde_json::to_value(config)?)
    }

    fn restore(&mut self, state: &Value) -> io::Result<()> {
        let config: Vec<u8> = serde_json::from_value(state.clone())?;
        self.config.restore(&config);
        Ok(())
    }

    fn stop(&mut self) {}
}
