//! Which labs of this user run: a directory each, locked by the process that owns the lab.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::error::Context;
use crate::session::Door;

/// A running lab, as others see it.
#[derive(Clone, Serialize, Deserialize)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// The process that owns it.
    pub pid: u32,
    /// Hosts and the ways in.
    pub hosts: Vec<(String, Door)>,
}

/// The user's cache directory for labs.
pub fn cache() -> Result<PathBuf, LabError> {
    let base = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if Path::new(&cache).is_absolute() => PathBuf::from(cache),
        (_, Some(home)) => PathBuf::from(home).join(".cache"),
        _ => PathBuf::from(format!("/tmp/.cache-{}", nix::unistd::geteuid())),
    };
    let path = base.join("mirrorball/lab");
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&path)
        .on("make", &path)?;
    Ok(path)
}

/// Where images are, whose files never change.
pub fn images() -> Option<PathBuf> {
    let base = match (std::env::var_os("XDG_DATA_HOME"), std::env::var_os("HOME")) {
        (Some(data), _) if Path::new(&data).is_absolute() => PathBuf::from(data),
        (_, Some(home)) => PathBuf::from(home).join(".local/share"),
        _ => return None,
    };
    Some(base.join("mirrorball/images"))
}

fn labs() -> Result<PathBuf, LabError> {
    Ok(cache()?.join("labs"))
}

/// A name taken, as long as this lives.
pub struct Claim {
    /// The lab's directory.
    pub directory: PathBuf,
    _lock: Flock<File>,
}

/// Takes a name, for a lab to be started.
pub fn claim(name: &str) -> Result<Claim, LabError> {
    check(name)?;
    let directory = labs()?.join(name);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory)
        .on("make", &directory)?;
    let lock = lock(&directory.join("lock"), FlockArg::LockExclusiveNonblock)?
        .ok_or_else(|| LabError::Running(name.to_string()))?;
    let _ = fs::remove_file(directory.join("state.json"));
    Ok(Claim {
        directory,
        _lock: lock,
    })
}

/// The lock on a file, or nothing when somebody has it.
pub fn lock(path: &Path, how: FlockArg) -> Result<Option<Flock<File>>, LabError> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .on("open", path)?;
    match Flock::lock(file, how) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EAGAIN)) => Ok(None),
        Err((_, error)) => Err(error).on("lock", path),
    }
}

impl Claim {
    /// Lets others find the lab.
    pub fn publish(&self, entry: &Entry) -> Result<(), LabError> {
        let path = self.directory.join("state.json");
        let half = self.directory.join("state.new");
        let text = serde_json::to_vec(entry)
            .map_err(std::io::Error::from)
            .on("write", &path)?;
        let write = || -> std::io::Result<()> {
            use std::io::Write;
            let _ = fs::remove_file(&half);
            File::options()
                .create_new(true)
                .write(true)
                .mode(0o600)
                .open(&half)?
                .write_all(&text)?;
            fs::rename(&half, &path)
        };
        write().on("write", &path)
    }
}

/// The running lab of that name.
pub fn find(name: &str) -> Result<Option<Entry>, LabError> {
    check(name)?;
    let directory = labs()?.join(name);
    if !directory.join("state.json").exists()
        || lock(&directory.join("lock"), FlockArg::LockSharedNonblock)?.is_some()
    {
        return Ok(None);
    }
    let text = fs::read(directory.join("state.json")).unwrap_or_default();
    Ok(serde_json::from_slice(&text).ok())
}

/// All running labs.
pub fn list() -> Result<Vec<Entry>, LabError> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(labs()?).into_iter().flatten().flatten() {
        if let Some(name) = entry.file_name().to_str()
            && let Ok(Some(found)) = find(name)
        {
            entries.push(found);
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn check(name: &str) -> Result<(), LabError> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 63 || name.starts_with('.') || !name.bytes().all(valid) {
        return Err(LabError::Name(name.to_string()));
    }
    Ok(())
}
