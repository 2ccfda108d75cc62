//! The local APIC of one vCPU, in x2APIC mode (SDM 11.12).
//!
//! A vector that arrives is *requested* (IRR); the vCPU takes the highest requested one above its priority,
//! which is *in service* (ISR) until the guest writes the end-of-interrupt register. One vector can be in
//! both, once each.
//!
//! Invariants, which [`LocalApic::is_sane`] checks: no vector below 16 is in any set; of each priority class
//! at most one vector is in service; while the APIC is disabled by software all of the local vector table is
//! masked; once it is disabled altogether, all is as after a reset.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::command::{self, Command};
use crate::interrupt::Ipi;
use crate::registers::*;
use crate::set::Set;
use crate::timer::Timer;

/// The access faults: #GP(0) is to be injected, and has changed nothing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GeneralProtection;

impl fmt::Display for GeneralProtection {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("general protection fault")
    }
}

impl std::error::Error for GeneralProtection {}

/// Effect of a register write outside of this APIC.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Written {
    /// The write has no such effect.
    Nothing,
    /// To be delivered, by [`targets`](crate::targets); the sender may be among the destinations, and is then
    /// to [`accept`](LocalApic::accept) it as the others do.
    Send(Ipi),
    /// A level-triggered interrupt was served: [`IoApic::end_of_interrupt`](crate::IoApic::end_of_interrupt).
    EndOfInterrupt {
        /// Vector whose service ended.
        vector: u8,
    },
    /// Software enabled or disabled it: lowest-priority interrupts may go there, or not.
    Enabled(bool),
}

/// The local APIC of a vCPU. Its registers are MSRs; it is never in xAPIC mode, so nothing of it is in
/// memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LocalApic {
    id: u32,
    /// The enable bit of the APIC base.
    is_present: bool,
    task_priority: u8,
    spurious: u32,
    timer: Timer,
    lvt: [u32; LVT_BITS.len()],
    command: u64,
    /// The error register as it is read.
    errors: u8,
    /// Errors since it was last written.
    new_errors: u8,
    requested: Set,
    in_service: Set,
    level: Set,
}

impl LocalApic {
    /// As after power-on, but in x2APIC mode: disabled by software, all masked. vCPU 0 is the bootstrap
    /// processor. The timer counts once in `tsc_per_tick` TSC ticks (at least 1) before division.
    pub fn new(id: u32, tsc_per_tick: u32) -> Self {
        Self {
            id,
            is_present: true,
            task_priority: 0,
            spurious: SPURIOUS_RESET,
            timer: Timer::new(tsc_per_tick),
            lvt: [LVT_MASKED; LVT_BITS.len()],
            command: 0,
            errors: 0,
            new_errors: 0,
            requested: Set::default(),
            in_service: Set::default(),
            level: Set::default(),
        }
    }

    /// INIT: all is reset but the id and the mode (SDM 11.12.5.1): one that is disabled altogether stays so.
    /// It is disabled by software then.
    pub fn init(&mut self) {
        *self = Self {
            is_present: self.is_present,
            ..Self::new(self.id, self.timer.tsc_per_tick())
        };
    }

    /// The APIC id, the vCPU's number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Has the guest enabled it (SDM 11.4.7.2)? If not, it takes and keeps no new vectors.
    pub fn is_enabled(&self) -> bool {
        self.is_present && self.spurious & SPURIOUS_ENABLED != 0
    }

    /// The APIC base, with the enable bit and that of the mode.
    pub fn base(&self) -> u64 {
        self.base_if(self.is_present)
    }

    /// RDMSR of the APIC base (0x1B), the TSC deadline (0x6E0) or an x2APIC register (0x800 to 0x8FF) at
    /// `now`. Any other register faults, as reserved and write-only ones do.
    pub fn read(&self, msr: u32, now: u64) -> Result<u64, GeneralProtection> {
        let value = match msr {
            APIC_BASE => return Ok(self.base()),
            TSC_DEADLINE => return Ok(self.timer.deadline(now)),
            _ if !self.is_present => return Err(GeneralProtection),
            COMMAND => return Ok(self.command),
            ID => self.id,
            VERSION => VERSION_VALUE,
            TASK_PRIORITY => self.task_priority.into(),
            PROCESSOR_PRIORITY => self.processor_priority().into(),
            // SDM 11.12.10.2
            LOGICAL_DESTINATION => (self.id >> 4) << 16 | 1 << (self.id & 15),
            SPURIOUS => self.spurious,
            IN_SERVICE..=IN_SERVICE_LAST => self.in_service.bits_32(msr - IN_SERVICE),
            TRIGGER..=TRIGGER_LAST => self.level.bits_32(msr - TRIGGER),
            REQUEST..=REQUEST_LAST => self.requested.bits_32(msr - REQUEST),
            ERROR => self.errors.into(),
            LVT_TIMER => self.timer.lvt(),
            LVT..=LVT_LAST => self.lvt[(msr - LVT) as usize],
            INITIAL_COUNT => self.timer.initial_count(),
            CURRENT_COUNT => self.timer.current_count(now),
            DIVIDE => self.timer.divide(),
            _ => return Err(GeneralProtection),
        };
        Ok(value.into())
    }

    /// WRMSR of the same registers at `now`. Faults with reserved bits and for registers that are read-only
    /// or not there.
    ///
    /// A timer that was due before `now` has its interrupt before one of its registers changes.
    pub fn write(&mut self, msr: u32, value: u64, now: u64) -> Result<Written, GeneralProtection> {
        match msr {
            APIC_BASE => return self.set_base(value),
            TSC_DEADLINE => {
                self.expire(now);
                self.timer.set_deadline(value);
                return Ok(Written::Nothing);
            }
            _ if !self.is_present => return Err(GeneralProtection),
            COMMAND => {
                let command = command::decode(value)?;
                self.command = command::kept(value);
                return Ok(self.perform(command));
            }
            _ => {}
        }
        // The upper halves of all others are reserved (SDM 11.12.1.2).
        let value = u32::try_from(value).map_err(|_| GeneralProtection)?;
        let unless_reserved = |is_valid: bool| is_valid.then_some(()).ok_or(GeneralProtection);
        match msr {
            TASK_PRIORITY => self.task_priority = u8::try_from(value).map_err(|_| GeneralProtection)?,
            END_OF_INTERRUPT => {
                unless_reserved(value == 0)?;
                let ended = self.end_of_interrupt();
                return Ok(ended.map_or(Written::Nothing, |vector| Written::EndOfInterrupt { vector }));
            }
            SPURIOUS => {
                unless_reserved(value & !SPURIOUS_BITS == 0)?;
                return Ok(self.set_spurious(value));
            }
            ERROR => {
                unless_reserved(value == 0)?;
                self.errors = std::mem::take(&mut self.new_errors);
            }
            LVT_TIMER => {
                unless_reserved(Timer::is_lvt(value))?;
                self.expire(now);
                self.timer.set_lvt(value | self.forced_mask());
            }
            LVT..=LVT_LAST => {
                let entry = (msr - LVT) as usize;
                unless_reserved(value & !LVT_BITS[entry] == 0)?;
                let read_only = LVT_STATUS | LVT_REMOTE_IRR;
                self.lvt[entry] = value & !read_only | self.forced_mask();
            }
            INITIAL_COUNT => {
                self.expire(now);
                self.timer.set_initial_count(value, now);
            }
            DIVIDE => {
                unless_reserved(Timer::is_divide(value))?;
                self.expire(now);
                self.timer.set_divide(value, now);
            }
            SELF_IPI => {
                let vector = u8::try_from(value).map_err(|_| GeneralProtection)?;
                return Ok(self.perform(command::to_self(self.id, vector)));
            }
            _ => return Err(GeneralProtection),
        }
        Ok(Written::Nothing)
    }

    /// A fixed or lowest-priority interrupt arrives (SDM 11.8.4). One that is requested already is the same
    /// one. One that is disabled by software drops it; vectors below 16 are an error that the guest can read.
    pub fn accept(&mut self, vector: u8, level: bool) {
        if !self.is_enabled() {
            return;
        }
        if vector < VECTOR_MIN {
            self.note_error(ERROR_RECEIVE_ILLEGAL_VECTOR);
            return;
        }
        self.requested.insert(vector);
        if level {
            self.level.insert(vector);
        } else {
            self.level.remove(vector);
        }
    }

    /// Returns the vector to inject now: the highest requested one, if its class is above the processor's
    /// (SDM 11.8.3.1). An APIC that software has disabled still serves accepted interrupts (SDM 11.4.7.2).
    pub fn next(&self) -> Option<u8> {
        let highest = self.requested.highest()?;
        (class(highest) > class(self.processor_priority())).then_some(highest)
    }

    /// The same, and it is in service from now on.
    pub fn take(&mut self) -> Option<u8> {
        let vector = self.next()?;
        self.requested.remove(vector);
        self.in_service.insert(vector);
        Some(vector)
    }

    /// Handles a write of the end-of-interrupt register (SDM 11.8.5): the highest vector in service leaves
    /// service. Returns the vector if it was level-triggered.
    pub fn end_of_interrupt(&mut self) -> Option<u8> {
        let vector = self.in_service.highest()?;
        self.in_service.remove(vector);
        Some(vector).filter(|&vector| self.level.contains(vector))
    }

    /// Whether the end of interrupt may be deferred: the highest vector in service is edge-triggered, and no
    /// vector is requested.
    pub fn may_end_unseen(&self) -> bool {
        let highest = self.in_service.highest();
        highest.is_some_and(|vector| !self.level.contains(vector)) && self.requested.is_empty()
    }

    /// Returns the TSC at which the timer's interrupt is due in any mode; `None` if it is not armed or
    /// masked.
    pub fn timer_due(&self) -> Option<u64> {
        self.timer.due()
    }

    /// Requests the timer's interrupt if it is due at `now` and not masked. A periodic one is due next at the
    /// first multiple of its period after `now`, however many it has missed.
    pub fn expire(&mut self, now: u64) {
        if let Some(vector) = self.timer.expire(now) {
            self.accept(vector, false);
        }
    }

    /// Handles a guest's step of its TSC by `ticks`, modulo 2^64. A deadline is a TSC value and stays; the
    /// rest of a timer's count stays, too.
    pub fn counter_moved(&mut self, ticks: u64) {
        self.timer.counter_moved(ticks);
    }

    /// Value of the task-priority register (TPR).
    pub fn task_priority(&self) -> u8 {
        self.task_priority
    }

    /// Sets the TPR. CR8 is its upper half: a guest's CR8 of n is n × 16 here (SDM 11.8.6).
    pub fn set_task_priority(&mut self, value: u8) {
        self.task_priority = value;
    }

    /// Returns whether the functions above can produce this state, which another process may have sent. The
    /// id is not checked.
    pub fn is_sane(&self) -> bool {
        let sets = [self.requested, self.in_service, self.level];
        let vectors = sets
            .iter()
            .all(|set| set.bits_32(0) & ((1 << VECTOR_MIN) - 1) == 0);
        let nested = (0..16).all(|class| {
            let of_class = self.in_service.bits_32(class / 2) >> (class % 2 * 16) & 0xFFFF;
            of_class.count_ones() <= 1
        });
        let entries = self.lvt.iter().zip(LVT_BITS).all(|(entry, bits)| {
            let read_only = LVT_STATUS | LVT_REMOTE_IRR;
            entry & !bits == 0 && entry & read_only == 0 && entry & self.forced_mask() == self.forced_mask()
        });
        let timer = self.timer.is_sane() && (self.is_enabled() || self.timer.is_masked());
        let noted = ERROR_SEND_ILLEGAL_VECTOR | ERROR_RECEIVE_ILLEGAL_VECTOR;
        let registers = self.spurious & !SPURIOUS_BITS == 0
            && command::decode(self.command).is_ok()
            && command::kept(self.command) == self.command
            && (self.errors | self.new_errors) & !noted == 0;
        let mut reset = self.clone();
        reset.init();
        vectors && nested && entries && timer && registers && (self.is_present || *self == reset)
    }

    /// SDM 11.8.3.1
    fn processor_priority(&self) -> u8 {
        let in_service = self.in_service.highest().unwrap_or(0);
        if class(self.task_priority) >= class(in_service) {
            self.task_priority
        } else {
            in_service & 0xF0
        }
    }

    fn base_if(&self, is_present: bool) -> u64 {
        let bootstrap = if self.id == 0 { BASE_BOOTSTRAP } else { 0 };
        let mode = if is_present { BASE_ENABLED | BASE_X2APIC } else { 0 };
        BASE_ADDRESS | bootstrap | mode
    }

    /// The legal transitions (SDM 11.12.5), of which one remains: from x2APIC mode to disabled, where all is
    /// lost. From there the way back leads through xAPIC mode, which is not there; so this faults, and the
    /// APIC stays disabled. So does moving the base, where nothing is.
    fn set_base(&mut self, value: u64) -> Result<Written, GeneralProtection> {
        if value == self.base() {
            return Ok(Written::Nothing);
        }
        if value != self.base_if(false) {
            return Err(GeneralProtection);
        }
        let was_enabled = self.is_enabled();
        self.is_present = false;
        self.init();
        Ok(if was_enabled {
            Written::Enabled(false)
        } else {
            Written::Nothing
        })
    }

    /// Disabling masks all entries (SDM 11.4.7.2); requested vectors and vectors in service stay.
    fn set_spurious(&mut self, value: u32) -> Written {
        let was_enabled = self.is_enabled();
        self.spurious = value;
        if !self.is_enabled() {
            self.timer.mask();
            self.lvt.iter_mut().for_each(|entry| *entry |= LVT_MASKED);
        }
        if was_enabled == self.is_enabled() {
            Written::Nothing
        } else {
            Written::Enabled(self.is_enabled())
        }
    }

    /// The mask that entries can't lose while it is disabled by software.
    fn forced_mask(&self) -> u32 {
        if self.is_enabled() { 0 } else { LVT_MASKED }
    }

    fn perform(&mut self, command: Command) -> Written {
        match command {
            Command::Send(ipi) => Written::Send(ipi),
            Command::Nothing => Written::Nothing,
            Command::IllegalVector => {
                self.note_error(ERROR_SEND_ILLEGAL_VECTOR);
                Written::Nothing
            }
        }
    }

    /// Notes an error, and interrupts for the first one since the guest last wrote the register (SDM 11.5.3).
    fn note_error(&mut self, error: u8) {
        let is_first = self.new_errors == 0;
        self.new_errors |= error;
        let entry = self.lvt[LVT_ERROR];
        if is_first && entry & LVT_MASKED == 0 {
            // If its own vector is illegal, that is one more error, but no first one.
            self.accept(entry as u8, false);
        }
    }
}

/// Priority class of a vector or priority (SDM 11.8.3).
fn class(vector: u8) -> u8 {
    vector >> 4
}

#[cfg(test)]
mod tests;
