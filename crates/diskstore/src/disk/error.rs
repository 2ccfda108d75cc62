//! Errors of opening a disk: one line with the path and the help.

use std::io;
use std::path::PathBuf;

use super::header::HeaderError;

/// Reason why a disk could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The file does not exist.
    #[error("disk {path}: no such file; check the path")]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The user may not open the file.
    #[error("disk {path}: not allowed to {access} it; {help}", help = access_help(access))]
    Denied {
        /// The file.
        path: PathBuf,
        /// `read`, or `read and write`.
        access: &'static str,
    },
    /// The file is neither a regular file nor a block device.
    #[error("disk {path}: is {what}, not a file or a block device; name the disk's file")]
    NotAFile {
        /// The file.
        path: PathBuf,
        /// Kind of the file.
        what: &'static str,
    },
    /// An I/O error.
    #[error("disk {path}: {doing} failed: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Operation that failed.
        doing: &'static str,
        /// Cause of the failure.
        #[source]
        source: io::Error,
    },
    /// Another VM holds the file.
    #[error("disk {path} is in use{how} by {holder}; {help}")]
    InUse {
        /// The file.
        path: PathBuf,
        /// ` exclusively`, or nothing.
        how: &'static str,
        /// The VM and its process, as far as known.
        holder: String,
        /// Help for the user.
        help: &'static str,
    },
    /// The file has a format that can't be a disk.
    #[error("disk {path}: is a {found} image; convert it: qemu-img convert -O qcow2 {path} NEW.qcow2")]
    ForeignFormat {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: &'static str,
    },
    /// A qcow2 file is unusable.
    #[error("disk {path}: {why}")]
    Qcow2 {
        /// The file.
        path: PathBuf,
        /// Cause and help.
        why: String,
    },
    /// A qcow2 file's header is unusable.
    #[error("disk {path}: {why}")]
    Header {
        /// The file.
        path: PathBuf,
        /// Cause and help.
        why: HeaderError,
    },
    /// The operation is not possible with this disk.
    #[error("disk {path}: {why}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Cause and help.
        why: String,
    },
    /// A file detected as qcow2 refers to other files, and the user did not state that it is qcow2.
    #[error(
        "disk {path}: looks like qcow2 and refers to {backing}; if that is meant, say so with format = \
         \"qcow2\""
    )]
    UntrustedBacking {
        /// The file.
        path: PathBuf,
        /// File that it refers to.
        backing: String,
    },
    /// The overlay belongs to another base.
    #[error("overlay {path}: was made for {recorded}, not for {base}; remove it or use its own base")]
    OtherBase {
        /// The overlay.
        path: PathBuf,
        /// Base recorded in the overlay.
        recorded: String,
        /// Requested base.
        base: PathBuf,
    },
    /// The overlay's base has changed since the overlay was made.
    #[error(
        "overlay {path}: its base {base} was written since, so that the two are no longer one disk; put \
         the base back as it \
         was, or, if its content is, remove the overlay's mark: setfattr -x user.mirrorball.base {path}"
    )]
    BaseChanged {
        /// The overlay.
        path: PathBuf,
        /// File under the overlay.
        base: PathBuf,
    },
    /// A persistent private disk has no path for its overlay.
    #[error("disk {path}: a persistent private disk needs a path for its overlay; give one")]
    NoOverlayPath {
        /// The base.
        path: PathBuf,
    },
    /// The file is too small to be a disk.
    #[error("disk {path}: holds less than one sector (512 bytes); make it larger: truncate -s 1G {path}")]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

fn access_help(access: &str) -> &'static str {
    if access == "read" {
        "make it readable for this user (chmod, chgrp), or run as one who may"
    } else {
        "make it writable for this user, or use it privately"
    }
}

impl DiskError {
    /// Creates an error of opening `path`.
    pub(super) fn open(path: &std::path::Path, access: &'static str, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { path },
            io::ErrorKind::PermissionDenied => Self::Denied { path, access },
            _ => Self::Io {
                path,
                doing: "opening it",
                source,
            },
        }
    }

    /// Creates an error of an operation on `path`.
    pub(super) fn io(path: &std::path::Path, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, doing, source }
    }
}
