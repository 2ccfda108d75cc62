//! A function's configuration space: 256 bytes, a mask of the bits that the guest may write, and a list of
//! capabilities.
//!
//! Reads and writes have any offset and length. Bytes outside read as zero and ignore writes.

/// Size of the configuration space; there is no extended part, which reads as zero.
pub const CONFIG_BYTES: usize = 256;

/// Offset of the command register.
pub const COMMAND: usize = 0x04;
/// Offset of the first base address register.
pub const BAR0: usize = 0x10;
/// Command: the function answers at its memory BARs.
pub const COMMAND_MEMORY: u16 = 1 << 1;

const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u8 = 1 << 4;
const REVISION: usize = 0x08;
const CAPABILITIES_POINTER: usize = 0x34;
const CACHE_LINE: usize = 0x0C;
const INTERRUPT_LINE: usize = 0x3C;
const FIRST_CAPABILITY: usize = 0x40;
/// Low bits of a memory BAR: 64 bits wide, not prefetchable.
const BAR_MEMORY_64: u64 = 0b100;

/// Identification registers of a function.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Revision of the device.
    pub revision: u8,
    /// Class, subclass and programming interface, from the high byte down.
    pub class: u32,
    /// Subsystem vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem id.
    pub subsystem: u16,
}

/// The registers of one function.
pub struct ConfigSpace {
    bytes: [u8; CONFIG_BYTES],
    writable: [u8; CONFIG_BYTES],
    capabilities_end: usize,
    last_capability: Option<usize>,
    bar_bytes: u64,
}

impl ConfigSpace {
    /// Creates a function without BARs or capabilities, whose memory decoding is disabled.
    pub fn new(identity: Identity) -> Self {
        let mut space = Self {
            bytes: [0; CONFIG_BYTES],
            writable: [0; CONFIG_BYTES],
            capabilities_end: FIRST_CAPABILITY,
            last_capability: None,
            bar_bytes: 0,
        };
        space.put(0x00, &identity.vendor.to_le_bytes());
        space.put(0x02, &identity.device.to_le_bytes());
        space.put(
            REVISION,
            &((identity.class << 8) | u32::from(identity.revision)).to_le_bytes(),
        );
        space.put(0x2C, &identity.subsystem_vendor.to_le_bytes());
        space.put(0x2E, &identity.subsystem.to_le_bytes());
        let command = COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_INTX_DISABLE;
        space.allow(COMMAND, &command.to_le_bytes());
        space.allow(CACHE_LINE, &[0xFF]);
        space.allow(INTERRUPT_LINE, &[0xFF]);
        space
    }

    /// Makes BARs 0 and 1 one 64-bit memory BAR of `bytes`, a power of two from 4 KiB, at `address`.
    pub fn set_bar(&mut self, address: u64, bytes: u64) {
        debug_assert!(bytes.is_power_of_two() && bytes >= 4096 && address.is_multiple_of(bytes));
        self.bar_bytes = bytes;
        self.put(BAR0, &(address | BAR_MEMORY_64).to_le_bytes());
        self.allow(BAR0, &(!(bytes - 1)).to_le_bytes());
    }

    /// Returns the address of the memory BAR if the guest has enabled it.
    pub fn decoded(&self) -> Option<u64> {
        let enabled = self.u16(COMMAND) & COMMAND_MEMORY != 0;
        let address = self.bar();
        let fits = address.checked_add(self.bar_bytes).is_some();
        (enabled && self.bar_bytes > 0 && fits).then_some(address)
    }

    /// Returns the memory BAR's address, enabled or not.
    pub fn bar(&self) -> u64 {
        let mut bar = [0; 8];
        self.read(BAR0, &mut bar);
        u64::from_le_bytes(bar) & !0xF
    }

    /// Appends a capability: its id, then `body` with a mask of the bits that the guest may write. Returns
    /// its offset, or `None` if there is no room left.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> Option<usize> {
        let offset = self.capabilities_end;
        let end = (offset + 2 + body.len()).next_multiple_of(4);
        if end > CONFIG_BYTES || writable.len() > body.len() {
            return None;
        }
        self.put(offset, &[id, 0]);
        self.put(offset + 2, body);
        self.allow(offset + 2, writable);
        let link = self.last_capability.map_or(CAPABILITIES_POINTER, |last| last + 1);
        self.put(link, &[offset as u8]);
        self.bytes[STATUS] |= STATUS_CAPABILITIES;
        self.last_capability = Some(offset);
        self.capabilities_end = end;
        Some(offset)
    }

    /// Reads registers from `offset` on into `data`.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = offset
                .checked_add(index)
                .and_then(|at| self.bytes.get(at))
                .copied()
                .unwrap_or(0);
        }
    }

    /// Writes the writable bits of registers.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (index, value) in data.iter().enumerate() {
            let Some(at) = offset.checked_add(index).filter(|at| *at < CONFIG_BYTES) else {
                return;
            };
            let mask = self.writable[at];
            self.bytes[at] = (self.bytes[at] & !mask) | (value & mask);
        }
    }

    /// Restores the bits that a guest wrote in such a space. The other bits may not differ.
    pub fn restore(&mut self, saved: &[u8]) {
        self.write(0, saved);
    }

    /// Returns a 16-bit register inside the space.
    pub fn u16(&self, offset: usize) -> u16 {
        let mut data = [0; 2];
        self.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    fn put(&mut self, offset: usize, data: &[u8]) {
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    fn allow(&mut self, offset: usize, mask: &[u8]) {
        self.writable[offset..offset + mask.len()].copy_from_slice(mask);
    }
}
