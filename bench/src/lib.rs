//! What several benches use.

pub mod cpu;
pub mod options;
pub mod programs;
pub mod svg;
pub mod tables;

/// Whatever fails ends the bench.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
