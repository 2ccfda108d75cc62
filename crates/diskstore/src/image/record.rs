//! `image.json`: what an image is made of.

use serde::{Deserialize, Serialize};

use crate::disk::Format;

/// The version of the record this program writes and reads.
pub(super) const VERSION: u32 = 1;

/// An image's record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Of this format.
    pub version: u32,
    /// The image's name.
    pub name: String,
    /// Kernel file.
    pub kernel: Option<FileRecord>,
    /// Initramfs.
    pub initrd: Option<FileRecord>,
    /// Root disk.
    pub disk: Option<FileRecord>,
    /// Format of the root disk: `raw` or `qcow2`.
    pub format: Option<String>,
    /// What the guest's command line must hold.
    pub cmdline: String,
    /// What it was built from, for people.
    pub built_from: String,
    /// Seconds since 1970.
    pub created_s: u64,
    /// Version of the agent in it ([`super::agent_version`]); `None` for an imported image.
    pub agent: Option<String>,
}

/// One file of an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its name in the image's folder.
    pub file: String,
    /// Its length in bytes; a sparse file takes less room.
    pub bytes: u64,
    /// The kind of digest and its value: `sha256:…`, or `sha256-nonzero-64k:…` of a disk (see `digest`).
    pub digest: String,
}

impl Record {
    /// A record of nothing, made now.
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

    /// The root disk's format.
    pub(super) fn disk_format(&self) -> Option<Format> {
        match self.format.as_deref() {
            Some("raw") => Some(Format::Raw),
            Some("qcow2") => Some(Format::Qcow2),
            _ => None,
        }
    }

    /// The sum of its files' lengths, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files().map(|file| file.bytes).sum()
    }

    /// Its files.
    pub fn files(&self) -> impl Iterator<Item = &FileRecord> {
        [&self.kernel, &self.initrd, &self.disk].into_iter().flatten()
    }
}
