//! A qcow2 disk over the files below it, by `imago`.
//!
//! `imago` works on open files only, writes a cluster's data before it maps the cluster, and keeps its refcounts ahead
//! of its mappings (or behind, when freeing), so that what reaches the kernel is consistent at any moment: after the
//! death of the process at worst clusters are leaked. It does not sync the disk between the two, so a crash of the
//! *host* may in addition need `qemu-img check -r all` for what was not flushed; flushed data is safe either way.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use imago::file::File as Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder};

use super::header::Header;
use super::raw::write_zero_bytes;
use super::{Format, SECTOR_BYTES, Segments, Store};

/// A qcow2 disk.
pub(super) struct Qcow2Store {
    /// Discarding must be alone: it may free a cluster that another access has just looked up.
    access: RwLock<FormatAccess<Storage>>,
    /// A copy for syncing.
    file: File,
    size: u64,
}

impl Qcow2Store {
    /// Opens `file` over `backing`, top first. Only `file` is written.
    pub fn new(file: File, backing: Vec<(File, Format)>, read_only: bool) -> io::Result<Self> {
        let copy = file.try_clone()?;
        let access = open_access(file, backing, !read_only)?;
        let size = access.size() / SECTOR_BYTES * SECTOR_BYTES;
        Ok(Self {
            access: RwLock::new(access),
            file: copy,
            size,
        })
    }

    fn shared(&self) -> RwLockReadGuard<'_, FormatAccess<Storage>> {
        self.access.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn alone(&self) -> RwLockWriteGuard<'_, FormatAccess<Storage>> {
        self.access.write().unwrap_or_else(PoisonError::into_inner)
    }
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

/// What a qcow2 file records of its backing file's format.
pub(super) fn backing_format(file: &File) -> io::Result<Option<String>> {
    let disk = Qcow2::<Storage>::open_image(Storage::try_from(file.try_clone()?)?, false)?;
    Ok(disk.implicit_backing_format().cloned())
}

/// Makes an empty overlay in `file` for a disk of `size` bytes over `base`.
pub(super) fn create_overlay(file: File, size: u64, base: &Path, format: Format) -> io::Result<()> {
    let base = base.to_str().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "the base's path is not UTF-8, which qcow2 needs",
        )
    })?;
    let format = match format {
        Format::Qcow2 => "qcow2",
        _ => "raw",
    };
    Qcow2::<Storage>::create_builder(Storage::try_from(file)?)
        .backing(base.to_owned(), format.to_owned())
        .size(size)
        .create()
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

    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.file.as_fd()]
    }
}
