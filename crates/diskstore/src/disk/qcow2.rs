//! A qcow2 disk over its backing files, by `imago`.
//!
//! `imago` works on open files only, and writes a cluster's data before it maps the cluster. It updates
//! refcounts before mappings (or after, when freeing), except for a new L2 table, which it names before it
//! counts it. So the death of the process at worst leaks clusters and leaves a table uncounted until the file
//! is opened again (`maintenance::repair`). It does not sync the disk between the two, so a crash of the
//! *host* may also leave a used cluster uncounted. The first opening for writing after a boot of the host
//! finds that ([`super::boot`]), before flushed data is overwritten.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use imago::file::File as Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder, ShallowMapping};
use locks::IgnorePoison;

use super::format::length;
use super::header::Header;
use super::raw::{hole, write_zero_bytes};
use super::{Format, Origin, SECTOR_BYTES, Segments, Store, SyncState};

/// Bytes of a cluster of new files.
pub(super) const CLUSTER_BYTES: u64 = 64 << 10;

/// A qcow2 disk.
pub(super) struct Qcow2Store {
    /// A discard needs exclusive access: it may free a cluster that another access has just looked up.
    access: RwLock<FormatAccess<Storage>>,
    /// Copies of the files, the top first: one for each layer, so that a layer's depth is its file's index.
    files: Vec<Layer>,
    size: u64,
    read_only: bool,
    sync_state: SyncState,
}

struct Layer {
    file: File,
    /// Bytes of the file when it was opened.
    length: u64,
}

impl Qcow2Store {
    /// Opens `file` over `backing`, top first. Only `file` is written.
    pub fn new(file: File, backing: Vec<(File, Format)>, read_only: bool) -> io::Result<Self> {
        let files = std::iter::once(&file)
            .chain(backing.iter().map(|(file, _)| file))
            .map(|file| {
                Ok(Layer {
                    file: file.try_clone()?,
                    length: length(file)?,
                })
            })
            .collect::<io::Result<_>>()?;
        let access = open_access(file, backing, !read_only)?;
        let size = access.size() / SECTOR_BYTES * SECTOR_BYTES;
        Ok(Self {
            access: RwLock::new(access),
            files,
            size,
            read_only,
            sync_state: SyncState::default(),
        })
    }

    /// Index of the first file that is never written.
    fn first_base(&self) -> usize {
        usize::from(!self.read_only)
    }

    /// Locates the front of a range that is stored unchanged: a layer's depth, and the offset in its file; or
    /// the length of the front that is not.
    fn place(&self, offset: u64, bytes: u64) -> io::Result<Place> {
        let top = self.shared();
        let (mut layer, mut depth) = (&*top, 0);
        let (mut offset, mut bytes) = (offset, bytes);
        loop {
            let (mapping, length) = layer.get_shallow_mapping(offset, bytes)?;
            match mapping {
                ShallowMapping::Raw { offset, .. } => {
                    return Ok(Place::At {
                        depth,
                        offset,
                        bytes: length,
                    });
                }
                ShallowMapping::Indirect {
                    layer: below,
                    offset: there,
                    ..
                } => (layer, depth, offset, bytes) = (below, depth + 1, there, length),
                // Bytes after the end of a shorter base are zeroes.
                ShallowMapping::Eof { .. } => return Ok(Place::Zeroes { bytes }),
                ShallowMapping::Zero { .. } => return Ok(Place::Zeroes { bytes: length }),
                _ => return Ok(Place::Encoded { bytes: length }),
            }
        }
    }

    fn shared(&self) -> RwLockReadGuard<'_, FormatAccess<Storage>> {
        self.access.read().ignore_poison()
    }

    fn alone(&self) -> RwLockWriteGuard<'_, FormatAccess<Storage>> {
        self.access.write().ignore_poison()
    }
}

/// Source of the front of a range in a chain of files.
enum Place {
    /// A layer's file, unchanged.
    At { depth: usize, offset: u64, bytes: u64 },
    /// No file: the range reads as zeroes.
    Zeroes { bytes: u64 },
    /// Compressed clusters.
    Encoded { bytes: u64 },
}

fn open_access(
    file: File,
    backing: Vec<(File, Format)>,
    writable: bool,
) -> io::Result<FormatAccess<Storage>> {
    Header::read(&file, writable).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
    let mut backing = backing.into_iter();
    let below = match backing.next() {
        None => None,
        Some((file, Format::Raw)) if backing.len() == 0 => Some(FormatAccess::new(Raw::open_image(
            Storage::try_from(file)?,
            false,
        )?)),
        Some((file, Format::Qcow2)) => Some(open_access(file, backing.collect(), false)?),
        Some(_) => {
            let why = "only raw and qcow2 files can be below a qcow2 file, and nothing below a raw one";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
    };
    let disk = Qcow2::<Storage>::builder(Storage::try_from(file)?)
        .write(writable)
        .backing(below)
        .data_file(None)
        .open(DenyImplicitOpenGate::default())?;
    Ok(FormatAccess::new(disk))
}

/// Returns the format that a qcow2 file records for its backing file.
pub(super) fn backing_format(file: &File) -> io::Result<Option<String>> {
    let disk = Qcow2::<Storage>::open_image(Storage::try_from(file.try_clone()?)?, false)?;
    Ok(disk.implicit_backing_format().cloned())
}

/// Creates an empty overlay in `file` for a disk of `size` bytes over `base`.
pub(super) fn create_overlay(file: File, size: u64, base: &Path, format: Format) -> io::Result<()> {
    let base = base.to_str().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "the base's path is not UTF-8, which qcow2 needs",
        )
    })?;
    create(file, size, CLUSTER_BYTES, Some((base, format)))
}

/// Creates an empty qcow2 disk in `file`, over a backing file if one is given.
pub(super) fn create(
    file: File,
    size: u64,
    cluster_bytes: u64,
    backing: Option<(&str, Format)>,
) -> io::Result<()> {
    let cluster_bytes = usize::try_from(cluster_bytes).map_err(io::Error::other)?;
    let mut builder = Qcow2::<Storage>::create_builder(Storage::try_from(file)?)
        .size(size)
        .cluster_size(cluster_bytes);
    if let Some((name, format)) = backing {
        let format = match format {
            Format::Qcow2 => "qcow2",
            _ => "raw",
        };
        builder = builder.backing(name.to_owned(), format.to_owned());
    }
    builder.create()
}

impl Store for Qcow2Store {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, into: &Segments, offset: u64) -> io::Result<()> {
        self.shared().readv(IoVectorMut::from(into.targets()), offset)
    }

    fn write(&self, from: &Segments, offset: u64) -> io::Result<()> {
        self.shared().writev(IoVector::from(from.sources()), offset)
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match self.alone().discard_to_any(offset, bytes) {
            // A discard is a hint.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            result => result,
        }
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        let result = if unmap {
            self.alone().discard_to_zero(offset, bytes)
        } else {
            self.shared().write_zeroes(offset, bytes)
        };
        match result {
            // Version 2 has no zero clusters.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                write_zero_bytes(offset, bytes, |zeroes, at| self.write(zeroes, at))
            }
            result => result,
        }
    }

    fn write_back(&self) -> io::Result<Option<usize>> {
        self.shared().flush()?;
        Ok(Some(0))
    }

    fn sync_state(&self) -> &SyncState {
        &self.sync_state
    }

    fn files(&self) -> Vec<BorrowedFd<'_>> {
        self.files.iter().map(|layer| layer.file.as_fd()).collect()
    }

    fn known_zero(&self, offset: u64, bytes: u64) -> (bool, u64) {
        match self.place(offset, bytes) {
            Ok(Place::Zeroes { bytes }) => (true, bytes),
            Ok(Place::At { depth, offset, bytes }) => match self.files.get(depth) {
                Some(layer) => hole(&layer.file, offset, bytes),
                None => (false, bytes),
            },
            Ok(Place::Encoded { bytes }) => (false, bytes),
            Err(_) => (false, bytes),
        }
    }

    fn bases(&self) -> Vec<usize> {
        (self.first_base()..self.files.len()).collect()
    }

    fn origin(&self, offset: u64, bytes: u64) -> Origin {
        let other = |bytes: u64| Origin::Other { bytes };
        match self.place(offset, bytes) {
            Ok(Place::At { depth, offset, bytes }) => {
                let Some(layer) = self.files.get(depth).filter(|_| depth >= self.first_base()) else {
                    return other(bytes);
                };
                // The file of a qcow2 disk may end within its last cluster, or be truncated.
                match layer.length.saturating_sub(offset).min(bytes) {
                    0 => other(bytes),
                    bytes => Origin::Base {
                        file: depth,
                        offset,
                        bytes,
                    },
                }
            }
            Ok(Place::Zeroes { bytes } | Place::Encoded { bytes }) => other(bytes),
            // A read of it reports the error.
            Err(_) => other(bytes),
        }
    }
}
