//! The files that a VM uses: those of its share group, and the directory of its scratch files.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use diskstore::disk::{Layer, OpenDisk};
use diskstore::group_copy::{self, GroupCopy, GroupCopyError};
use diskstore::image::ImageStore;
use shard_api::launch::Fd;

use super::OpenError;

/// The open files of a launch spec, which names them by their position.
pub(super) struct Files(pub(super) Vec<OwnedFd>);

impl Files {
    pub(super) fn add(&mut self, file: impl Into<OwnedFd>) -> Fd {
        self.0.push(file.into());
        Fd(self.0.len() - 1)
    }
}

/// Opens a file for reading.
pub(super) fn readable(what: &'static str, path: &Path) -> Result<File, OpenError> {
    File::open(path).map_err(|source| OpenError::File {
        what,
        path: path.to_owned(),
        help: "name a file that this user may read",
        source,
    })
}

/// The files of a VM's share group, and the locks of their originals.
pub(super) struct GroupFiles<'a> {
    pub(super) group: Option<&'a str>,
    pub(super) vm: &'a str,
    pub(super) copies: Vec<GroupCopy>,
}

impl GroupFiles<'_> {
    /// The file that the VM is to use in place of `path`, which `open` opens for reading: the copy of its
    /// share group; none without a group.
    pub(super) fn copy(
        &mut self,
        what: &'static str,
        path: &Path,
        open: impl FnOnce() -> Result<File, OpenError>,
    ) -> Result<Option<PathBuf>, OpenError> {
        let Some(group) = self.group else {
            return Ok(None);
        };
        let store = ImageStore::open_default()?;
        let copy = group_copy::group_copy(store.data(), group, open()?, path, self.vm);
        let copy = copy.map_err(|error| match error {
            GroupCopyError::Original(error) => OpenError::Disk(error),
            GroupCopyError::Copy(source) => OpenError::File {
                what,
                path: path.to_owned(),
                help: "make room for the share group's own copy, or leave out `share_group`",
                source,
            },
        })?;
        let own = copy.path.clone();
        self.copies.push(copy);
        Ok(Some(own))
    }
}

/// The directory for the writes of non-persistent disks: `$MIRRORBALL_SCRATCH`, else `$TMPDIR`, else
/// `/var/tmp`. Files there have no names, so nothing is left however a process ends.
pub fn scratch_directory() -> PathBuf {
    let named = std::env::var_os("MIRRORBALL_SCRATCH").or_else(|| std::env::var_os("TMPDIR"));
    named.map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

/// The files of an open disk whose pages a VM may map.
pub(super) fn mappable(disk: &OpenDisk, pmem: bool) -> &[Layer] {
    match disk.layers.split_last() {
        // Persistent memory is the base alone.
        Some((_, above)) if pmem => &disk.layers[above.len()..],
        // Only the top layer is ever written.
        _ => disk
            .layers
            .get(usize::from(!disk.read_only)..)
            .unwrap_or_default(),
    }
}
