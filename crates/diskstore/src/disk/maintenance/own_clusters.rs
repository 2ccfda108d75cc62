//! What a qcow2 file holds itself, without what is below it.

use std::fs::File;
use std::io;

use imago::file::File as Storage;
use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, ShallowMapping};

use crate::disk::header::Header;

/// What a qcow2 file holds of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClusterKind {
    Data,
    Zeroes,
    /// Nothing: it shows what is below, or zeroes.
    Nothing,
}

/// A qcow2 file by itself. Never written.
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

    /// What is held of the front of a range of at least one byte, and how long that front is: at most `most` bytes if
    /// something is held.
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

    /// Reads what is held; elsewhere are zeroes.
    pub fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.access.read(into, offset)
    }
}
