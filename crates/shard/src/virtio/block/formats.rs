//! The formats of the launch message and of the disk store are the same.

use diskstore::disk::Format;

use crate::launch::DiskFormat;

impl From<DiskFormat> for Format {
    fn from(format: DiskFormat) -> Self {
        match format {
            DiskFormat::Raw => Self::Raw,
            DiskFormat::Qcow2 => Self::Qcow2,
            DiskFormat::Scratch => Self::Scratch,
        }
    }
}

impl From<Format> for DiskFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Raw => Self::Raw,
            Format::Qcow2 => Self::Qcow2,
            Format::Scratch => Self::Scratch,
        }
    }
}
