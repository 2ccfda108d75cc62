//! Opens the files that a VM's spec names: by this process's rights, or by those of the VM's owner in a
//! process of its own ([`crate::opener`]). Files of the image store are not named by a spec.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use diskstore::disk::{DiskRequest, OpenDisk};
use hostfiles::names::{Access, Below, Kind};
use registry::monitor::NameRules;

use super::OpenError;
use super::files::readable;
use crate::opener::Opener;

/// Where named files lie, and who opens them.
#[derive(Debug)]
pub(super) enum Names {
    /// This process, below these directories, or anywhere.
    Own(Option<Below>),
    /// A process with the rights of the VM's owner.
    Owner(Opener),
}

impl Names {
    /// Whether a process with the rights of the VM's owner opens the files.
    pub fn are_opened_for_owner(&self) -> bool {
        matches!(self, Self::Owner(_))
    }

    /// Starts the process of the rules' owner, if they have one.
    pub fn of(rules: Option<&NameRules>) -> Result<Self, OpenError> {
        let Some(rules) = rules else {
            return Ok(Self::Own(None));
        };
        match &rules.owner {
            None => Ok(Self::Own(Some(rules.below()))),
            Some(owner) => Ok(Self::Owner(Opener::start(owner, rules.below())?)),
        }
    }

    /// Opens a regular file for reading; `what` is its use in the VM.
    pub fn file(&mut self, what: &'static str, path: &Path) -> Result<File, OpenError> {
        match self {
            Self::Own(None) => readable(what, path),
            Self::Own(Some(below)) => {
                let opened = below.open(path, Kind::File, Access::Read);
                opened.map_err(|source| OpenError::File {
                    what,
                    path: path.to_owned(),
                    help: "name a file that this user may read",
                    source,
                })
            }
            Self::Owner(opener) => Ok(opener.file(what, path)?),
        }
    }

    /// Opens a directory that the VM's guest mounts.
    pub fn folder(&mut self, path: &Path) -> Result<File, OpenError> {
        let opened = match self {
            Self::Own(None) => OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_DIRECTORY)
                .open(path),
            Self::Own(Some(below)) => below.open(path, Kind::Directory, Access::Read),
            Self::Owner(_) => Err(io::Error::other("another user's VM has no shared folders")),
        };
        opened.map_err(|source| OpenError::File {
            what: "folder",
            path: path.to_owned(),
            help: "name a directory that this user may read",
            source,
        })
    }

    /// Opens a disk. A process with the owner's rights makes room for all of it if `allocate`: this process's
    /// rights reach beyond the owner's quota. A temporary overlay is always this process's own.
    pub fn disk(&mut self, request: &DiskRequest, allocate: bool) -> Result<OpenDisk, OpenError> {
        match self {
            Self::Own(below) => {
                let request = DiskRequest {
                    below: below.clone(),
                    ..request.clone()
                };
                Ok(diskstore::disk::open(&request)?)
            }
            Self::Owner(opener) => Ok(opener.disk(request, allocate)?.with_scratch(request)?),
        }
    }
}
