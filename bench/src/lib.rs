//! Common parts of several benches.

pub mod bars;
pub mod cpu;
pub mod exchange;
pub mod guest_files;
pub mod guest_process;
pub mod kernel_file;
pub mod mirrorball;
pub mod options;
pub mod programs;
pub mod stress_memory;
pub mod svg;
pub mod tables;
pub mod tiny_vm;

/// Result of any step; an error ends the bench.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
