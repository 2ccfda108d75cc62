//! Clusters of a qcow2 file itself, without its backing files.

use std::fs::File;
use std::io;

use imago::file::File as Storage;
use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, ShallowMapping};

use crate::disk::header::Header;

/// Kind of a range in a qcow2 file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClusterKind {
    Data,
    Zeroes,
    /// Unallocated: it shows the backing file, or zeroes.
    Nothing,
}

/// A qcow2 file without its backing file. Never written.
pub(super) struct OwnClusters {
    access: FormatAccess<Storage>,
    pub header: Header,
}

impl OwnClusters {
    pub fn open(file: &File) -> io::Result<Self> {
        let header =
            Header::read(file, false).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
        let disk = Qcow2::<Storage>::builder(Storage::try_from(file.try_clone()?)?)
            .write(false)
            .backing(None)
            .data_file(None)
            .open(DenyImplicitOpenGate::default())?;
        Ok(Self {
            access: FormatAccess::new(disk),
            header,
        })
    }

    /// Returns the kind of the front of a non-empty range, and the length of that front: at most `most` bytes
    /// if it is allocated.
    pub fn run(&self, offset: u64, bytes: u64, most: u64) -> io::Result<(ClusterKind, u64)> {
        let (mapping, length) = self.access.get_shallow_mapping(offset, bytes)?;
        let held = match mapping {
            ShallowMapping::Zero { explicit: true, .. } => ClusterKind::Zeroes,
            ShallowMapping::Zero { .. } => ClusterKind::Nothing,
            ShallowMapping::Eof { .. } => return Ok((ClusterKind::Nothing, bytes)),
            _ => ClusterKind::Data,
        };
        match held {
            ClusterKind::Nothing => Ok((held, length)),
            _ => Ok((held, length.min(most))),
        }
    }

    /// Reads allocated data; the rest are zeroes.
    pub fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.access.read(into, offset)
    }
}
