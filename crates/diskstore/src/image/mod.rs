//! Images: what VMs boot from.
//!
//! An image is a folder of the store: a kernel, usually an initramfs, usually a root disk, and `image.json`, which
//! says what they are and holds their checksums. A folder appears whole, by a rename, and is never written again;
//! who opens an image holds a shared lock on it, and who removes it an exclusive one.

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

use hostfiles::lock::{self, Flock};

pub use debian::{DEBIAN_CMDLINE, DebianRequest, build_debian};
pub use import::{FileKind, ImportRequest, import};
#[cfg(fuzzing)]
pub use payload::extract;
pub use record::{FileRecord, Record};
pub use sources::{Mirror, Sources};
pub use store::{ImageStore, data_directory};
pub use tiny::{TINY_CMDLINE, TinyRequest, agent_version, build_tiny};

use crate::disk::Format;

/// The release of Debian that images are built of.
pub const SUITE: &str = "bookworm";

/// An image, kept from removal while this lives.
#[derive(Debug)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// bzImage or ELF; `None` for an imported disk without a kernel.
    pub kernel: Option<PathBuf>,
    /// Initramfs.
    pub initrd: Option<PathBuf>,
    /// Root disk and its format.
    pub disk: Option<(PathBuf, Format)>,
    /// What the guest's command line must hold, as `root=/dev/vda rw`.
    pub cmdline: String,
    /// What `image.json` says.
    pub record: Record,
    /// Holds the shared lock.
    lock: Flock<File>,
}

impl Image {
    /// The open file whose lock keeps the image in the store, as long as a copy of this descriptor is open.
    pub fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Lets go of the image, which is another process's that has a copy of its lock.
    pub fn hand_over(self) {
        lock::hand_over(self.lock);
    }
}

/// Debian's two kernels.
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

/// How far a build is.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Step, from 1.
    pub step: usize,
    /// Steps in all.
    pub steps: usize,
    /// What is being done.
    pub what: String,
}

/// Why an image can't be had, made or removed.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// There is none of this name.
    #[error("there is no image {name}; {there_are}; `mirrorball image build debian-12` makes one")]
    Missing {
        /// The name asked for.
        name: String,
        /// `there are none`, or `there are: a, b`.
        there_are: String,
    },
    /// A name that can't be an image's.
    #[error(
        "{0:?} can't be an image's name: letters, digits, `-`, `_` and `.`, 63 at most, not starting with `.` or `-`"
    )]
    Name(String),
    /// There is one of this name already.
    #[error("there is an image {0} already; `mirrorball image rm {0}` removes it")]
    Exists(String),
    /// A VM uses it.
    #[error("image {0} is in use by a running VM")]
    InUse(String),
    /// Its record can't be understood.
    #[error("image {name} is damaged: {reason}; `mirrorball image rm {name}` and build it again")]
    Damaged {
        /// The image.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A program that building needs is not installed.
    #[error("{program} is needed and not installed: apt-get install {package}")]
    ProgramMissing {
        /// The program.
        program: String,
        /// The Debian package it is in.
        package: &'static str,
    },
    /// A program that building runs failed.
    #[error("{program} failed ({status}):\n{output}")]
    ProgramFailed {
        /// The program.
        program: String,
        /// How it ended.
        status: String,
        /// The end of its output.
        output: String,
    },
    /// A file is not what it should be.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file can't be read or written.
    #[error("can't {what} {path}")]
    Io {
        /// What was tried: `read`, `write`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// This machine's apt is configured for no archive of Debian.
    #[error(
        "no archive of Debian {suite} in {etc_apt}/sources.list and {etc_apt}/sources.list.d: {there}; help: name one \
         with --mirror, as in --mirror http://mirror.example/debian"
    )]
    NoArchive {
        /// The folder of apt's configuration.
        etc_apt: PathBuf,
        /// The release.
        suite: String,
        /// The entries that are configured, for the text of the error.
        there: String,
    },
    /// An entry of apt's configuration can't be read.
    #[error("{place}: {reason}; help: correct it, or name an archive with --mirror")]
    Sources {
        /// The file, and perhaps the line.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// Package lists could not be fetched.
    #[error("no package lists from what {origin} names: {reason}; help: name another archive with --mirror")]
    Lists {
        /// What named the archive: a folder of apt's, or the flag.
        origin: String,
        /// apt's complaint.
        reason: String,
    },
    /// The machine lacks something a build needs.
    #[error("{0}")]
    Unable(String),
}

/// Adds to an I/O error what was tried on which file.
fn failed(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> ImageError {
    let path = path.into();
    move |source| ImageError::Io { what, path, source }
}
