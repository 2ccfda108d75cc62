//! Model-specific registers used by several modules (SDM vol. 4, 2.1).

/// Time-stamp counter.
pub const MSR_TSC: u32 = 0x10;
/// Difference that the processor has added to the time-stamp counter.
pub const MSR_TSC_ADJUST: u32 = 0x3B;
/// Value of the time-stamp counter at which the timer of the local interrupt controller expires.
pub const MSR_TSC_DEADLINE: u32 = 0x6E0;
