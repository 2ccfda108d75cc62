//! The IOAPIC: lines of devices become messages (82093AA datasheet, sections 3.1 and 3.2).
//!
//! As in chipsets since, it has version 0x20 and an end-of-interrupt register at 0x40, by which Linux ends
//! the service of a level-triggered pin directly; with version 0x11 Linux makes the pin edge-triggered and
//! back for that, which works here too. Its polarity bits are kept and mean nothing: a line is asserted or
//! not.
//!
//! Invariants, which [`IoApic::is_sane`] checks: no entry has reserved bits; the remote IRR is set in
//! level-triggered entries only; it is set in each one that is asserted and not masked.

use serde::{Deserialize, Serialize};

use crate::interrupt::{Delivery, Destination, Interrupt};

const PINS: usize = 24;

const SELECT_OFFSET: u64 = 0x00;
const WINDOW_OFFSET: u64 = 0x10;
const EOI_OFFSET: u64 = 0x40;

const ID: u8 = 0;
const VERSION: u8 = 1;
const ARBITRATION: u8 = 2;
const ENTRIES: u8 = 0x10;
const VERSION_VALUE: u32 = (PINS as u32 - 1) << 16 | 0x20;
const ID_SHIFT: u32 = 24;
const ID_MAX: u8 = 15;

const LOGICAL: u64 = 1 << 11;
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// Writable bits: vector, delivery mode, destination mode, polarity, trigger mode, mask, destination. The
/// delivery status (bit 12), which is always 0 since a message is sent at once, and the remote IRR are
/// read-only.
const WRITABLE: u64 = 0xFF00_0000_0001_AFFF;

/// An IOAPIC with 24 pins.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct IoApic {
    id: u8,
    selected: u8,
    entries: [u64; PINS],
    /// Bit n is set while the line of pin n is asserted.
    lines: u32,
}

impl Default for IoApic {
    fn default() -> Self {
        Self::new()
    }
}

impl IoApic {
    /// Returns the reset state: all pins masked, no line asserted.
    pub fn new() -> Self {
        Self {
            id: 0,
            selected: 0,
            entries: [MASKED; PINS],
            lines: 0,
        }
    }

    /// Reads 32 bits at `offset` bytes into the IOAPIC's page. Absent registers read as 0.
    pub fn read(&self, offset: u64) -> u32 {
        match offset {
            SELECT_OFFSET => self.selected.into(),
            WINDOW_OFFSET => match self.selected {
                ID | ARBITRATION => u32::from(self.id) << ID_SHIFT,
                VERSION => VERSION_VALUE,
                _ => self
                    .selected_half()
                    .map_or(0, |(pin, shift)| (self.entries[pin] >> shift) as u32),
            },
            _ => 0,
        }
    }

    /// Writes 32 bits and returns the interrupts that follow: an asserted level-triggered pin sends when it
    /// is unmasked, or when its service ends. Writes to absent and read-only registers are ignored.
    #[must_use]
    pub fn write(&mut self, offset: u64, value: u32) -> Vec<Interrupt> {
        match offset {
            SELECT_OFFSET => self.selected = value as u8,
            WINDOW_OFFSET if self.selected == ID => self.id = (value >> ID_SHIFT) as u8 & ID_MAX,
            WINDOW_OFFSET => {
                if let Some((pin, shift)) = self.selected_half() {
                    return self.set_half(pin, shift, value).into_iter().collect();
                }
            }
            EOI_OFFSET => return self.end_of_interrupt(value as u8),
            _ => {}
        }
        Vec::new()
    }

    /// Asserts or deasserts a pin's line and returns the interrupt that follows. A masked edge is lost; a
    /// masked level is sent when it is unmasked. Pins from 24 on are ignored.
    #[must_use]
    pub fn set_line(&mut self, pin: u8, high: bool) -> Option<Interrupt> {
        let pin = usize::from(pin);
        let entry = *self.entries.get(pin)?;
        let rises = high && !self.is_high(pin);
        self.lines = self.lines & !(1 << pin) | u32::from(high) << pin;
        if is_level(entry) {
            return self.send_level(pin);
        }
        (rises && entry & MASKED == 0).then(|| interrupt(entry)).flatten()
    }

    /// Handles the end of interrupt of a level-triggered vector: pins with that vector leave service, and
    /// those still asserted send again.
    #[must_use]
    pub fn end_of_interrupt(&mut self, vector: u8) -> Vec<Interrupt> {
        let ended = |entry: u64| is_level(entry) && entry & REMOTE_IRR != 0 && entry as u8 == vector;
        let pins = (0..PINS)
            .filter(|&pin| ended(self.entries[pin]))
            .collect::<Vec<_>>();
        pins.iter().for_each(|&pin| self.entries[pin] &= !REMOTE_IRR);
        pins.iter().filter_map(|&pin| self.send_level(pin)).collect()
    }

    /// Whether the functions above can reach this state. Checks a state that another process has sent.
    pub fn is_sane(&self) -> bool {
        let entries = (0..PINS).all(|pin| {
            let entry = self.entries[pin];
            let (level, remote) = (is_level(entry), entry & REMOTE_IRR != 0);
            let waits = level && self.is_high(pin) && entry & MASKED == 0;
            entry & !(WRITABLE | REMOTE_IRR) == 0 && (level || !remote) && (remote || !waits)
        });
        entries && self.id <= ID_MAX && self.lines >> PINS == 0
    }

    fn is_high(&self, pin: usize) -> bool {
        self.lines >> pin & 1 == 1
    }

    /// The selected pin, and the shift of the selected half of its entry.
    fn selected_half(&self) -> Option<(usize, u32)> {
        let half = usize::from(self.selected.checked_sub(ENTRIES)?);
        (half < 2 * PINS).then_some((half / 2, half as u32 % 2 * 32))
    }

    fn set_half(&mut self, pin: usize, shift: u32, value: u32) -> Option<Interrupt> {
        let half = 0xFFFF_FFFF << shift;
        let written = u64::from(value) << shift & half & WRITABLE;
        let mut entry = self.entries[pin] & (!half | REMOTE_IRR) | written;
        if !is_level(entry) {
            // Linux ends the service of a pin by this where there is no register for it.
            entry &= !REMOTE_IRR;
        }
        self.entries[pin] = entry;
        self.send_level(pin)
    }

    /// Sends a level-triggered interrupt if its pin is asserted, not masked and not in service.
    fn send_level(&mut self, pin: usize) -> Option<Interrupt> {
        let entry = self.entries[pin];
        if !is_level(entry) || !self.is_high(pin) || entry & (MASKED | REMOTE_IRR) != 0 {
            return None;
        }
        self.entries[pin] |= REMOTE_IRR;
        interrupt(entry)
    }
}

fn delivery(entry: u64) -> Option<Delivery> {
    Delivery::of_bits((entry >> 8) as u32).filter(|&delivery| delivery != Delivery::Startup)
}

/// Returns whether an entry is level-triggered. Only an interrupt with a vector has an end; all others are
/// sent as edges, as the datasheet requires for NMIs.
fn is_level(entry: u64) -> bool {
    entry & LEVEL != 0 && delivery(entry).is_some_and(Delivery::has_vector)
}

/// `None` if the delivery mode is reserved.
fn interrupt(entry: u64) -> Option<Interrupt> {
    Some(Interrupt {
        destination: Destination::of_8_bits((entry >> 56) as u8, entry & LOGICAL != 0),
        delivery: delivery(entry)?,
        vector: entry as u8,
        level: is_level(entry),
    })
}

#[cfg(test)]
mod tests;
