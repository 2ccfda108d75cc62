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
    /// When it is not whole, or of another version.
    pub fn read(file: &File) -> io::Result<Self> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let bytes = usize::try_from(file.metadata()?.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let mut text = vec![0; bytes];
        // By its offset: other shards read the same open file.
        file.read_exact_at(&mut text, 0)?;
        let Version { version } = serde_json::from_slice(&text)
            .map_err(|error| invalid(format!("the saved state is not whole: {error}")))?;
        if version != VERSION {
            return Err(invalid(format!(
                "the saved state has version {version}; this program reads version {VERSION}"
            )));
        }
        serde_json::from_slice(&text)
            .map_err(|error| invalid(format!("the saved state is not whole: {error}")))
    }

    /// Writes it.
    pub fn write(&self, file: &mut File) -> io::Result<()> {
        file.write_all(&serde_json::to_vec(self)?)
    }
}
