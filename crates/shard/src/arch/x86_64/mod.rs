//! The x86-64 machine that the guest sees: address map, boot state, ACPI tables, CPUID.

pub mod acpi;
pub mod cpuid;
pub mod early_memory;
pub mod kernel;
pub mod memory_map;
pub mod msr;
pub mod registers;
pub mod start;
pub mod state;

pub use shard_api::layout;

#[cfg(test)]
mod tests;
