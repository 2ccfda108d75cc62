//! Atomic files: they appear under their name whole or not at all.
//!
//! The directory is opened once, and all operations are relative to it. Renaming or replacing the directory
//! meanwhile redirects nothing. The file is nameless while it is written, where the file system supports that
//! (`O_TMPFILE`). Elsewhere it has a random name that did not exist before. A name planted by another user is
//! neither followed nor written to.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, RenameFlags, openat, renameat, renameat2};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, geteuid, linkat, unlinkat};

use crate::lock::{Share, at_once};

/// Text between the target's name and a random number in the name of an unfinished file.
const MARK: &str = ".mirrorball-unfinished";
/// Maximum bytes of the target's name within the name of an unfinished file; a name has at most 255 bytes.
const NAME_BYTES_MAX: usize = 200;
/// Maximum number of random names tried.
const ATTEMPTS_MAX: u32 = 16;
/// Age from which a file whose lock is free counts as the remains of a killed process. A younger file may not
/// be locked yet.
const REMAINS_AGE: Duration = Duration::from_secs(60);

/// A private file beside its target until it takes the target's name. Dropping it before removes it.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    folder: OwnedFd,
    /// Present name, if the file has one.
    name: Option<OsString>,
    target: OsString,
}

impl AtomicFile {
    /// Creates a file that will be at `path`, in an existing directory. Symbolic links above the last
    /// component are followed.
    pub fn beside(path: &Path) -> io::Result<Self> {
        let mut new = Self::begin(path, true);
        if let Err(error) = &new
            && has_no_nameless_files(error)
        {
            new = Self::begin(path, false);
        }
        new
    }

    fn begin(path: &Path, nameless: bool) -> io::Result<Self> {
        let Some(target) = path.file_name() else {
            let why = format!("{} does not end in the name of a file", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        };
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        let folder = open_folder(parent.unwrap_or(Path::new(".")))?;
        remove_remains(&folder, target);
        let new = match nameless {
            true => Self {
                file: open_in(&folder, OsStr::new("."), OFlag::O_TMPFILE)?,
                folder,
                name: None,
                target: target.to_owned(),
            },
            false => Self::with_name(folder, target)?,
        };
        new.hold();
        Ok(new)
    }

    fn with_name(folder: OwnedFd, target: &OsStr) -> io::Result<Self> {
        let (file, name) = with_random_name(target, |name| {
            open_in(&folder, name, OFlag::O_CREAT | OFlag::O_EXCL)
        })?;
        Ok(Self {
            file,
            folder,
            name: Some(name),
            target: target.to_owned(),
        })
    }

    /// Holds the file's lock, by which other processes distinguish it from remains. Some file systems have no
    /// locks.
    fn hold(&self) {
        // SAFETY: flock touches no memory.
        unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    }

    /// Returns the file, open for reading and writing. Its mode is 0600.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the user who owns the file's directory.
    pub fn folder_owner(&self) -> io::Result<u32> {
        Ok(fstat(&self.folder)?.st_uid)
    }

    /// Whether the target's name refers to `file` itself, not to a link to it.
    pub fn is_target(&self, file: &File) -> io::Result<bool> {
        let about = file.metadata()?;
        match stat_in(&self.folder, &self.target) {
            Ok(found) => Ok((found.st_dev, found.st_ino) == (about.dev(), about.ino())),
            Err(Errno::ENOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the target's name, replacing a file that has it.
    pub fn replace(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        self.take_name()?;
        self.sync_folder();
        Ok(())
    }

    fn take_name(&mut self) -> io::Result<()> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => {
                let link = |name: &OsStr| self.link(name);
                let ((), name) = with_random_name(&self.target, link)?;
                self.name.insert(name).clone()
            }
        };
        renameat(
            &self.folder,
            name.as_os_str(),
            &self.folder,
            self.target.as_os_str(),
        )?;
        self.name = None;
        Ok(())
    }

    /// Takes the target's name.
    ///
    /// # Errors
    /// `AlreadyExists` when another file has the name.
    pub fn publish_new(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        match &self.name {
            None => self.link(&self.target)?,
            Some(name) => {
                let (folder, from, to) = (&self.folder, name.as_os_str(), self.target.as_os_str());
                match renameat2(folder, from, folder, to, RenameFlags::RENAME_NOREPLACE) {
                    Ok(()) => self.name = None,
                    // On a network file system the file gets a second name, and dropping it removes the
                    // first.
                    Err(Errno::EINVAL | Errno::ENOSYS) => {
                        linkat(folder, from, folder, to, AtFlags::empty())?;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        self.sync_folder();
        Ok(())
    }

    fn link(&self, name: &OsStr) -> io::Result<()> {
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        linkat(
            AT_FDCWD,
            own.as_str(),
            &self.folder,
            name,
            AtFlags::AT_SYMLINK_FOLLOW,
        )?;
        Ok(())
    }

    fn sync_folder(&self) {
        // SAFETY: fsync touches no memory. A file system that can't sync a directory offers no alternative.
        unsafe { libc::fsync(self.folder.as_raw_fd()) };
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // A later attempt removes the file if this one fails.
            let _ = unlinkat(&self.folder, name.as_os_str(), UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// Writes a file with this mode and content to `path`, replacing an older one.
pub fn replace_file(path: &Path, mode: u32, bytes: &[u8]) -> io::Result<()> {
    written(path, mode, bytes)?.replace()
}

/// As [`replace_file`], for files that need not survive a restart of the host, such as those of a runtime
/// directory. Nothing is synced to storage, so a crash of the host may leave the file empty.
pub fn replace_volatile_file(path: &Path, mode: u32, bytes: &[u8]) -> io::Result<()> {
    written(path, mode, bytes)?.take_name()
}

fn written(path: &Path, mode: u32, bytes: &[u8]) -> io::Result<AtomicFile> {
    let new = AtomicFile::beside(path)?;
    new.file().write_all(bytes)?;
    new.file().set_permissions(Permissions::from_mode(mode))?;
    Ok(new)
}

/// Whether an error of opening a nameless file means that the file system or the kernel has none.
fn has_no_nameless_files(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT | libc::EINVAL | libc::ENOSYS)
    )
}

fn open_folder(path: &Path) -> io::Result<OwnedFd> {
    let open = |how| {
        openat(
            AT_FDCWD,
            path,
            how | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )
    };
    let folder = match open(OFlag::O_RDONLY) {
        // A directory in which this user may create files but not list them.
        Err(Errno::EACCES) => open(OFlag::O_PATH),
        folder => folder,
    };
    Ok(folder?)
}

fn open_in(folder: &OwnedFd, name: &OsStr, how: OFlag) -> io::Result<File> {
    let how = how | OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(openat(folder, name, how, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
}

fn stat_in(folder: &OwnedFd, name: &OsStr) -> nix::Result<FileStat> {
    fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// Returns the beginning of the names of unfinished files beside `target`.
fn prefix(target: &OsStr) -> Vec<u8> {
    let target = target.as_bytes();
    let target = &target[..target.len().min(NAME_BYTES_MAX)];
    [b".", target, MARK.as_bytes()].concat()
}

/// Calls `take` with random names until one is free.
fn with_random_name<T>(target: &OsStr, take: impl Fn(&OsStr) -> io::Result<T>) -> io::Result<(T, OsString)> {
    let prefix = prefix(target);
    for _ in 0..ATTEMPTS_MAX {
        let mut name = OsStr::from_bytes(&prefix).to_owned();
        name.push(format!("-{:016x}", fastrand::u64(..)));
        match take(&name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            taken => return taken.map(|taken| (taken, name)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Removes files that killed processes of this user left beside `target`. Best effort: remains only take
/// space.
fn remove_remains(folder: &OwnedFd, target: &OsStr) {
    let prefix = prefix(target);
    let how = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let Ok(mut listed) = Dir::openat(folder, ".", how, Mode::empty()) else {
        return;
    };
    for entry in listed.iter().flatten() {
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name.as_bytes().starts_with(&prefix) && is_remains(folder, name) {
            let _ = unlinkat(folder, name, UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// Whether a name is a file of this user that no process has written for a while.
fn is_remains(folder: &OwnedFd, name: &OsStr) -> bool {
    // Opening a planted pipe must not block this process.
    let how = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let Ok(file) = openat(folder, name, how, Mode::empty()).map(File::from) else {
        return false;
    };
    let Ok(about) = file.metadata() else { return false };
    let age = about
        .modified()
        .ok()
        .and_then(|at| SystemTime::now().duration_since(at).ok());
    about.is_file()
        && about.uid() == geteuid().as_raw()
        && age.is_some_and(|age| age >= REMAINS_AGE)
        && matches!(at_once(file, Share::Exclusive), Ok(Some(_)))
}

#[cfg(test)]
mod tests;
