//! The state of a frozen machine as a monitor reads it: where each page of memory is. The monitor copies all
//! other parts without interpreting them.
//!
//! The format is JSON with a version. A reader refuses a state of another version.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use nix::sys::stat::fstat;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The version of this format.
pub const VERSION: u32 = 1;
/// Maximum length of a state, bytes. A state of 254 vCPUs takes some 10 MiB, and each run of memory some
/// 60 bytes. The kernel's default limit of mappings allows 65,530 runs.
pub const STATE_BYTES_MAX: u64 = 32 << 20;

/// Index of a registered image file.
pub type ImageId = u16;

/// Pseudo-image of pages that are zero until written, and have no place in any file. The run of guest page g
/// has g as its [`Run::first`].
pub const NOTHING: ImageId = ImageId::MAX;

/// Pages of an image, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Number of pages, at least 1.
    pub pages: u64,
    /// Image that has the pages.
    pub image: ImageId,
    /// Number of the first page in the image's file.
    pub first: u64,
}

impl Run {
    /// Returns the part of this run from its page `skip` on, of `pages` pages.
    pub fn part(&self, skip: u64, pages: u64) -> Self {
        Self {
            pages,
            image: self.image,
            first: self.first + skip,
        }
    }

    /// Returns whether `next` continues where this run ends.
    pub fn goes_on_with(&self, next: &Self) -> bool {
        self.image == next.image && self.first + self.pages == next.first
    }
}

/// Identity of a file whose pages guest memory maps: device, inode, size in bytes, and modification time. The
/// identity is the same for every open file of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageName {
    device: u64,
    inode: u64,
    bytes: i64,
    written_s: i64,
    written_ns: i64,
}

impl ImageName {
    /// Identity of an open file.
    ///
    /// # Errors
    /// Fails if `fstat` fails.
    pub fn of(file: &File) -> io::Result<Self> {
        let about = fstat(file)?;
        Ok(Self {
            device: about.st_dev,
            inode: about.st_ino,
            bytes: about.st_size,
            written_s: about.st_mtime,
            written_ns: about.st_mtime_nsec,
        })
    }
}

/// Place of each page of frozen memory.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FrozenMap {
    /// The images that runs name by their number.
    pub images: Vec<ImageName>,
    /// Runs with their first guest pages: of an image, of a layer (numbered on after the images), or of
    /// [`NOTHING`]. A page in no run is in the first file, at the guest page's own offset.
    pub runs: Vec<(u64, Run)>,
}

/// A frozen machine: the map of its memory, and the text of everything else.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedMachine {
    version: u32,
    vcpus: Box<RawValue>,
    chips: Box<RawValue>,
    console: Box<RawValue>,
    functions: Box<RawValue>,
    /// Place of each page of memory.
    pub memory: FrozenMap,
}

/// The field that is checked before the rest of a state is parsed.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// Reads a state from the beginning of a file: other readers may use the same open file.
///
/// # Errors
/// Fails if the state is incomplete, longer than [`STATE_BYTES_MAX`], or of another version.
pub fn read<S: DeserializeOwned>(file: &File) -> io::Result<S> {
    let bytes = file.metadata()?.len();
    if bytes > STATE_BYTES_MAX {
        return Err(invalid(format!(
            "the saved state has {bytes} bytes; {STATE_BYTES_MAX} at most"
        )));
    }
    let mut text = vec![0; bytes as usize];
    file.read_exact_at(&mut text, 0)?;
    parse(&text)
}

/// Reads a state from its text.
///
/// # Errors
/// Fails if the state is incomplete, or of another version.
pub fn parse<S: DeserializeOwned>(text: &[u8]) -> io::Result<S> {
    let not_whole = |error| invalid(format!("the saved state is not whole: {error}"));
    let Version { version } = serde_json::from_slice(text).map_err(not_whole)?;
    if version != VERSION {
        return Err(invalid(format!(
            "the saved state has version {version}; this program reads version {VERSION}"
        )));
    }
    serde_json::from_slice(text).map_err(not_whole)
}

/// Writes a state.
///
/// # Errors
/// Fails if the state is longer than [`STATE_BYTES_MAX`], or the host refuses the write.
pub fn write(state: &impl Serialize, file: &mut File) -> io::Result<()> {
    let text = serde_json::to_vec(state)?;
    if text.len() as u64 > STATE_BYTES_MAX {
        return Err(io::Error::other(format!(
            "its state takes {} bytes; {STATE_BYTES_MAX} at most; give it fewer vCPUs or less memory",
            text.len()
        )));
    }
    file.write_all(&text)
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: &str = concat!(
        r#"{"version":1,"vcpus":[{"id": 0, "rip": 18446744073709551615}],"chips":{"pic":[1,2]},"#,
        r#""console":null,"functions":[0.5],"memory":{"images":[],"#,
        r#""runs":[[7,{"pages":2,"image":65535,"first":7}],[9,{"pages":1,"image":3,"first":0}]]}}"#
    );

    #[test]
    fn parts_of_a_state_that_a_monitor_does_not_interpret_are_copied_to_the_byte() {
        let mut state: SavedMachine = parse(STATE.as_bytes()).unwrap();
        assert_eq!(state.memory.runs.len(), 2);
        let mut file = tempfile::tempfile().unwrap();
        write(&state, &mut file).unwrap();
        let mut text = vec![0; STATE.len()];
        file.read_exact_at(&mut text, 0).unwrap();
        assert_eq!(String::from_utf8(text).unwrap(), STATE);
        state.memory.runs.retain(|(_, run)| run.image == NOTHING);
        let mut shorter = tempfile::tempfile().unwrap();
        write(&state, &mut shorter).unwrap();
        let again: SavedMachine = read(&shorter).unwrap();
        assert_eq!(again.memory.runs.len(), 1);
        assert_eq!(again.vcpus.get(), state.vcpus.get());
    }

    #[test]
    fn state_of_another_version_is_refused_with_any_other_contents() {
        let refused = |text: &str| parse::<SavedMachine>(text.as_bytes()).unwrap_err().to_string();
        let why = refused(r#"{"version":2}"#);
        assert!(why.contains("version 2; this program reads version 1"), "{why}");
        let why = refused(&STATE[..STATE.len() - 1]);
        assert!(why.contains("not whole"), "{why}");
    }
}
