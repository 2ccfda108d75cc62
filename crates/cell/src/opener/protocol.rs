//! Messages between a monitor and the process that opens its owner's files: a line of JSON each, with the
//! descriptors that it names. Both processes run one program, so the messages have no version.

use std::path::PathBuf;

use diskstore::disk::{DiskRequest, Format, Mode};
use hostfiles::names::Below;
use serde::{Deserialize, Serialize};
use shard_api::launch::{DiskFormat, Fd};

/// A request for the files of one name.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// Directories below which the name counts.
    pub directories: Vec<PathBuf>,
    /// The setting that lists them.
    pub setting: String,
    pub wanted: Wanted,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Wanted {
    /// A regular file, for reading.
    File {
        /// The file's use in the VM.
        what: String,
        path: PathBuf,
    },
    /// A disk with all files that it stands on.
    Disk(NamedDisk),
}

/// A disk that is opened without an overlay.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NamedDisk {
    path: PathBuf,
    format: Option<DiskFormat>,
    is_exclusive: bool,
    is_persistent: bool,
    read_only: bool,
    /// Whether all of the file is to have room.
    pub allocate: bool,
    vm: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    File(Fd),
    Disk {
        /// From the top file down to the base.
        layers: Vec<NamedLayer>,
        /// Size of the disk.
        size_bytes: u64,
    },
    /// Reason and help, in one line.
    Refused {
        why: String,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NamedLayer {
    pub file: Fd,
    pub format: DiskFormat,
}

impl NamedDisk {
    /// None for a disk with a persistent overlay, which is not the owner's file.
    pub fn of(request: &DiskRequest, allocate: bool) -> Option<Self> {
        let has_overlay = request.persistent && !request.read_only && request.mode == Mode::Private;
        (!has_overlay).then(|| Self {
            path: request.path.clone(),
            format: request.format.map(|format| match format {
                Format::Raw => DiskFormat::Raw,
                Format::Qcow2 => DiskFormat::Qcow2,
                Format::Scratch => DiskFormat::Scratch,
            }),
            is_exclusive: request.mode == Mode::Exclusive,
            is_persistent: request.persistent,
            read_only: request.read_only,
            allocate,
            vm: request.vm_name.clone(),
        })
    }

    /// The disk to open below these directories.
    pub fn request(self, below: Below) -> DiskRequest {
        DiskRequest {
            path: self.path,
            format: self.format.map(|format| match format {
                DiskFormat::Raw => Format::Raw,
                DiskFormat::Qcow2 => Format::Qcow2,
                DiskFormat::Scratch => Format::Scratch,
            }),
            mode: match self.is_exclusive {
                true => Mode::Exclusive,
                false => Mode::Private,
            },
            persistent: self.is_persistent,
            read_only: self.read_only,
            overlay_path: None,
            scratch_dir: PathBuf::new(),
            vm_name: self.vm,
            below: Some(below),
        }
    }
}
