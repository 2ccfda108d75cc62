//! The state of a machine that was frozen: everything another shard needs to go on where it stood, but for the content of
//! its memory and disks, which are in files of their own.
//!
//! JSON, with a version: a shard refuses what another version wrote.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::arch::x86_64::state::{ChipState, VcpuState};
use crate::serial::UartState;
use crate::sharing::FrozenMap;

/// The version of this format.
pub const VERSION: u32 = 1;
/// A state is no longer than this. One of 254 vCPUs takes some 10 MiB, and each run of memory some 60 bytes, of which the
/// kernel's default limit of mappings allows 65,530.
pub const STATE_BYTES_MAX: u64 = 32 << 20;

/// The machine.
#[derive(Serialize, Deserialize)]
pub struct MachineState {
    /// [`VERSION`] when it was written.
    pub version: u32,
    /// The vCPUs in the order of their numbers.
    pub vcpus: Vec<VcpuState>,
    /// Interrupt chips and clock.
    pub chips: ChipState,
    /// The serial console.
    pub console: UartState,
    /// The functions of the PCI bus in the order of their slots.
    pub functions: Vec<Value>,
    /// Where each page of memory is.
    pub memory: FrozenMap,
}

/// What is looked at before anything else of a state is believed.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl MachineState {
    /// Reads a state.
    ///
    /// # Errors
    /// When it is not whole, longer than [`STATE_BYTES_MAX`], or of another version.
    pub fn read(file: &File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        if bytes > STATE_BYTES_MAX {
            return Err(invalid(format!(
                "the saved state has {bytes} bytes; {STATE_BYTES_MAX} at most"
            )));
        }
        let mut text = vec![0; bytes as usize];
        // By its offset: other shards read the same open file.
        file.read_exact_at(&mut text, 0)?;
        Self::parse(&text)
    }

    /// Reads a state from its text.
    ///
    /// # Errors
    /// When it is not whole, or of another version.
    pub fn parse(text: &[u8]) -> io::Result<Self> {
        let Version { version } = serde_json::from_slice(text)
            .map_err(|error| invalid(format!("the saved state is not whole: {error}")))?;
        if version != VERSION {
            return Err(invalid(format!(
                "the saved state has version {version}; this program reads version {VERSION}"
            )));
        }
        serde_json::from_slice(text)
            .map_err(|error| invalid(format!("the saved state is not whole: {error}")))
    }

    /// Writes it.
    ///
    /// # Errors
    /// When it is longer than what [`MachineState::read`] takes, or the host refuses.
    pub fn write(&self, file: &mut File) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        if text.len() as u64 > STATE_BYTES_MAX {
            return Err(io::Error::other(format!(
                "its state takes {} bytes; {STATE_BYTES_MAX} at most; give it fewer vCPUs or less memory",
                text.len()
            )));
        }
        file.write_all(&text)
    }
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
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
        // A terabyte of nothing, which takes no space: reading it would end the process.
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
