//! `image.json`: the description of an image.

use serde::{Deserialize, Serialize};

use crate::disk::Format;

/// Version of the record that this program writes and reads.
pub(super) const VERSION: u32 = 1;

/// An image's record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of the format.
    pub version: u32,
    /// The image's name.
    pub name: String,
    /// Kernel file.
    pub kernel: Option<FileRecord>,
    /// Record of the initramfs, if there is one.
    pub initrd: Option<FileRecord>,
    /// Root disk.
    pub disk: Option<FileRecord>,
    /// Format of the root disk: `raw` or `qcow2`.
    pub format: Option<String>,
    /// Required kernel command line of the guest.
    pub cmdline: String,
    /// Origin, for people.
    pub built_from: String,
    /// Seconds since 1970.
    pub created_s: u64,
    /// Version of its agent ([`super::agent_version`]); `None` for an imported image.
    pub agent: Option<String>,
}

/// One file of an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its name in the image's folder.
    pub file: String,
    /// Its length in bytes; a sparse file takes less space.
    pub bytes: u64,
    /// Kind of digest and its value: `sha256:…`, or `sha256-nonzero-64k:…` for a disk (see `digest`).
    pub digest: String,
}

impl Record {
    /// Creates an empty record with the current time.
    pub(super) fn new(name: &str, built_from: String) -> Self {
        let since = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            version: VERSION,
            name: name.into(),
            kernel: None,
            initrd: None,
            disk: None,
            format: None,
            cmdline: String::new(),
            built_from,
            created_s: since.as_secs(),
            agent: None,
        }
    }

    /// Format of the root disk.
    pub(super) fn disk_format(&self) -> Option<Format> {
        match self.format.as_deref() {
            Some("raw") => Some(Format::Raw),
            Some("qcow2") => Some(Format::Qcow2),
            _ => None,
        }
    }

    /// Sum of the files' lengths, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files().map(|file| file.bytes).sum()
    }

    /// Yields the files.
    pub fn files(&self) -> impl Iterator<Item = &FileRecord> {
        [&self.kernel, &self.initrd, &self.disk].into_iter().flatten()
    }
}
