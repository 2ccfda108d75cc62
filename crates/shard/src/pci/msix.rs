//! MSI-X (PCI 3.0, section 6.8.2): the table of messages and the pending bits, in a BAR.
//!
//! An entry's message takes effect when it is unmasked, as in the specification. Accesses of any size and
//! offset are safe; the specification allows four and eight aligned bytes only.

use std::io;
use std::sync::Arc;

use super::config::ConfigSpace;
use crate::interrupt::{Interrupts, Message, Vector};

/// Bytes of a table entry.
pub const ENTRY_BYTES: usize = 16;
/// Greatest number of vectors of one function: a page of table.
pub const VECTORS_MAX: usize = 256;

const CAPABILITY_ID: u8 = 0x11;
const CONTROL_ENABLE: u16 = 1 << 15;
const CONTROL_MASK_ALL: u16 = 1 << 14;
const ENTRY_CONTROL: usize = 12;
const ENTRY_MASKED: u8 = 1;

/// One function's vectors.
pub struct Msix {
    vectors: Arc<[Vector]>,
    table: Vec<[u8; ENTRY_BYTES]>,
    enabled: bool,
    masked: bool,
    capability: usize,
}

impl Msix {
    /// Creates `count` vectors, all masked. Adds the capability to `config`, with the table and the pending
    /// bits in BAR 0.
    ///
    /// # Errors
    /// Fails if no interrupt numbers are left, or KVM refuses.
    pub fn new(
        interrupts: &Arc<Interrupts>,
        count: usize,
        config: &mut ConfigSpace,
        table_offset: u32,
        pending_offset: u32,
    ) -> io::Result<Self> {
        if count == 0 || count > VECTORS_MAX {
            return Err(io::Error::other("a function has 1 to 256 vectors"));
        }
        let vectors: Arc<[Vector]> = (0..count)
            .map(|_| interrupts.vector())
            .collect::<io::Result<_>>()?;
        let mut entry = [0; ENTRY_BYTES];
        entry[ENTRY_CONTROL] = ENTRY_MASKED;
        let mut body = Vec::with_capacity(10);
        body.extend_from_slice(&(count as u16 - 1).to_le_bytes());
        body.extend_from_slice(&table_offset.to_le_bytes());
        body.extend_from_slice(&pending_offset.to_le_bytes());
        let capability = config
            .add_capability(
                CAPABILITY_ID,
                &body,
                &(CONTROL_ENABLE | CONTROL_MASK_ALL).to_le_bytes(),
            )
            .ok_or_else(|| io::Error::other("no room for the MSI-X capability"))?;
        Ok(Self {
            vectors,
            table: vec![entry; count],
            enabled: false,
            masked: false,
            capability,
        })
    }

    /// Returns the vectors, for the threads that signal them.
    pub fn vectors(&self) -> Arc<[Vector]> {
        self.vectors.clone()
    }

    /// Applies a change of the control register in `config`.
    ///
    /// # Errors
    /// Fails if KVM refuses a message; that vector stays masked.
    pub fn configured(&mut self, config: &ConfigSpace) -> io::Result<()> {
        let control = config.u16(self.capability + 2);
        let (enabled, masked) = (control & CONTROL_ENABLE != 0, control & CONTROL_MASK_ALL != 0);
        if (enabled, masked) == (self.enabled, self.masked) {
            return Ok(());
        }
        (self.enabled, self.masked) = (enabled, masked);
        (0..self.table.len()).try_for_each(|index| self.apply(index))
    }

    /// Returns the whole table.
    pub fn table(&self) -> Vec<u8> {
        self.table.as_flattened().to_vec()
    }

    /// Reads the table at `offset` from its start.
    pub fn read_table(&self, offset: usize, data: &mut [u8]) {
        let bytes = self.table.as_flattened();
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = offset
                .checked_add(index)
                .and_then(|at| bytes.get(at))
                .copied()
                .unwrap_or(0);
        }
    }

    /// Writes the table at `offset` from its start.
    ///
    /// # Errors
    /// Fails if KVM refuses a message; that vector stays masked.
    pub fn write_table(&mut self, offset: usize, data: &[u8]) -> io::Result<()> {
        let bytes = self.table.as_flattened_mut();
        let end = offset.saturating_add(data.len()).min(bytes.len());
        if offset >= end {
            return Ok(());
        }
        for (at, value) in (offset..end).zip(data) {
            // Bits of the control word other than the mask are reserved and read as zero.
            bytes[at] = match at % ENTRY_BYTES {
                ENTRY_CONTROL => value & ENTRY_MASKED,
                place if place > ENTRY_CONTROL => 0,
                _ => *value,
            };
        }
        (offset / ENTRY_BYTES..=(end - 1) / ENTRY_BYTES).try_for_each(|index| self.apply(index))
    }

    /// Reads the pending bits at `offset` from their start.
    pub fn read_pending(&self, offset: usize, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            let first = offset.saturating_add(index).saturating_mul(8);
            *byte = (0..8)
                .filter(|bit| {
                    self.vectors
                        .get(first.saturating_add(*bit))
                        .is_some_and(Vector::pending)
                })
                .fold(0, |bits, bit| bits | 1 << bit);
        }
    }

    /// Applies the registers to one vector.
    fn apply(&self, index: usize) -> io::Result<()> {
        let (vector, entry) = (&self.vectors[index], &self.table[index]);
        if !self.enabled || self.masked || entry[ENTRY_CONTROL] & ENTRY_MASKED != 0 {
            vector.mask();
            return Ok(());
        }
        let word = |at: usize| u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
        let address = (u64::from(word(4)) << 32) | u64::from(word(0));
        vector.unmask(Message {
            address,
            data: word(8),
        })
    }
}
