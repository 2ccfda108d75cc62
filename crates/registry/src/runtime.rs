//! The runtime directory: its content is lost when the machine restarts, and only its user can reach it.
//!
//! All code that finds a running VM or cell starts here: [`crate::vms`], [`crate::cluster::files`], the
//! measurements of `hostinfo::measure`, and the API's socket. A directory that another user owns or can write
//! to is refused, because that user would control its sockets and locks.

use std::fs::{DirBuilder, Metadata, symlink_metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use hostfiles::private;
use nix::unistd::geteuid;

/// Environment variable that names the directory, for tests and for several users under one name.
pub const VARIABLE: &str = "MIRRORBALL_RUNTIME";

/// Bits of a directory into which other users may put files.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Returns the directory: `$MIRRORBALL_RUNTIME`, else `/run/mirrorball` for root, else
/// `$XDG_RUNTIME_DIR/mirrorball`, else `/tmp/mirrorball-UID`. Creates it when missing.
///
/// # Errors
/// If it can't be made, is a link or a file, or another user owns it or may write to it.
pub fn directory() -> io::Result<PathBuf> {
    let uid = geteuid();
    let path = match (std::env::var_os(VARIABLE), std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(path), _) => PathBuf::from(path),
        _ if uid.is_root() => PathBuf::from("/run/mirrorball"),
        (None, Some(parent)) => PathBuf::from(parent).join("mirrorball"),
        (None, None) => PathBuf::from(format!("/tmp/mirrorball-{uid}")),
    };
    at(&path)?;
    Ok(path)
}

/// Creates a missing runtime directory, and checks it.
fn at(path: &Path) -> io::Result<()> {
    // A name that is already a link is not followed: the check below looks at the link.
    if symlink_metadata(path).is_err() {
        DirBuilder::new()
            .recursive(true)
            .mode(private::DIRECTORY_MODE)
            .create(path)?;
    }
    check(path, &symlink_metadata(path)?, geteuid().as_raw())
}

/// Checks that a directory is safe for the sockets and locks of the user `uid`.
fn check(path: &Path, about: &Metadata, uid: u32) -> io::Result<()> {
    let wrong = if about.is_symlink() {
        "is a symbolic link, which can be led elsewhere"
    } else if !about.is_dir() {
        "is not a directory"
    } else if about.uid() != uid {
        "belongs to another user"
    } else if about.mode() & WRITABLE_BY_OTHERS != 0 {
        "can be written by other users"
    } else {
        return Ok(());
    };
    let why = format!(
        "{} {wrong}; help: set {VARIABLE} to a directory that this user alone may write to",
        path.display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_directory_that_another_user_controls_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        at(&path("new/runtime")).unwrap();
        assert_eq!(
            fs::metadata(path("new/runtime")).unwrap().mode() & 0o7777,
            private::DIRECTORY_MODE
        );
        let refused = |name: &str, why: &str| {
            let error = at(&path(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            let text = error.to_string();
            assert!(
                text.contains(why) && text.contains("help: set MIRRORBALL_RUNTIME"),
                "{text}"
            );
        };
        symlink(path("new/runtime"), path("link")).unwrap();
        refused("link", "symbolic link");
        symlink(path("nowhere"), path("dangling")).unwrap();
        refused("dangling", "symbolic link");
        assert!(!path("nowhere").exists());
        fs::write(path("file"), "").unwrap();
        refused("file", "not a directory");
        fs::create_dir(path("open")).unwrap();
        for mode in [0o777, 0o775, 0o1777] {
            fs::set_permissions(path("open"), fs::Permissions::from_mode(mode)).unwrap();
            refused("open", "written by other users");
        }
        let own = fs::symlink_metadata(path("new")).unwrap();
        let error = check(&path("new"), &own, own.uid() + 1).unwrap_err();
        assert!(error.to_string().contains("belongs to another user"), "{error}");
    }
}
