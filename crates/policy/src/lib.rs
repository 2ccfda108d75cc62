//! Decisions as plain functions: no I/O, no clock, no threads. The product, the tests and a simulator call
//! the same ones.

pub mod cpu;
pub mod memory;
pub mod placement;
pub mod rate;
pub mod sharing;
pub mod span;
pub mod templates;
