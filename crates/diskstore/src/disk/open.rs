//! Opens a disk for one VM: its files, their formats, their locks.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hostfiles::names::{Access, Below, Kind};

use super::fingerprint::Fingerprint;
use super::format::{decide, length, record_raw};
use super::header::Header;
use super::lock::{self, Lock, Share};
use super::maintenance::{first_fault, repair};
use super::{DiskError, Format, SECTOR_BYTES, boot, qcow2, scratch};

/// Maximum number of files in a backing chain.
const CHAIN_MAX: usize = 16;

/// Bytes that a qcow2 file may take beyond twice its disk: its first tables.
const QCOW2_SLACK_BYTES: u64 = 1 << 30;

/// Maximum retries for a file that was replaced while it was being locked.
const REPLACED_MAX: u32 = 16;

/// Sharing mode of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Any number of VMs, each seeing its own writes over a base that is never written.
    #[default]
    Private,
    /// One VM at a time.
    Exclusive,
}

/// A VM's request for a disk.
#[derive(Clone, Debug)]
pub struct DiskRequest {
    /// The file.
    pub path: PathBuf,
    /// Its format, if the user stated it. Never [`Format::Scratch`].
    pub format: Option<Format>,
    /// Sharing with other VMs.
    pub mode: Mode,
    /// Whether to keep the VM's writes: in the file itself when exclusive, in the overlay when private.
    pub persistent: bool,
    /// Whether the guest may not write.
    pub read_only: bool,
    /// Path of the overlay of a persistent private disk, created when absent. Its directory exists.
    pub overlay_path: Option<PathBuf>,
    /// Existing directory for temporary overlays.
    pub scratch_dir: PathBuf,
    /// Name of the VM, for the error that another VM gets.
    pub vm_name: String,
    /// Directories below which the file lies, and each file that it stands on; anywhere when absent.
    pub below: Option<Below>,
}

impl DiskRequest {
    /// Whether the file itself is written.
    pub fn is_in_place(&self) -> bool {
        self.mode == Mode::Exclusive && self.persistent && !self.read_only
    }

    /// Whether the disk needs a temporary overlay.
    fn needs_scratch(&self) -> bool {
        !self.read_only && !self.persistent
    }
}

/// One open file of a disk.
#[derive(Debug)]
pub struct Layer {
    /// Open file with bytes of the disk.
    pub file: File,
    /// Format in which the file is read.
    pub format: Format,
}

/// An open disk. Its locks last until the files and all their copies are closed; its holder stays announced
/// until this is dropped.
#[derive(Debug)]
pub struct OpenDisk {
    /// The files from the top overlay down to the base. Only the first may be written.
    pub layers: Vec<Layer>,
    /// Size of the disk in bytes, a multiple of a sector.
    pub size_bytes: u64,
    /// Whether the guest may not write.
    pub read_only: bool,
    _locks: Vec<Lock>,
}

impl OpenDisk {
    /// The disk that another process has opened by [`open_files`] for the VM `vm`. The files have its locks.
    pub fn received(layers: Vec<Layer>, size_bytes: u64, read_only: bool, vm: &str) -> Self {
        let locks = layers
            .iter()
            .map(|layer| Lock::received(&layer.file, vm))
            .collect();
        Self {
            layers,
            size_bytes,
            read_only,
            _locks: locks,
        }
    }

    /// Adds the temporary overlay that the request needs, if it does.
    ///
    /// # Errors
    /// If the directory takes no file of this process.
    pub fn with_scratch(mut self, request: &DiskRequest) -> Result<Self, DiskError> {
        if request.needs_scratch() {
            let file = scratch::create(&request.scratch_dir, self.size_bytes).map_err(DiskError::io(
                &request.scratch_dir,
                "making a temporary overlay in this directory",
            ))?;
            let format = Format::Scratch;
            self.layers.insert(0, Layer { file, format });
        }
        Ok(self)
    }

    /// Maximum bytes of the written file; none if no file is written.
    pub fn file_bytes_max(&self) -> io::Result<u64> {
        match self.layers.first() {
            Some(_) if self.read_only => Ok(0),
            None => Ok(0),
            // The overlay has the size of the whole disk and its bitmap from the start.
            Some(top) if top.format == Format::Scratch => Ok(top.file.metadata()?.len()),
            Some(top) if top.format == Format::Raw => Ok(self.size_bytes.max(top.file.metadata()?.len())),
            // Data, tables, and leaked clusters.
            Some(top) => Ok(self
                .size_bytes
                .saturating_mul(2)
                .saturating_add(QCOW2_SLACK_BYTES)
                .saturating_add(top.file.metadata()?.len())),
        }
    }
}

/// Opens a disk, creates its overlay if needed, and locks its files.
pub fn open(request: &DiskRequest) -> Result<OpenDisk, DiskError> {
    open_files(request)?.with_scratch(request)
}

/// Opens the files of a disk and locks them, without a temporary overlay.
pub fn open_files(request: &DiskRequest) -> Result<OpenDisk, DiskError> {
    let share = match request.mode {
        Mode::Private => Share::Shared,
        Mode::Exclusive => Share::Exclusive,
    };
    let mut chain = Chain::new(&request.vm_name);
    chain.below.clone_from(&request.below);
    let mut size = chain.add(&request.path, request.format, share, request.is_in_place())?;
    if size < SECTOR_BYTES {
        return Err(DiskError::Empty {
            path: request.path.clone(),
        });
    }
    if request.persistent && !request.read_only && !request.is_in_place() {
        size = chain.add_overlay(request, size)?;
    }
    Ok(OpenDisk {
        layers: chain.layers,
        size_bytes: size,
        read_only: request.read_only,
        _locks: chain.locks,
    })
}

/// Files of a disk in the order of collection, top first.
pub(super) struct Chain<'a> {
    pub layers: Vec<Layer>,
    pub locks: Vec<Lock>,
    vm: &'a str,
    /// Directories below which the files lie; anywhere when absent.
    below: Option<Below>,
}

impl<'a> Chain<'a> {
    /// Creates an empty chain. Locks are taken in the name of `vm`.
    pub fn new(vm: &'a str) -> Self {
        Self {
            layers: Vec::new(),
            locks: Vec::new(),
            vm,
            below: None,
        }
    }

    /// Adds a file and its backing files; returns the size of the disk that it shows, in whole sectors.
    pub fn add(
        &mut self,
        path: &Path,
        said: Option<Format>,
        share: Share,
        writable: bool,
    ) -> Result<u64, DiskError> {
        if self.layers.len() == CHAIN_MAX {
            let why =
                format!("stands on more than {CHAIN_MAX} files; shorten the chain with qemu-img rebase");
            return Err(DiskError::Qcow2 {
                path: path.to_owned(),
                why,
            });
        }
        let (file, lock) = open_locked_below(self.below.as_ref(), path, writable, share, self.vm)?;
        self.locks.push(lock);
        let known = decide(path, &file, said)?;
        let size = match known.format {
            Format::Qcow2 => {
                let header = Header::read(&file, writable).map_err(|why| DiskError::Header {
                    path: path.to_owned(),
                    why,
                })?;
                if writable {
                    make_writable(path, &file, boot::present().as_deref())?;
                }
                let below = below(path, &file, &header, known.trusted)?;
                self.layers.push(Layer {
                    file,
                    format: Format::Qcow2,
                });
                if let Some((backing, format)) = below {
                    self.add(&backing, format, Share::Shared, false)?;
                }
                header.size
            }
            _ => {
                let size = length(&file).map_err(DiskError::io(path, "finding its size"))?;
                if writable {
                    record_raw(&file);
                }
                self.layers.push(Layer {
                    file,
                    format: Format::Raw,
                });
                size
            }
        };
        Ok(size / SECTOR_BYTES * SECTOR_BYTES)
    }

    /// Puts the persistent overlay on top, creating it when absent; returns its size.
    fn add_overlay(&mut self, request: &DiskRequest, size: u64) -> Result<u64, DiskError> {
        let base = &request.path;
        let overlay = request
            .overlay_path
            .as_deref()
            .ok_or_else(|| DiskError::NoOverlayPath { path: base.clone() })?;
        let canonical = base
            .canonicalize()
            .map_err(|source| DiskError::open(base, "read", source))?;
        if !overlay.exists() {
            make_overlay(overlay, size, &canonical, &self.layers[0])
                .map_err(DiskError::io(overlay, "making this overlay"))?;
        }
        let (file, lock) = open_locked(overlay, true, Share::Exclusive, self.vm)?;
        self.locks.push(lock);
        make_writable(overlay, &file, boot::present().as_deref())?;
        let header = Header::read(&file, true).map_err(|why| DiskError::Header {
            path: overlay.to_owned(),
            why,
        })?;
        let recorded = header.backing.unwrap_or_else(|| "no base".to_owned());
        if resolve(overlay, &recorded)?.canonicalize().ok().as_deref() != Some(&canonical) {
            return Err(DiskError::OtherBase {
                path: overlay.to_owned(),
                recorded,
                base: canonical,
            });
        }
        let fingerprint =
            Fingerprint::of(self.layers[0].file.as_fd()).map_err(DiskError::io(base, "looking at it"))?;
        if Fingerprint::recorded(&file).is_some_and(|recorded| recorded != fingerprint) {
            return Err(DiskError::BaseChanged {
                path: overlay.to_owned(),
                base: canonical,
            });
        }
        self.layers.insert(
            0,
            Layer {
                file,
                format: Format::Qcow2,
            },
        );
        Ok(header.size / SECTOR_BYTES * SECTOR_BYTES)
    }
}

/// Creates an overlay atomically.
fn make_overlay(overlay: &Path, size: u64, base: &Path, layer: &Layer) -> std::io::Result<()> {
    let new = hostfiles::AtomicFile::beside(overlay)?;
    Fingerprint::of(layer.file.as_fd())?.record(new.file());
    qcow2::create_overlay(new.file().try_clone()?, size, base, layer.format)?;
    new.replace()
}

/// Makes a qcow2 file, which is locked exclusively, safe to write: clusters of a killed process are counted,
/// and none is used twice. `boot` is the host's current boot id.
pub(super) fn make_writable(path: &Path, file: &File, boot: Option<&str>) -> Result<(), DiskError> {
    repair(file).map_err(DiskError::io(path, "counting what a killed process used"))?;
    if boot::is_recorded(file, boot) {
        return Ok(());
    }
    let failed = DiskError::io(path, "checking it for the first time since the host started");
    match first_fault(file) {
        Ok(None) => {}
        Ok(Some(fault)) => {
            let why = format!(
                "is damaged, as by a crash of the host: {fault}; help: copy what can be read with \
                 `mirrorball disk commit \
                 --to NEW.qcow2`, or repair it with `qemu-img check -r all`"
            );
            return Err(DiskError::Qcow2 {
                path: path.to_owned(),
                why,
            });
        }
        Err(error) => return Err(failed(error)),
    }
    boot::record(file, boot).map_err(DiskError::io(path, "recording that it is written"))
}

/// Returns the backing file of a qcow2 file: its path, and the format recorded for it.
pub(super) fn below(
    path: &Path,
    file: &File,
    header: &Header,
    trusted: bool,
) -> Result<Option<(PathBuf, Option<Format>)>, DiskError> {
    match &header.backing {
        Some(backing) if !trusted => Err(DiskError::UntrustedBacking {
            path: path.to_owned(),
            backing: backing.clone(),
        }),
        Some(backing) => Ok(Some((resolve(path, backing)?, recorded_format(path, file)?))),
        None => Ok(None),
    }
}

/// Opens a file and locks it.
///
/// Compacting a disk replaces its file, and an overlay may be removed. A lock on the file that had the name
/// before would protect nothing, so the name is looked up again once the lock is held.
pub(super) fn open_locked(
    path: &Path,
    writable: bool,
    share: Share,
    vm: &str,
) -> Result<(File, Lock), DiskError> {
    open_locked_below(None, path, writable, share, vm)
}

/// The same for a name that counts only below these directories, if there are any.
fn open_locked_below(
    directories: Option<&Below>,
    path: &Path,
    writable: bool,
    share: Share,
    vm: &str,
) -> Result<(File, Lock), DiskError> {
    for _ in 0..REPLACED_MAX {
        let file = match directories {
            None => open_file(path, writable)?,
            Some(directories) => open_below(directories, path, writable)?,
        };
        let lock = lock::take(path, &file, share, vm)?;
        let identity = |about: std::fs::Metadata| (about.dev(), about.ino());
        let opened = file.metadata().map(identity).ok();
        let named = match directories {
            None => std::fs::metadata(path),
            Some(directories) => directories.find(path).and_then(|found| found.metadata()),
        };
        if opened.is_some() && opened == named.map(identity).ok() {
            return Ok((file, lock));
        }
    }
    let source = std::io::Error::other("it is replaced again and again");
    Err(DiskError::io(path, "opening it")(source))
}

fn open_below(directories: &Below, path: &Path, writable: bool) -> Result<File, DiskError> {
    let (access, text) = match writable {
        true => (Access::ReadWrite, "read and write"),
        false => (Access::Read, "read"),
    };
    let opened = directories.open(path, Kind::Disk, access);
    opened.map_err(|source| match source.raw_os_error() {
        Some(_) => DiskError::open(path, text, source),
        // A refusal has its own words.
        None => DiskError::io(path, "opening it")(source),
    })
}

fn open_file(path: &Path, writable: bool) -> Result<File, DiskError> {
    let access = if writable { "read and write" } else { "read" };
    let metadata = std::fs::metadata(path).map_err(|source| DiskError::open(path, access, source))?;
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let what = if kind.is_dir() {
            "a directory"
        } else {
            "a special file"
        };
        return Err(DiskError::NotAFile {
            path: path.to_owned(),
            what,
        });
    }
    OpenOptions::new()
        .read(true)
        .write(writable)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map_err(|source| DiskError::open(path, access, source))
}

/// Returns the format that a qcow2 file records for its backing file; `None` means detection by that file's
/// bytes.
fn recorded_format(path: &Path, file: &File) -> Result<Option<Format>, DiskError> {
    let recorded = qcow2::backing_format(file).map_err(DiskError::io(path, "reading its header"))?;
    match recorded.as_deref() {
        None => Ok(None),
        Some("raw" | "file" | "host_device") => Ok(Some(Format::Raw)),
        Some("qcow2") => Ok(Some(Format::Qcow2)),
        Some(other) => {
            let why = format!("stands on a file of format {other}; convert it with qemu-img convert");
            Err(DiskError::Qcow2 {
                path: path.to_owned(),
                why,
            })
        }
    }
}

/// Resolves the path of a backing file: relative names start at the directory of the file that names it.
pub(super) fn resolve(path: &Path, backing: &str) -> Result<PathBuf, DiskError> {
    if backing.starts_with("json:") || backing.contains("://") {
        let why = format!("stands on {backing}, which is not a file; rebase it with qemu-img rebase");
        return Err(DiskError::Qcow2 {
            path: path.to_owned(),
            why,
        });
    }
    let backing = backing.strip_prefix("file:").unwrap_or(backing);
    Ok(path.parent().unwrap_or(Path::new("")).join(backing))
}
