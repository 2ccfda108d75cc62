//! A CPU's interrupt controller in x2APIC mode (Intel SDM 3A, 11.12).

use crate::cpu;

const BASE: u32 = 0x1B;
const BASE_X2APIC_ENABLED: u64 = 0xC00;
const ID: u32 = 0x802;
const TASK_PRIORITY: u32 = 0x808;
const END_OF_INTERRUPT: u32 = 0x80B;
const SPURIOUS: u32 = 0x80F;
const IN_SERVICE: u32 = 0x810;
const COMMAND: u32 = 0x830;
const TIMER: u32 = 0x832;
const SELF: u32 = 0x83F;
const TSC_DEADLINE: u32 = 0x6E0;

const SOFTWARE_ENABLED: u64 = 1 << 8;
const TIMER_TSC_DEADLINE: u64 = 2 << 17;

/// Vector of interrupts that were withdrawn just before they were delivered.
pub const SPURIOUS_VECTOR: u8 = 0xFF;
/// The timer's vector, above all others.
pub const TIMER_VECTOR: u8 = 0xF1;
/// Normal value of CR8, except during one check: no vector here is so low.
pub const IDLE_PRIORITY: u64 = 1;

/// How an interrupt is delivered: bits 8 to 10 of the interrupt command register.
#[derive(Clone, Copy)]
pub enum Delivery {
    Fixed = 0,
    LowestPriority = 1 << 8,
    Nmi = 4 << 8,
    Init = 5 << 8,
    Startup = 6 << 8,
}

/// Targets of an interrupt: destination field, destination mode (bit 11) and shorthand (bits 18 and 19).
#[derive(Clone, Copy)]
pub enum To {
    One(usize),
    /// CPUs of the first cluster, a bit for each.
    Cluster(u32),
    Broadcast,
    Own,
    All,
    Others,
    /// A cluster without CPUs.
    Nobody,
}

/// Turns the controller on, with its timer by the time stamp.
pub fn enable() {
    cpu::write(BASE, cpu::read(BASE) | BASE_X2APIC_ENABLED);
    cpu::write(SPURIOUS, SOFTWARE_ENABLED | u64::from(SPURIOUS_VECTOR));
    cpu::write(TASK_PRIORITY, IDLE_PRIORITY << 4);
    cpu::write(TIMER, TIMER_TSC_DEADLINE | u64::from(TIMER_VECTOR));
    cpu::fence();
}

/// Sets the class of this CPU's priority by its register, which CR8 is a part of.
pub fn set_priority(class: u64) {
    cpu::write(TASK_PRIORITY, class << 4);
    cpu::fence();
}

/// The class of this CPU's priority, as its register has it.
pub fn priority() -> u64 {
    cpu::read(TASK_PRIORITY) >> 4
}

/// Reads this CPU's id from its local APIC.
pub fn id() -> u32 {
    cpu::read(ID) as u32
}

/// Sends an interrupt.
pub fn send(delivery: Delivery, to: To, vector: u8) {
    const LOGICAL: u64 = 1 << 11;
    const ASSERT: u64 = 1 << 14;
    let (destination, mode) = match to {
        To::One(cpu) => (cpu as u64, 0),
        To::Cluster(cpus) => (u64::from(cpus), LOGICAL),
        To::Broadcast => (0xFFFF_FFFF, 0),
        To::Own => (0, 1 << 18),
        To::All => (0, 2 << 18),
        To::Others => (0, 3 << 18),
        To::Nobody => (0x0BAD_0001, LOGICAL),
    };
    cpu::fence();
    let command = destination << 32 | mode | ASSERT | delivery as u64 | u64::from(vector);
    cpu::write(COMMAND, command);
}

/// Sends this CPU an interrupt, by the register that does only that.
pub fn send_self(vector: u8) {
    cpu::fence();
    cpu::write(SELF, u64::from(vector));
}

/// Whether the controller has delivered this vector and not received its end. If not, the interrupt is not
/// from the controller.
pub fn is_in_service(vector: u8) -> bool {
    cpu::read(IN_SERVICE + u32::from(vector >> 5)) >> (vector & 31) & 1 == 1
}

/// Ends the interrupt in service with the highest priority.
pub fn end_of_interrupt() {
    cpu::write(END_OF_INTERRUPT, 0);
}

/// Lets the timer interrupt at this time stamp; 0 disarms it.
pub fn set_timer(deadline: u64) {
    cpu::write(TSC_DEADLINE, deadline);
}

/// Time stamp of the timer's next interrupt; 0 when it is not armed.
pub fn timer() -> u64 {
    cpu::read(TSC_DEADLINE)
}
