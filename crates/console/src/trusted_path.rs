//! Checks the path of a file that a member names: only the owner may be able to exchange the file.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Mode bits that let other users than the owner write.
const OTHERS_WRITE: u32 = 0o022;

/// A path whose file others may exchange, with the help.
#[derive(Debug, thiserror::Error)]
pub enum UntrustedPath {
    /// The path or a directory of it can't be read.
    #[error("{path}: {error}; name a file that exists")]
    Absent { path: String, error: std::io::Error },
    /// A symbolic link.
    #[error("{0} leads through a symbolic link; name the file itself")]
    Link(String),
    /// A directory that others may change.
    #[error(
        "others may change the directory {0}; members' files must lie where only the API's owner may write"
    )]
    Directory(String),
}

/// Checks that `path` has no symbolic link, and that only root and the user `owner` can change its
/// directories. So the file that is checked is the file that is opened later.
///
/// # Errors
/// One line: cause and help.
pub fn check(path: &Path, owner: u32) -> Result<(), UntrustedPath> {
    let failed = |error| UntrustedPath::Absent {
        path: path.display().to_string(),
        error,
    };
    if path.canonicalize().map_err(failed)? != path {
        return Err(UntrustedPath::Link(path.display().to_string()));
    }
    for directory in path.ancestors().skip(1) {
        let about = directory.metadata().map_err(failed)?;
        if !is_owners(&about, owner) {
            return Err(UntrustedPath::Directory(directory.display().to_string()));
        }
    }
    Ok(())
}

/// Whether only root and the user `owner` can change a directory.
fn is_owners(about: &Metadata, owner: u32) -> bool {
    (about.uid() == 0 || about.uid() == owner) && about.mode() & OTHERS_WRITE == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_file_that_others_can_exchange_is_refused() {
        // The temporary directory does not qualify: every user can write to it.
        let Some(base) = own_directory() else {
            println!("left out: no directory of this user's own");
            return;
        };
        let owner = nix::unistd::geteuid().as_raw();
        let folder = base.path().join("folder");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        let disk = folder.join("disk");
        fs::write(&disk, "").unwrap();
        check(&disk, owner).unwrap();
        if owner != 0 {
            assert!(check(&disk, owner + 1).is_err(), "another user's directory");
        }
        for mode in [0o775, 0o757] {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
            let why = check(&disk, owner).unwrap_err().to_string();
            assert!(why.contains("others may change"), "{mode:o}: {why}");
        }
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        symlink(&disk, folder.join("link")).unwrap();
        let why = check(&folder.join("link"), owner).unwrap_err().to_string();
        assert!(why.contains("symbolic link"), "{why}");
        symlink(&folder, base.path().join("other")).unwrap();
        let why = check(&base.path().join("other/disk"), owner)
            .unwrap_err()
            .to_string();
        assert!(why.contains("symbolic link"), "{why}");
        let why = check(&folder.join("none"), owner).unwrap_err().to_string();
        assert!(why.contains("exists"), "{why}");
    }

    /// Returns a directory whose parents only root and this user can change.
    fn own_directory() -> Option<tempfile::TempDir> {
        let owner = nix::unistd::geteuid().as_raw();
        let home = std::env::var_os("HOME").map(std::path::PathBuf::from);
        let places = home.into_iter().chain(["/run".into(), "/var/lib".into()]);
        places
            .filter_map(|place| place.canonicalize().ok())
            .filter(|place| {
                place
                    .ancestors()
                    .all(|directory| directory.metadata().is_ok_and(|about| is_owners(&about, owner)))
            })
            .find_map(|place| tempfile::tempdir_in(place).ok())
    }
}
