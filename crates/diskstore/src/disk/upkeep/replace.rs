//! New files that appear under their name whole or not at all.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::disk::stamp::Stamp;

/// A file under another name until it is complete. Dropped before, it is removed; what a kill leaves of it is
/// overwritten by the next attempt.
pub(super) struct Unfinished {
    pub file: File,
    unfinished: PathBuf,
    path: PathBuf,
    done: bool,
}

impl Unfinished {
    /// Begins a file that is to be at `path`.
    pub fn begin(path: &Path) -> io::Result<Self> {
        // Not beside a link but where the file itself is.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(".mirrorball-unfinished");
        let unfinished = path.with_file_name(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&unfinished)?;
        Ok(Self {
            file,
            unfinished,
            path,
            done: false,
        })
    }

    /// Puts the complete file in the place of `old`, with the same owner and rights.
    pub fn replace(mut self, old: &File) -> io::Result<()> {
        let about = old.metadata()?;
        // Only root can give files away; who may write the old file owns the new one otherwise.
        let _ = std::os::unix::fs::fchown(&self.file, Some(about.uid()), Some(about.gid()));
        // An overlay stands on the base it stood on.
        if let Some(stamp) = Stamp::recorded(old) {
            stamp.record(&self.file);
        }
        self.file
            .set_permissions(PermissionsExt::from_mode(about.mode() & 0o7777))?;
        self.publish()
    }

    /// Gives the complete file its name, which must be free.
    pub fn publish_new(mut self) -> io::Result<()> {
        if self.path.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.publish()
    }

    fn publish(&mut self) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.unfinished, &self.path)?;
        self.done = true;
        let folder = match self.path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let folder = File::open(folder)?;
        // SAFETY: fsync touches no memory. A file system that cannot sync a directory has done what it can.
        unsafe { libc::fsync(folder.as_raw_fd()) };
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.done {
            let _ = std::fs::remove_file(&self.unfinished);
        }
    }
}
