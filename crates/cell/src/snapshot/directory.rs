//! The directory of a snapshot, which another user may have made.
//!
//! Files are opened beneath it and through no link, and only if no user but the caller or root can change
//! them: a VM is resumed from them without a copy, so a change would reach its memory while it runs.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use super::{SnapshotError, at};

/// Maximum length of the manifest and of the working set, in bytes.
pub const TEXT_BYTES_MAX: u64 = 32 << 20;

const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// An open directory.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    file: File,
    /// Users whose files it takes, in addition to root's.
    owners: Vec<u32>,
}

impl Directory {
    /// Opens the directory at `path`, which belongs to one of `owners` or to root.
    pub fn open(path: &Path, owners: &[u32]) -> Result<Self, SnapshotError> {
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECTORY)
            .open(path)
            .map_err(at(path))?;
        let about = file.metadata().map_err(at(path))?;
        let directory = Self {
            path: path.to_owned(),
            file,
            owners: owners.to_vec(),
        };
        directory.check_owner(path, &about)?;
        Ok(directory)
    }

    /// Its path, as it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the file `name` for messages, without characters that a terminal would obey.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name.escape_debug().to_string())
    }

    /// Opens the regular file `name` for reading.
    pub fn file(&self, name: &str) -> Result<File, SnapshotError> {
        let path = self.path_of(name);
        if !is_plain_name(name) {
            return Err(SnapshotError::Outside(path));
        }
        let file = beneath(&self.file, Path::new(name)).map_err(|error| match error {
            Errno::ELOOP | Errno::EXDEV => SnapshotError::Outside(path.clone()),
            error => at(&path)(error.into()),
        })?;
        let about = file.metadata().map_err(at(&path))?;
        if !about.is_file() {
            return Err(SnapshotError::Kind(path));
        }
        self.check_owner(&path, &about)?;
        Ok(file)
    }

    /// Reads the file `name`, of [`TEXT_BYTES_MAX`] at most.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, SnapshotError> {
        let path = self.path_of(name);
        let file = self.file(name)?;
        let bytes = file.metadata().map_err(at(&path))?.len();
        let mut text = Vec::new();
        if bytes <= TEXT_BYTES_MAX {
            file.take(TEXT_BYTES_MAX + 1)
                .read_to_end(&mut text)
                .map_err(at(&path))?;
        }
        if bytes > TEXT_BYTES_MAX || text.len() as u64 > TEXT_BYTES_MAX {
            return Err(SnapshotError::TooLong {
                path,
                limit: TEXT_BYTES_MAX,
            });
        }
        Ok(text)
    }

    /// The name of the file at `path` in here, if it is directly in here. A relative path begins here.
    pub fn name_of<'a>(&self, path: &'a Path) -> Option<&'a str> {
        let name = match path.is_absolute() {
            true => path.strip_prefix(&self.path).ok()?,
            false => path,
        };
        name.to_str().filter(|name| is_plain_name(name))
    }

    /// Whether only its owner and root can put another directory in its place. Only then does a path into it
    /// mean the same file when it is opened later.
    pub fn stays_in_place(&self) -> bool {
        self.path.is_absolute()
            && self.path.ancestors().skip(1).all(|above| {
                std::fs::symlink_metadata(above).is_ok_and(|about| {
                    about.is_dir()
                        && self.is_owner(about.uid())
                        && (about.mode() & OTHERS_WRITE == 0 || about.mode() & STICKY != 0)
                })
            })
    }

    fn is_owner(&self, user: u32) -> bool {
        user == 0 || self.owners.contains(&user)
    }

    fn check_owner(&self, path: &Path, about: &Metadata) -> Result<(), SnapshotError> {
        if !self.is_owner(about.uid()) {
            return Err(SnapshotError::Owner {
                path: path.to_owned(),
                user: about.uid(),
            });
        }
        if about.mode() & OTHERS_WRITE != 0 {
            return Err(SnapshotError::Writable(path.to_owned()));
        }
        Ok(())
    }
}

/// Opens `path` for reading beneath `directory`, through no link. A pipe does not block this.
pub fn beneath(directory: &File, path: &Path) -> nix::Result<File> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(directory, path, how).map(File::from)
}

fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) && !name.contains('/')
}

/// The user that this process runs as.
pub fn caller() -> u32 {
    nix::unistd::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// A directory that only this user can change, whatever the umask is.
    fn new() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn write(directory: &tempfile::TempDir, name: &str, text: &[u8]) -> PathBuf {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn open(directory: &tempfile::TempDir) -> Directory {
        Directory::open(directory.path(), &[caller()]).unwrap()
    }

    #[test]
    fn a_file_is_opened_through_no_link_and_not_outside() {
        let (folder, elsewhere) = (new(), new());
        let outside = write(&elsewhere, "outside", b"secret");
        symlink(&outside, folder.path().join("link")).unwrap();
        symlink("inside", folder.path().join("near")).unwrap();
        write(&folder, "inside", b"own");
        let directory = open(&folder);
        assert_eq!(directory.read("inside").unwrap(), b"own");
        for name in ["link", "near", "../x", "..", ".", "", "/etc/passwd", "sub/file"] {
            let error = directory.file(name).unwrap_err();
            assert!(matches!(error, SnapshotError::Outside(_)), "{name:?}: {error}");
        }
        let error = directory.file("\u{1b}[2J\n").unwrap_err().to_string();
        assert!(!error.contains(['\n', '\u{1b}']), "{error:?}");
        let place = outside.parent().unwrap().file_name().unwrap().to_str().unwrap();
        assert!(directory.file(&format!("../{place}/outside")).is_err());
    }

    #[test]
    fn a_pipe_or_a_directory_in_the_place_of_a_file_is_refused_at_once() {
        let folder = new();
        nix::unistd::mkfifo(&folder.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::create_dir(folder.path().join("folder")).unwrap();
        let directory = open(&folder);
        for name in ["pipe", "folder"] {
            let error = directory.file(name).unwrap_err();
            assert!(matches!(error, SnapshotError::Kind(_)), "{name}: {error}");
        }
    }

    #[test]
    fn file_that_other_users_can_change_is_refused() {
        let folder = new();
        let path = write(&folder, "memory", b"x");
        fs::set_permissions(&path, Permissions::from_mode(0o620)).unwrap();
        let error = open(&folder).file("memory").unwrap_err();
        assert!(matches!(error, SnapshotError::Writable(_)), "{error}");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        open(&folder).file("memory").unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        let error = Directory::open(folder.path(), &[caller()]).unwrap_err();
        assert!(matches!(error, SnapshotError::Writable(_)), "{error}");
    }

    #[test]
    fn file_that_another_user_owns_is_refused() {
        let folder = new();
        write(&folder, "memory", b"x");
        let mut directory = open(&folder);
        directory.owners = vec![caller() + 1];
        // For root the files are root's, which are always taken.
        if caller() == 0 {
            nix::unistd::chown(&folder.path().join("memory"), Some(1.into()), None).unwrap();
        }
        directory.owners.retain(|owner| *owner != 1);
        let error = directory.file("memory").unwrap_err();
        assert!(matches!(error, SnapshotError::Owner { .. }), "{error}");
    }

    #[test]
    fn a_text_that_is_too_long_is_refused_before_it_is_read() {
        let folder = new();
        let path = write(&folder, "snapshot.json", b"{");
        File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        let error = open(&folder).read("snapshot.json").unwrap_err();
        assert!(matches!(error, SnapshotError::TooLong { .. }), "{error}");
    }

    #[test]
    fn a_path_names_a_file_in_here_only_when_it_is_directly_in_here() {
        let folder = new();
        let directory = open(&folder);
        let inside = folder.path().join("base.raw");
        assert_eq!(directory.name_of(&inside), Some("base.raw"));
        assert_eq!(directory.name_of(Path::new("base.raw")), Some("base.raw"));
        for path in ["../base.raw", "sub/base.raw", "/etc/shadow", ".."] {
            assert_eq!(directory.name_of(Path::new(path)), None, "{path}");
        }
        assert_eq!(directory.name_of(&folder.path().join("../base.raw")), None);
    }
}
