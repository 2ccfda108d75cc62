//! The folder of images.
//!
//! ```text
//! <data>/images/<name>/image.json, vmlinux, initrd, root.raw, lock
//! <data>/images/.building-<pid>-<name>/   a build, locked by its builder; the next one removes a dead one
//! <data>/cache/apt/                       package lists and kernel packages
//! ```

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hostfiles::lock::{self, Flock, Share};
use hostfiles::private;

use super::record::{FileRecord, Record, VERSION};
use super::{Image, ImageError, digest, failed};

const BUILDING: &str = ".building-";
/// Mode of an image's files: written once, read by their user.
const FILE_MODE: u32 = 0o400;
/// Mode of the folder of images. An unprivileged user builds in a user namespace, whose users pass through.
/// Other users can't list it, and each image's own folder is closed.
const PASSABLE: u32 = 0o711;

/// The images of one data directory.
#[derive(Clone, Debug)]
pub struct ImageStore {
    data: PathBuf,
}

/// A build in progress: its folder is removed unless it is published.
pub(super) struct Building {
    pub folder: PathBuf,
    name: String,
    store: ImageStore,
    published: bool,
    /// Held until the end: distinguishes a build from the remains of one.
    _lock: Flock<File>,
}

/// Returns the user's data directory: `$MIRRORBALL_DATA`, `$XDG_DATA_HOME/mirrorball` or
/// `~/.local/share/mirrorball`; none if no variable is set.
pub fn data_directory() -> Option<PathBuf> {
    let from = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    from("MIRRORBALL_DATA")
        .or_else(|| from("XDG_DATA_HOME").map(|data| data.join("mirrorball")))
        .or_else(|| from("HOME").map(|home| home.join(".local/share/mirrorball")))
}

impl ImageStore {
    /// Opens the user's store, in [`data_directory`].
    pub fn open_default() -> Result<Self, ImageError> {
        let data = data_directory()
            .ok_or_else(|| ImageError::Unable("no data directory: set MIRRORBALL_DATA or HOME".into()))?;
        Self::open(&data)
    }

    /// Opens the store in the data directory `data`, and creates it when absent.
    pub fn open(data: &Path) -> Result<Self, ImageError> {
        let data = std::path::absolute(data).map_err(failed("find", data))?;
        let images = data.join("images");
        fs::create_dir_all(&data).map_err(failed("make", &data))?;
        let mode = match nix::unistd::geteuid().is_root() {
            true => private::DIRECTORY_MODE,
            false => PASSABLE,
        };
        DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(&images)
            .map_err(failed("make", &images))?;
        Ok(Self { data })
    }

    /// The data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    pub(super) fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    pub(super) fn cache(&self) -> PathBuf {
        self.data.join("cache")
    }

    /// Returns the image `name`, locked against removal while the value lives.
    pub fn get(&self, name: &str) -> Result<Image, ImageError> {
        self.get_within(name, lock::LIMIT)
    }

    pub(super) fn get_within(&self, name: &str, limit: Duration) -> Result<Image, ImageError> {
        check_name(name)?;
        let folder = self.images().join(name);
        let path = folder.join("lock");
        let lock = match File::open(&path) {
            Ok(lock) => lock,
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(self.missing(name)),
            Err(error) => return Err(failed("open", &path)(error)),
        };
        let lock = lock::within(&path, lock, Share::Shared, limit).map_err(failed("lock", &folder))?;
        let record = self.record(name)?;
        let path = |file: &FileRecord| folder.join(&file.file);
        for file in record.files() {
            let bytes = fs::metadata(path(file)).map(|meta| meta.len());
            if file.file.contains('/') || !bytes.is_ok_and(|bytes| bytes == file.bytes) {
                let reason = format!("{} is not as it was made", file.file);
                return Err(ImageError::Damaged {
                    name: name.into(),
                    reason,
                });
            }
        }
        let disk = match (&record.disk, record.disk_format()) {
            (None, _) => None,
            (Some(disk), Some(format)) => Some((path(disk), format)),
            (Some(_), None) => {
                return Err(ImageError::Damaged {
                    name: name.into(),
                    reason: "unknown disk format".into(),
                });
            }
        };
        Ok(Image {
            name: name.into(),
            kernel: record.kernel.as_ref().map(path),
            initrd: record.initrd.as_ref().map(path),
            disk,
            cmdline: record.cmdline.clone(),
            record,
            lock,
        })
    }

    /// Returns the records of all images, by name. Skips damaged ones.
    pub fn list(&self) -> Result<Vec<Record>, ImageError> {
        Ok(self
            .names()?
            .iter()
            .filter_map(|name| self.record(name).ok())
            .collect())
    }

    /// Removes an image; refused while a VM uses it.
    pub fn remove(&self, name: &str) -> Result<(), ImageError> {
        check_name(name)?;
        let folder = self.images().join(name);
        if !folder.is_dir() {
            return Err(self.missing(name));
        }
        let path = folder.join("lock");
        let _lock = match File::open(&path) {
            Ok(lock) => match lock::at_once(lock, Share::Exclusive).map_err(failed("lock", &path))? {
                Some(lock) => Some(lock),
                None => return Err(ImageError::InUse(name.into())),
            },
            // The image was damaged.
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(failed("open", &path)(error)),
        };
        // Renames first, so that an interrupted removal leaves only remains that the next build removes.
        let grave = self
            .images()
            .join(format!("{BUILDING}{}-{name}", std::process::id()));
        fs::rename(&folder, &grave).map_err(failed("remove", &folder))?;
        fs::remove_dir_all(&grave).map_err(failed("remove", &grave))
    }

    /// Reads every file of an image and compares it with the record.
    pub fn verify(&self, name: &str) -> Result<(), ImageError> {
        let image = self.get(name)?;
        for file in image.record.files() {
            let path = self.images().join(name).join(&file.file);
            let found = file_digest(&path, file.digest.starts_with("sha256-nonzero"))?;
            if found != file.digest {
                let reason = format!("{} does not match its checksum", file.file);
                return Err(ImageError::Damaged {
                    name: name.into(),
                    reason,
                });
            }
        }
        Ok(())
    }

    /// Begins a build of `name`, and removes the remains of dead builders.
    pub(super) fn begin(&self, name: &str) -> Result<Building, ImageError> {
        check_name(name)?;
        if self.images().join(name).exists() {
            return Err(ImageError::Exists(name.into()));
        }
        self.clear_remains()?;
        let folder = self
            .images()
            .join(format!("{BUILDING}{}-{name}", std::process::id()));
        let made = DirBuilder::new().mode(private::DIRECTORY_MODE).create(&folder);
        if let Err(error) = made {
            return Err(match error.kind() {
                ErrorKind::AlreadyExists => ImageError::Exists(name.into()),
                _ => failed("make", &folder)(error),
            });
        }
        let path = folder.join("lock");
        let lock = private::lock_file(&path).map_err(failed("make", &path))?;
        let lock =
            lock::within(&path, lock, Share::Exclusive, lock::LIMIT).map_err(failed("lock", &folder))?;
        Ok(Building {
            folder,
            name: name.into(),
            store: self.clone(),
            published: false,
            _lock: lock,
        })
    }

    fn clear_remains(&self) -> Result<(), ImageError> {
        for name in self.folders()? {
            if !name.starts_with(BUILDING) {
                continue;
            }
            let folder = self.images().join(&name);
            // A builder that has just created the folder has no lock yet, but its process is alive.
            let pid = name[BUILDING.len()..]
                .split('-')
                .next()
                .and_then(|pid| pid.parse::<i32>().ok());
            let alive = pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists());
            let free = match File::open(folder.join("lock")) {
                Ok(lock) => matches!(lock::at_once(lock, Share::Exclusive), Ok(Some(_))),
                // Any other error is of this process, not of the build.
                Err(error) => error.kind() == ErrorKind::NotFound && !alive,
            };
            if free {
                fs::remove_dir_all(&folder).map_err(failed("remove", &folder))?;
            }
        }
        Ok(())
    }

    fn record(&self, name: &str) -> Result<Record, ImageError> {
        let damaged = |reason: String| ImageError::Damaged {
            name: name.into(),
            reason,
        };
        let path = self.images().join(name).join("image.json");
        let text = fs::read(&path).map_err(|error| damaged(error.to_string()))?;
        let record: Record = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if record.version != VERSION {
            return Err(damaged(format!(
                "its format is version {}, this program reads {VERSION}",
                record.version
            )));
        }
        Ok(record)
    }

    fn folders(&self) -> Result<Vec<String>, ImageError> {
        let images = self.images();
        let entries = fs::read_dir(&images).map_err(failed("read", &images))?;
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        Ok(names)
    }

    fn names(&self) -> Result<Vec<String>, ImageError> {
        Ok(self
            .folders()?
            .into_iter()
            .filter(|name| check_name(name).is_ok())
            .collect())
    }

    fn missing(&self, name: &str) -> ImageError {
        let names = self.names().unwrap_or_default();
        let there_are = if names.is_empty() {
            "there are none".into()
        } else {
            format!("there are: {}", names.join(", "))
        };
        ImageError::Missing {
            name: name.into(),
            there_are,
        }
    }
}

impl Building {
    /// Lets other users pass through the folder: those of the user namespace in which a program builds.
    pub fn open_to_namespace(&self) -> Result<(), ImageError> {
        fs::set_permissions(&self.folder, Permissions::from_mode(PASSABLE))
            .map_err(failed("make", &self.folder))
    }

    /// Returns the record of a file of the build.
    pub fn file(&self, file: &str, disk: bool) -> Result<FileRecord, ImageError> {
        let path = self.folder.join(file);
        let bytes = fs::metadata(&path).map_err(failed("read", &path))?.len();
        Ok(FileRecord {
            file: file.into(),
            bytes,
            digest: file_digest(&path, disk)?,
        })
    }

    /// Makes the build an image: everything is on the disk before the name appears.
    pub fn publish(mut self, record: &Record) -> Result<(), ImageError> {
        let path = self.folder.join("image.json");
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed("write", &path)(error.into()))?;
        let write = || -> std::io::Result<()> {
            fs::write(&path, &text)?;
            for entry in fs::read_dir(&self.folder)? {
                let file = File::open(entry?.path())?;
                file.set_permissions(Permissions::from_mode(FILE_MODE))?;
                file.sync_all()?;
            }
            let folder = File::open(&self.folder)?;
            folder.set_permissions(Permissions::from_mode(private::DIRECTORY_MODE))?;
            folder.sync_all()
        };
        write().map_err(failed("write", &path))?;
        let place = self.store.images().join(&self.name);
        fs::rename(&self.folder, &place).map_err(|error| match error.kind() {
            ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => ImageError::Exists(self.name.clone()),
            _ => failed("make", &place)(error),
        })?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        if !self.published {
            // The next build removes what can't be removed now.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

pub(super) fn file_digest(path: &Path, disk: bool) -> Result<String, ImageError> {
    let mut file = File::open(path).map_err(failed("read", path))?;
    let sum = if disk {
        digest::sparse(&file)
    } else {
        digest::plain(&mut file)
    };
    sum.map_err(failed("read", path))
}

pub(super) fn check_name(name: &str) -> Result<(), ImageError> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 63 || name.starts_with(['.', '-']) || !name.chars().all(good) {
        return Err(ImageError::Name(name.into()));
    }
    Ok(())
}
