//! Numbers of the registers (SDM 11.12.1.2, table of the x2APIC address space), and which of their bits are
//! reserved.

pub const APIC_BASE: u32 = 0x1B;
pub const TSC_DEADLINE: u32 = 0x6E0;

pub const ID: u32 = 0x802;
pub const VERSION: u32 = 0x803;
pub const TASK_PRIORITY: u32 = 0x808;
pub const PROCESSOR_PRIORITY: u32 = 0x80A;
pub const END_OF_INTERRUPT: u32 = 0x80B;
pub const LOGICAL_DESTINATION: u32 = 0x80D;
pub const SPURIOUS: u32 = 0x80F;
/// Eight registers of 32 vectors each, as the next two.
pub const IN_SERVICE: u32 = 0x810;
pub const IN_SERVICE_LAST: u32 = 0x817;
pub const TRIGGER: u32 = 0x818;
pub const TRIGGER_LAST: u32 = 0x81F;
pub const REQUEST: u32 = 0x820;
pub const REQUEST_LAST: u32 = 0x827;
pub const ERROR: u32 = 0x828;
pub const COMMAND: u32 = 0x830;
pub const LVT_TIMER: u32 = 0x832;
/// The entries of the local vector table other than the timer's: thermal sensor, performance counters, LINT0,
/// LINT1, error. That of corrected machine checks (0x82F) is absent, as the version register reports.
pub const LVT: u32 = 0x833;
pub const LVT_LAST: u32 = 0x837;
pub const INITIAL_COUNT: u32 = 0x838;
pub const CURRENT_COUNT: u32 = 0x839;
pub const DIVIDE: u32 = 0x83E;
pub const SELF_IPI: u32 = 0x83F;

/// Version 0x14 (integrated), the highest LVT entry is 5, no suppression of EOI broadcasts (SDM 11.4.8).
pub const VERSION_VALUE: u32 = 0x0005_0014;

/// APIC base: address, x2APIC mode and enable, and the bootstrap processor's flag (SDM 11.12.1).
pub const BASE_ADDRESS: u64 = 0xFEE0_0000;
pub const BASE_BOOTSTRAP: u64 = 1 << 8;
pub const BASE_X2APIC: u64 = 1 << 10;
pub const BASE_ENABLED: u64 = 1 << 11;

/// Spurious-interrupt register: vector, software enable, focus processor checking (SDM 11.9).
pub const SPURIOUS_RESET: u32 = 0xFF;
pub const SPURIOUS_ENABLED: u32 = 1 << 8;
pub const SPURIOUS_BITS: u32 = 0x3FF;

/// In every LVT entry (SDM 11.5.1). The delivery status can be read only; interrupts are never on their way,
/// so it is 0.
pub const LVT_STATUS: u32 = 1 << 12;
pub const LVT_REMOTE_IRR: u32 = 1 << 14;
pub const LVT_MASKED: u32 = 1 << 16;
/// The entries at [`LVT`], as they are there: the bits that are not reserved.
pub const LVT_BITS: [u32; 5] = [0x1_17FF, 0x1_17FF, 0x1_F7FF, 0x1_F7FF, 0x1_10FF];
/// The place of the error entry among them.
pub const LVT_ERROR: usize = 4;

/// Bits of the error status (SDM 11.5.3).
pub const ERROR_SEND_ILLEGAL_VECTOR: u8 = 1 << 5;
pub const ERROR_RECEIVE_ILLEGAL_VECTOR: u8 = 1 << 6;

/// Vectors below are the processor's own (SDM 11.5.2).
pub const VECTOR_MIN: u8 = 16;
