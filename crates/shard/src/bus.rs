//! Sends a vCPU's access to a port or an address to the device that claims it.
//!
//! The bus is built once, before the vCPUs run, and only read afterwards, so that an access takes no lock. As
//! on an empty bus, unclaimed addresses and accesses across the end of a claim read as all ones, and ignore
//! writes.

use std::ops::Range;
use std::sync::Arc;

/// A device on a bus. `offset` counts from the start of the device's range, and the access ends inside the
/// range. Accesses have any size: a device answers a size that it does not support with all ones.
pub trait BusDevice: Send + Sync {
    /// Reads registers into `data`.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Writes `data` to registers.
    fn write(&self, offset: u64, data: &[u8]);
}

/// The claimed ranges of one address space (I/O ports, or memory).
#[derive(Default)]
pub struct Bus {
    claims: Vec<(Range<u64>, Arc<dyn BusDevice>)>,
}

/// Error: two devices claim the same address.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("two devices claim addresses {start:#x} to {end:#x}")]
pub struct Overlap {
    start: u64,
    end: u64,
}

impl Bus {
    /// Claims `range` for `device`.
    pub fn claim(&mut self, range: Range<u64>, device: Arc<dyn BusDevice>) -> Result<(), Overlap> {
        let place = self
            .claims
            .partition_point(|(claimed, _)| claimed.start < range.start);
        let after = self
            .claims
            .get(place)
            .is_some_and(|(next, _)| next.start < range.end);
        let before = place > 0 && self.claims[place - 1].0.end > range.start;
        if after || before || range.is_empty() {
            return Err(Overlap {
                start: range.start,
                end: range.end,
            });
        }
        self.claims.insert(place, (range, device));
        Ok(())
    }

    /// Reads; returns false with `data` all ones if no device claims the address.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        data.fill(0xFF);
        let Some((offset, device)) = self.find(address, data.len()) else {
            return false;
        };
        device.read(offset, data);
        true
    }

    /// Writes; returns false if no device claims the address.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        let Some((offset, device)) = self.find(address, data.len()) else {
            return false;
        };
        device.write(offset, data);
        true
    }

    fn find(&self, address: u64, bytes: usize) -> Option<(u64, &dyn BusDevice)> {
        let place = self
            .claims
            .partition_point(|(claimed, _)| claimed.start <= address)
            .checked_sub(1)?;
        let (range, device) = &self.claims[place];
        let end = address.checked_add(bytes as u64)?;
        (end <= range.end).then_some((address - range.start, device.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, usize)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.len()));
        }
    }

    #[test]
    fn unclaimed_and_crossing_reads_are_all_ones() {
        let mut bus = Bus::default();
        bus.claim(0x10..0x14, Arc::new(Recorder::default())).unwrap();
        for (address, bytes) in [(0xF, 1), (0x14, 1), (0x13, 2), (0xF, 4), (u64::MAX, 8)] {
            let mut data = vec![0; bytes];
            assert!(!bus.read(address, &mut data), "{address:#x}+{bytes}");
            assert!(data.iter().all(|&byte| byte == 0xFF));
            assert!(!bus.write(address, &data));
        }
        let mut data = [0; 2];
        assert!(bus.read(0x12, &mut data));
        assert_eq!(data, [2, 2]);
    }

    #[test]
    fn overlapping_claims_are_refused() {
        let mut bus = Bus::default();
        bus.claim(0x10..0x14, Arc::new(Recorder::default())).unwrap();
        for range in [0x13..0x20, 0x0..0x11, 0x10..0x14, 0x11..0x12, 0x30..0x30] {
            assert!(
                bus.claim(range.clone(), Arc::new(Recorder::default())).is_err(),
                "{range:?}"
            );
        }
        bus.claim(0x14..0x15, Arc::new(Recorder::default())).unwrap();
        bus.claim(0x0..0x10, Arc::new(Recorder::default())).unwrap();
    }
}
