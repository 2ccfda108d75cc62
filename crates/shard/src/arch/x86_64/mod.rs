//! The x86-64 machine as its guest finds it: address map, boot state, ACPI tables, CPUID.

pub mod layout;
