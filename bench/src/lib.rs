//! Common parts of several benches.

pub mod cpu;
pub mod guest_files;
pub mod guest_process;
pub mod options;
pub mod programs;
pub mod svg;
pub mod tables;

/// Result of any step; an error ends the bench.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
