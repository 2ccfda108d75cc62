//! The TOML files as typed, validated specs.
//!
//! [`parse`] is pure: text in, a validated [`VmSpec`] or one [`ConfigError`] out. [`check_host`] checks the
//! properties that depend on the host (existing files, memory, names in use), and returns errors of the same
//! kind, with the same spans.

pub mod cluster;
pub mod cpulist;
mod default_card;
mod disk_limits;
mod error;
mod fault;
mod host;
mod io_limit;
pub mod lab;
pub mod labels;
mod promise;
mod reader;
pub mod settings;
mod size;
mod span;
pub mod start_order;
#[cfg(test)]
mod tests;
mod validate;
pub mod vm;

pub use default_card::{command_network, is_command_network};
pub use disk_limits::{DiskLimitsMut, DiskName};
pub use error::ConfigError;
pub use fault::Fault;
pub use host::{Access, FileKind, HostFacts, check_host, duplicate_names};
pub use io_limit::{IoLimitError, IoLimitSpec};
pub use labels::{Label, LabelError, Labels, Selector};
pub use size::{Size, SizeError};
pub use span::{SpanError, SpanMemory, SpanSpec};
pub use validate::{Transport, check, forward, is_name, mac};
pub use vm::VmSpec;

/// A parsed VM file: the spec, and the place of each part in the text.
#[derive(Clone, Debug)]
pub struct VmFile {
    /// Name of the file, for messages.
    pub source_name: String,
    /// Text of the file, for errors that show a place.
    pub text: String,
    /// Parsed spec.
    pub spec: VmSpec,
}

/// Formats `spec` as the text of a VM file.
///
/// # Errors
/// If a path is not UTF-8.
pub fn text_of(spec: &VmSpec) -> Result<String, toml::ser::Error> {
    toml::to_string(spec)
}

/// Parses and checks a VM file. Never panics, whatever `text` is.
pub fn parse(source_name: &str, text: &str) -> Result<VmSpec, ConfigError> {
    let spec: VmSpec =
        toml::from_str(text).map_err(|error| ConfigError::from_toml(source_name, text, &error))?;
    check(&spec).map_err(|fault| ConfigError::from_fault(source_name, text, &fault))?;
    Ok(spec)
}
