//! Names of files in requests of other users and other hosts.
//!
//! Such a name counts only below directories that the host's administrator has listed. The kernel resolves it
//! beneath the directory (`openat2(2)`, `RESOLVE_BENEATH`), so neither `..` nor a symbolic link leads out of
//! it. The file's type is checked before it is opened: a pipe or a device is never opened by such a name.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, OpenHow, ResolveFlag, fcntl, open, openat2};
use nix::sys::stat::Mode;

/// Number of attempts to resolve a name. Any user of the host can make an attempt fail by a rename.
const RESOLVE_TRIES: u32 = 1000;

/// Directories below which a request may name files.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Below {
    /// The directories: absolute paths.
    pub directories: Vec<PathBuf>,
    /// The setting that lists them, for errors.
    pub setting: String,
}

/// Access mode of an open file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// The file is open for reading (`O_RDONLY`).
    Read,
    /// The file is open for reading and writing (`O_RDWR`).
    ReadWrite,
}

/// Type of a file that a name may have.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A regular file or a block device.
    Disk,
    /// A directory, which is opened with `O_DIRECTORY`.
    Directory,
}

impl Access {
    fn flags(self) -> OFlag {
        match self {
            Self::Read => OFlag::O_RDONLY,
            Self::ReadWrite => OFlag::O_RDWR,
        }
    }
}

impl Kind {
    fn includes(self, kind: std::fs::FileType) -> bool {
        match self {
            Self::File => kind.is_file(),
            Self::Disk => kind.is_file() || kind.is_block_device(),
            Self::Directory => kind.is_dir(),
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::File => "a regular file",
            Self::Disk => "a regular file or a block device",
            Self::Directory => "a directory",
        }
    }
}

impl Below {
    /// Opens the file at `path` below one of the directories. Symbolic links are followed only beneath it.
    ///
    /// # Errors
    /// `PermissionDenied` if the path is below none of the directories or leads out of it; those of
    /// [`check`], and of the kernel.
    pub fn open(&self, path: &Path, kind: Kind, access: Access) -> io::Result<File> {
        let found = self.find(path)?;
        // The open file is checked, not the name again.
        check_kind(&found, kind)?;
        let again = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
        let file = File::from(open(
            &again,
            access.flags() | OFlag::O_CLOEXEC | OFlag::O_NOCTTY,
            Mode::empty(),
        )?);
        check(&file, kind, access)?;
        Ok(file)
    }

    /// Finds the file at `path` below one of the directories. The descriptor only refers to the file
    /// (`O_PATH`).
    ///
    /// # Errors
    /// As [`Self::open`], except for the file's type.
    pub fn find(&self, path: &Path) -> io::Result<File> {
        if !is_plain(path) {
            return Err(refused("write an absolute path without `..`".to_owned()));
        }
        let is_above = |directory: &&PathBuf| path != directory.as_path() && path.starts_with(directory);
        let mut above = self.directories.iter().filter(is_above).peekable();
        if above.peek().is_none() {
            return Err(refused(self.help()));
        }
        let mut last = None;
        for directory in above {
            match beneath(directory, path) {
                Ok(found) => return Ok(found.into()),
                Err(Errno::EXDEV | Errno::ELOOP) => {
                    last = Some(refused(format!(
                        "it leads out of {} by a symbolic link; name the file itself",
                        directory.display()
                    )));
                }
                Err(Errno::ENOSYS) => {
                    let why = "this kernel can't keep a name beneath a directory; Linux 5.6 can";
                    last = Some(io::Error::new(io::ErrorKind::Unsupported, why));
                }
                Err(error) => last = Some(error.into()),
            }
        }
        Err(last.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
    }

    /// Finds the directory in which `path` is, below one of the directories or one of them itself, for a new
    /// file. The path that is returned names the same directory, whatever happens to names; it is valid in
    /// this process as long as the descriptor.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn new_file(&self, path: &Path) -> io::Result<(File, PathBuf)> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(refused(self.help()));
        };
        let folder = match self.directories.iter().find(|directory| *directory == folder) {
            Some(directory) => File::from(open(
                directory,
                OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
                Mode::empty(),
            )?),
            None => self.find(folder)?,
        };
        check_kind(&folder, Kind::Directory)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
        Ok((folder, path))
    }

    /// One line about the allowed paths.
    fn help(&self) -> String {
        let listed: Vec<_> = self
            .directories
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        match &listed[..] {
            [] => format!(
                "no file may be named by its path here: {} lists no directory",
                self.setting
            ),
            listed => format!(
                "name a file below {}: {} lists these",
                listed.join(" or "),
                self.setting
            ),
        }
    }
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

fn beneath(directory: &Path, path: &Path) -> nix::Result<OwnedFd> {
    let top = open(
        directory,
        OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?;
    let rest = path.strip_prefix(directory).map_err(|_| Errno::EXDEV)?;
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    for _ in 0..RESOLVE_TRIES {
        // `EAGAIN`: a rename elsewhere kept the kernel from deciding.
        match openat2(&top, rest, how) {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            found => return found,
        }
    }
    Err(Errno::EAGAIN)
}

/// Whether a path is absolute and has no `..`.
pub fn is_plain(path: &Path) -> bool {
    let is_step = |step: Component<'_>| matches!(step, Component::RootDir | Component::Normal(_));
    path.is_absolute() && path.components().all(is_step)
}

fn check_kind(file: &File, kind: Kind) -> io::Result<()> {
    if kind.includes(file.metadata()?.file_type()) {
        return Ok(());
    }
    let why = format!("it is not {}", kind.text());
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// Checks the type and the access mode of an open file that another process has passed.
///
/// # Errors
/// `InvalidInput` if the file has another type, or is open in another mode: also for appending, or only as a
/// reference (`O_PATH`).
pub fn check(file: &File, kind: Kind, access: Access) -> io::Result<()> {
    check_kind(file, kind)?;
    let flags = OFlag::from_bits_retain(fcntl(file.as_fd(), FcntlArg::F_GETFL)?);
    let unwanted = OFlag::O_PATH | OFlag::O_APPEND | OFlag::O_NONBLOCK | OFlag::O_DIRECT;
    if flags & OFlag::O_ACCMODE == access.flags() && !flags.intersects(unwanted) {
        return Ok(());
    }
    let why = "it is not open in the mode in which it was requested";
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::os::unix::fs::{OpenOptionsExt, symlink};

    use super::*;

    struct Place {
        _folder: tempfile::TempDir,
        allowed: PathBuf,
        outside: PathBuf,
        below: Below,
    }

    /// A directory that is allowed, and a file beside it.
    fn place() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let (allowed, outside) = (folder.path().join("allowed"), folder.path().join("secret"));
        fs::create_dir_all(allowed.join("sub")).unwrap();
        fs::write(allowed.join("sub/disk"), "disk").unwrap();
        fs::write(&outside, "secret").unwrap();
        let below = Below {
            directories: vec![allowed.clone()],
            setting: "`paths` of the test".to_owned(),
        };
        Place {
            _folder: folder,
            allowed,
            outside,
            below,
        }
    }

    fn why(place: &Place, path: &Path) -> String {
        let opened = place.below.open(path, Kind::Disk, Access::Read);
        opened.unwrap_err().to_string()
    }

    #[test]
    fn name_leads_out_of_an_allowed_directory_neither_by_its_steps_nor_by_a_link() {
        let place = place();
        let at = |name: &str| place.allowed.join(name);
        let open = |name: &str| place.below.open(&at(name), Kind::Disk, Access::ReadWrite);
        assert!(open("sub/disk").is_ok());
        symlink("sub/disk", at("inside")).unwrap();
        assert!(open("inside").is_ok(), "a link beneath the directory");
        symlink(&place.outside, at("absolute")).unwrap();
        symlink("../secret", at("relative")).unwrap();
        symlink("..", at("up")).unwrap();
        symlink("/proc/self/root", at("magic")).unwrap();
        for name in ["absolute", "relative", "up/secret", "magic/etc/passwd"] {
            let text = why(&place, &at(name));
            assert!(
                text.contains("leads out of") && text.contains("symbolic link"),
                "{name}: {text}"
            );
        }
        for path in [at("sub/../../secret"), PathBuf::from("sub/disk")] {
            assert!(why(&place, &path).contains("an absolute path without `..`"));
        }
        for path in [&place.outside, Path::new("/etc/passwd"), &place.allowed] {
            let text = why(&place, path);
            assert!(
                text.contains("name a file below") && text.contains("`paths` of the test"),
                "{text}"
            );
        }
        let nothing = Below {
            directories: Vec::new(),
            setting: "`paths` of the test".to_owned(),
        };
        let text = nothing.find(&at("sub/disk")).unwrap_err().to_string();
        assert!(text.contains("`paths` of the test lists no directory"), "{text}");
    }

    #[test]
    fn pipe_or_device_or_directory_is_not_opened_as_a_file() {
        let place = place();
        let pipe = place.allowed.join("pipe");
        nix::unistd::mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        // Opening it would wait for a writer.
        assert!(why(&place, &pipe).contains("not a regular file"));
        let directory = place.allowed.join("sub");
        assert!(why(&place, &directory).contains("not a regular file"));
        let devices = Below {
            directories: vec![PathBuf::from("/dev")],
            setting: String::new(),
        };
        let null = devices.open(Path::new("/dev/null"), Kind::Disk, Access::Read);
        assert!(null.unwrap_err().to_string().contains("not a regular file"));
    }

    #[test]
    fn descriptor_of_another_type_or_mode_is_refused() {
        let place = place();
        let path = place.allowed.join("sub/disk");
        let open = |options: &mut OpenOptions| options.open(&path).unwrap();
        let read = open(OpenOptions::new().read(true));
        let both = open(OpenOptions::new().read(true).write(true));
        check(&read, Kind::File, Access::Read).unwrap();
        check(&both, Kind::Disk, Access::ReadWrite).unwrap();
        let path_only = open(OpenOptions::new().read(true).custom_flags(libc::O_PATH));
        let appends = open(OpenOptions::new().read(true).append(true));
        let waits_not = open(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK));
        for (file, access) in [
            (&read, Access::ReadWrite),
            (&both, Access::Read),
            (&path_only, Access::Read),
            (&appends, Access::ReadWrite),
            (&waits_not, Access::Read),
        ] {
            let error = check(file, Kind::File, access).unwrap_err();
            assert!(error.to_string().contains("not open in the mode"), "{error}");
        }
        let folder = File::open(&place.allowed).unwrap();
        assert!(check(&folder, Kind::File, Access::Read).is_err());
    }

    #[test]
    fn new_file_is_made_in_the_directory_that_was_found() {
        let place = place();
        let (_folder, path) = place.below.new_file(&place.allowed.join("sub/new")).unwrap();
        // Another directory under the name changes nothing.
        fs::rename(place.allowed.join("sub"), place.allowed.join("moved")).unwrap();
        symlink("/", place.allowed.join("sub")).unwrap();
        fs::write(path, "new").unwrap();
        assert!(place.allowed.join("moved/new").exists());
        assert!(place.below.new_file(&place.allowed.join("sub/etc/new")).is_err());
        assert!(place.below.new_file(&place.allowed.join("new")).is_ok());
        assert!(place.below.new_file(Path::new("/etc/new")).is_err());
    }
}
