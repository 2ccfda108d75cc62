//! The state of a frozen machine: all data that another shard needs to continue it, except the contents of
//! its memory and disks, which are in separate files.
//!
//! The format is JSON with a version: a shard refuses a state of another version.

use std::fs::File;
use std::io;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shard_api::saved::{self, FrozenMap};
pub use shard_api::saved::{STATE_BYTES_MAX, VERSION};

use crate::arch::x86_64::state::{ChipState, VcpuState};
use crate::serial::UartState;

/// State of a machine that stands still, without the bytes of its memory.
#[derive(Serialize, Deserialize)]
pub struct MachineState {
    /// Value of [`VERSION`] when it was written.
    pub version: u32,
    /// The vCPUs in the order of their numbers.
    pub vcpus: Vec<VcpuState>,
    /// Interrupt chips and clock.
    pub chips: ChipState,
    /// The serial console.
    pub console: UartState,
    /// The functions of the PCI bus in the order of their slots.
    pub functions: Vec<Value>,
    /// Place of each page of memory.
    pub memory: FrozenMap,
}

impl MachineState {
    /// Reads a state.
    ///
    /// # Errors
    /// Fails as [`saved::read`].
    pub fn read(file: &File) -> io::Result<Self> {
        saved::read(file)
    }

    /// Reads a state from its text.
    ///
    /// # Errors
    /// Fails as [`saved::parse`].
    pub fn parse(text: &[u8]) -> io::Result<Self> {
        saved::parse(text)
    }

    /// Writes the state.
    ///
    /// # Errors
    /// Fails as [`saved::write`].
    pub fn write(&self, file: &mut File) -> io::Result<()> {
        saved::write(self, file)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(bytes: u64, text: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text).unwrap();
        file.set_len(bytes).unwrap();
        file
    }

    fn refusal(file: &File) -> String {
        MachineState::read(file).err().unwrap().to_string()
    }

    #[test]
    fn a_state_that_is_too_long_is_refused_before_it_is_read() {
        // A terabyte of zeroes, which takes no space: reading it would end the process.
        let why = refusal(&file(1 << 40, b"{"));
        assert!(why.contains("1099511627776 bytes"), "{why}");
        let why = refusal(&file(STATE_BYTES_MAX + 1, b"{"));
        assert!(why.contains("33554433 bytes"), "{why}");
    }

    #[test]
    fn a_state_that_is_cut_off_or_of_another_version_is_refused() {
        assert!(refusal(&file(1, b"{")).contains("not whole"));
        assert!(refusal(&file(13, b"{\"version\":1}")).contains("not whole"));
        assert!(refusal(&file(13, b"{\"version\":2}")).contains("version 2"));
    }
}
