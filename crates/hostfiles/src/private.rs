//! Files and directories that only their user opens.
//!
//! `flock` needs no more than an open file. A lock's file that another user can read is a lock that this user can hold.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Mode of a private file.
pub const FILE_MODE: u32 = 0o600;
/// Mode of a private directory.
pub const DIRECTORY_MODE: u32 = 0o700;

/// Opens the file of a lock. A missing one is made; one that others may open is closed to them.
pub fn lock_file(path: &Path) -> io::Result<File> {
    opened(path, private().write(true).truncate(false))
}

/// Opens a file to append to. A missing one is made; one that others may open is closed to them.
pub fn log(path: &Path) -> io::Result<File> {
    opened(path, private().append(true))
}

/// Makes a file that must not exist, to read and to write.
pub fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(path)
}

/// Makes a directory, and those above it that are missing. One that exists stays as it is.
pub fn directories(path: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .create(true)
        .mode(FILE_MODE)
        .custom_flags(libc::O_NOFOLLOW);
    options
}

fn opened(path: &Path, options: &OpenOptions) -> io::Result<File> {
    let file = options.open(path)?;
    let about = file.metadata()?;
    if about.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(FILE_MODE))?;
    }
    Ok(file)
}

/// Bits that a new file of this process does not get. A process without `/proc` gives others nothing.
pub fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    umask_in(&status).unwrap_or(0o077)
}

fn umask_in(status: &str) -> Option<u32> {
    let value = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(value.trim(), 8).ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn locks_and_logs_are_closed_to_other_users() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        lock_file(&path("lock")).unwrap();
        log(&path("log")).unwrap();
        new_file(&path("new")).unwrap();
        directories(&path("one/two")).unwrap();
        let modes = ["lock", "log", "new", "one", "one/two"].map(|name| mode(&path(name)));
        assert_eq!(modes, [0o600, 0o600, 0o600, 0o700, 0o700]);
    }

    #[test]
    fn a_lock_that_was_open_to_others_is_closed_to_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        fs::write(&path, "kept").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        lock_file(&path).unwrap();
        assert_eq!((mode(&path), fs::read(&path).unwrap()), (0o600, b"kept".to_vec()));
    }

    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        for made in [lock_file(&link), log(&link), new_file(&link)] {
            assert!(made.is_err());
        }
        assert!(!target.exists());
    }

    #[test]
    fn the_umask_is_read_from_the_status_of_the_process() {
        assert_eq!(umask_in("Name:\tx\nUmask:\t0027\nState:\tR"), Some(0o027));
        assert_eq!(umask_in("Name:\tx"), None);
        assert!(umask_in(&fs::read_to_string("/proc/self/status").unwrap()).is_some());
    }

    #[test]
    fn the_umask_is_that_of_this_process() {
        let shell = std::process::Command::new("sh").args(["-c", "umask"]).output();
        let inherited = String::from_utf8(shell.unwrap().stdout).unwrap();
        assert_eq!(umask(), u32::from_str_radix(inherited.trim(), 8).unwrap());
    }

    #[test]
    fn a_log_is_appended_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        for line in ["one", "two"] {
            log(&path).unwrap().write_all(line.as_bytes()).unwrap();
        }
        assert_eq!(fs::read(&path).unwrap(), b"onetwo");
        assert_eq!(new_file(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
