//! The TOML files as typed, checked specs.

pub mod vm;

pub use vm::VmSpec;
