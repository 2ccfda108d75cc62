//! Model-specific registers that several modules name (SDM vol. 4, 2.1).

/// The time-stamp counter.
pub const MSR_TSC: u32 = 0x10;
/// What a processor has added to it.
pub const MSR_TSC_ADJUST: u32 = 0x3B;
/// When the timer of the local interrupt controller expires, by that counter.
pub const MSR_TSC_DEADLINE: u32 = 0x6E0;
