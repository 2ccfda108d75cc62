//! Common parts of several benches.

pub mod cpu;
pub mod mirrorball;
pub mod options;
pub mod programs;
pub mod svg;
pub mod tables;

/// Result of any step; an error ends the bench.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
