//! Images, from which VMs boot.
//!
//! An image is a folder of the store: a kernel, usually an initramfs, usually a root disk, and `image.json`,
//! which describes them and holds their checksums. A folder appears atomically, by a rename, and is never
//! written again. A user of an image holds a shared lock on it; its removal takes an exclusive one.

mod apt;
mod command;
mod debian;
mod digest;
mod import;
mod initrd;
mod modules;
mod payload;
mod record;
mod sources;
mod store;
mod tiny;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use hostfiles::lock::Flock;

pub use debian::{DEBIAN_CMDLINE, DebianRequest, build_debian};
pub use import::{FileKind, ImportRequest, import};
#[cfg(fuzzing)]
pub use payload::extract;
pub use record::{FileRecord, Record};
pub use sources::{Mirror, MirrorError, Sources};
pub use store::{ImageStore, data_directory};
pub use tiny::{TINY_CMDLINE, TinyRequest, agent_version, build_tiny};

use crate::disk::Format;

/// Debian release of built images.
pub const SUITE: &str = "bookworm";

/// An image that can't be removed while this lives.
#[derive(Debug)]
pub struct Image {
    /// Name in the image store.
    pub name: String,
    /// bzImage or ELF; `None` for an imported disk without a kernel.
    pub kernel: Option<PathBuf>,
    /// File of the initramfs, if there is one.
    pub initrd: Option<PathBuf>,
    /// Root disk and its format.
    pub disk: Option<(PathBuf, Format)>,
    /// Required kernel command line of the guest, as `root=/dev/vda rw`.
    pub cmdline: String,
    /// Content of `image.json`.
    pub record: Record,
    /// Holds the shared lock.
    lock: Flock<File>,
}

impl Image {
    /// Open file whose lock keeps the image in the store, as long as a copy of this descriptor is open.
    pub fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }
}

/// Debian's kernel packages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelFlavour {
    /// `linux-image-cloud-amd64`: small, for virtual machines.
    #[default]
    Cloud,
    /// `linux-image-amd64`: everything.
    Generic,
}

impl KernelFlavour {
    fn package(self) -> &'static str {
        match self {
            Self::Cloud => "linux-image-cloud-amd64",
            Self::Generic => "linux-image-amd64",
        }
    }
}

/// Progress of a build.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Number of the step, from 1.
    pub step: usize,
    /// Number of steps.
    pub steps: usize,
    /// Description of the step.
    pub what: String,
}

/// Error of using, building or removing an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// No image has this name.
    #[error("there is no image {name}; {there_are}; `mirrorball image build debian-12` makes one")]
    Missing {
        /// Requested name.
        name: String,
        /// `there are none`, or `there are: a, b`.
        there_are: String,
    },
    /// A name that is invalid for an image.
    #[error(
        "{0:?} can't be an image's name: letters, digits, `-`, `_` and `.`, 63 at most, not starting with \
         `.` or `-`"
    )]
    Name(String),
    /// An image of this name exists.
    #[error("there is an image {0} already; `mirrorball image rm {0}` removes it")]
    Exists(String),
    /// A VM uses it.
    #[error("image {0} is in use by a running VM")]
    InUse(String),
    /// Its record is invalid.
    #[error("image {name} is damaged: {reason}; `mirrorball image rm {name}` and build it again")]
    Damaged {
        /// Name of the image.
        name: String,
        /// Cause of the failure.
        reason: String,
    },
    /// A program that the build needs is not installed.
    #[error("{program} is needed and not installed: apt-get install {package}")]
    ProgramMissing {
        /// Name of the program.
        program: String,
        /// Debian package of the program.
        package: &'static str,
    },
    /// A program of the build failed.
    #[error("{program} failed ({status}):\n{output}")]
    ProgramFailed {
        /// Name of the program.
        program: String,
        /// How it ended.
        status: String,
        /// End of its output.
        output: String,
    },
    /// A file is invalid.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        reason: String,
    },
    /// A file can't be read or written.
    #[error("can't {what} {path}")]
    Io {
        /// Operation that failed: `read`, `write`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
    /// This machine's apt is configured for no archive of Debian.
    #[error(
        "no archive of Debian {suite} in {etc_apt}/sources.list and {etc_apt}/sources.list.d: {there}; \
         help: name one \
         with --mirror, as in --mirror http://mirror.example/debian"
    )]
    NoArchive {
        /// Folder of apt's configuration.
        etc_apt: PathBuf,
        /// The release.
        suite: String,
        /// Configured entries, for the text of the error.
        there: String,
    },
    /// An entry of apt's configuration can't be read.
    #[error("{place}: {reason}; help: correct it, or name an archive with --mirror")]
    Sources {
        /// File, and perhaps the line.
        place: String,
        /// Cause of the failure.
        reason: String,
    },
    /// Package lists could not be fetched.
    #[error("no package lists from what {origin} names: {reason}; help: name another archive with --mirror")]
    Lists {
        /// Source of the archive's name: a folder of apt's, or the flag.
        origin: String,
        /// Error from apt.
        reason: String,
    },
    /// The machine lacks a requirement of the build.
    #[error("{0}")]
    Unable(String),
}

/// Adds operation and path to an I/O error.
fn failed(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> ImageError {
    let path = path.into();
    move |source| ImageError::Io { what, path, source }
}
