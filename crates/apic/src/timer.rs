//! The timer of a local APIC, with its entry of the local vector table (SDM 11.5.4).
//!
//! The timer stores its due time and derives counts from it when they are read. So it needs no clock, and a
//! late call of [`Timer::expire`] raises at most one interrupt.

use serde::{Deserialize, Serialize};

use crate::registers::{LVT_MASKED, LVT_STATUS};

/// Vector, delivery status, mask, mode.
const LVT_BITS: u32 = 0x7_10FF;
const DIVIDE_BITS: u32 = 0b1011;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Mode {
    OneShot,
    Periodic,
    Deadline,
}

impl Mode {
    fn of(lvt: u32) -> Option<Self> {
        match lvt >> 17 & 3 {
            0 => Some(Self::OneShot),
            1 => Some(Self::Periodic),
            2 => Some(Self::Deadline),
            _ => None,
        }
    }
}

#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timer {
    /// TSC ticks for each of the timer's, before division; never 0.
    tsc_per_tick: u32,
    /// Never of the reserved mode, nor with reserved bits.
    lvt: u32,
    /// The divide configuration register, without reserved bits.
    divide: u32,
    /// 0 in deadline mode.
    initial_count: u32,
    /// When it expires next; `None` if it is not armed, or not before the TSC wraps.
    due: Option<u64>,
}

impl Timer {
    pub fn new(tsc_per_tick: u32) -> Self {
        Self {
            tsc_per_tick: tsc_per_tick.max(1),
            lvt: LVT_MASKED,
            divide: 0,
            initial_count: 0,
            due: None,
        }
    }

    pub fn tsc_per_tick(&self) -> u32 {
        self.tsc_per_tick
    }

    pub fn lvt(&self) -> u32 {
        self.lvt
    }

    pub fn divide(&self) -> u32 {
        self.divide
    }

    pub fn initial_count(&self) -> u32 {
        self.initial_count
    }

    /// Time of the next interrupt. A masked timer has none, and keeps counting.
    pub fn due(&self) -> Option<u64> {
        self.due.filter(|_| !self.is_masked())
    }

    /// Returns the vector to raise if the timer is due at `now` and not masked. A periodic timer is due again
    /// at its next multiple after `now`, however late the call.
    pub fn expire(&mut self, now: u64) -> Option<u8> {
        let due = self.due.filter(|&due| due <= now)?;
        self.due = match self.mode() {
            Mode::Periodic => {
                let period = self.period();
                let beyond = (now - due) % period;
                now.checked_add(period - beyond)
            }
            Mode::OneShot | Mode::Deadline => None,
        };
        (!self.is_masked()).then_some(self.lvt as u8)
    }

    /// Whether the value is valid for the LVT entry: no reserved bits, not the reserved mode.
    pub fn is_lvt(value: u32) -> bool {
        value & !LVT_BITS == 0 && Mode::of(value).is_some()
    }

    /// Writes the LVT entry, which [`Self::is_lvt`]. Going into deadline mode or out of it disarms (SDM
    /// 11.5.4.1).
    pub fn set_lvt(&mut self, value: u32) {
        let was = self.mode();
        self.lvt = value & !LVT_STATUS;
        if (was == Mode::Deadline) != (self.mode() == Mode::Deadline) {
            self.due = None;
            self.initial_count = 0;
        }
    }

    pub fn mask(&mut self) {
        self.lvt |= LVT_MASKED;
    }

    /// Starts to count from there; 0 stops. In deadline mode nothing changes (SDM 11.5.4.1).
    pub fn set_initial_count(&mut self, count: u32, now: u64) {
        if self.mode() == Mode::Deadline {
            return;
        }
        self.initial_count = count;
        self.due = None;
        if count > 0 {
            self.count_from(count, now);
        }
    }

    /// Handles a step of the TSC by `ticks`, modulo 2^64: a deadline stays, and the end of a count moves by
    /// `ticks`.
    pub fn counter_moved(&mut self, ticks: u64) {
        if self.mode() != Mode::Deadline {
            self.due = self.due.map(|due| due.wrapping_add(ticks));
        }
    }

    /// The current count; 0 in deadline mode.
    pub fn current_count(&self, now: u64) -> u32 {
        let Some(due) = self.due.filter(|_| self.mode() != Mode::Deadline) else {
            return 0;
        };
        let left = match self.mode() {
            // Due already, but not yet expired by a call
            Mode::Periodic if due <= now => self.period() - (now - due) % self.period(),
            _ => due.saturating_sub(now),
        };
        let count = left.div_ceil(self.tick());
        count.min(self.initial_count.into()) as u32
    }

    pub fn is_divide(value: u32) -> bool {
        value & !DIVIDE_BITS == 0
    }

    /// Changes the divisor to a value for which [`Self::is_divide`] holds. The current count stays; its
    /// current tick restarts.
    pub fn set_divide(&mut self, value: u32, now: u64) {
        let left = self.current_count(now);
        self.divide = value;
        if left > 0 {
            self.count_from(left, now);
        }
    }

    /// The deadline, 0 once it has passed or outside of deadline mode.
    pub fn deadline(&self, now: u64) -> u64 {
        let is_deadline = self.mode() == Mode::Deadline;
        self.due.filter(|&due| is_deadline && due > now).unwrap_or(0)
    }

    /// Arms the timer, or disarms it by 0. Outside of deadline mode nothing changes (SDM 11.5.4.1).
    pub fn set_deadline(&mut self, tsc: u64) {
        if self.mode() == Mode::Deadline {
            self.due = Some(tsc).filter(|&tsc| tsc != 0);
        }
    }

    /// Whether the functions above can reach this state.
    pub fn is_sane(&self) -> bool {
        let registers = self.tsc_per_tick > 0
            && Self::is_lvt(self.lvt)
            && self.lvt & LVT_STATUS == 0
            && Self::is_divide(self.divide);
        registers
            && match self.mode() {
                Mode::Deadline => self.initial_count == 0 && self.due != Some(0),
                Mode::OneShot | Mode::Periodic => self.due.is_none() || self.initial_count > 0,
            }
    }

    pub fn is_masked(&self) -> bool {
        self.lvt & LVT_MASKED != 0
    }

    fn mode(&self) -> Mode {
        // The mode is never the reserved one, except in an invalid state from another process, which gets the
        // default.
        Mode::of(self.lvt).unwrap_or(Mode::OneShot)
    }

    /// TSC ticks of one count.
    fn tick(&self) -> u64 {
        let divisor = match self.divide & 0b11 | self.divide >> 1 & 0b100 {
            0b111 => 1,
            power => 2 << power,
        };
        u64::from(self.tsc_per_tick) * divisor
    }

    /// TSC ticks of all counts, at least one.
    fn period(&self) -> u64 {
        u64::from(self.initial_count).saturating_mul(self.tick()).max(1)
    }

    fn count_from(&mut self, count: u32, now: u64) {
        let length = u64::from(count).checked_mul(self.tick());
        self.due = length.and_then(|length| now.checked_add(length));
    }
}

#[cfg(test)]
mod tests;
