//! Registry of this user's running labs: one directory each, locked by the process that owns the lab.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::boot::BESIDE;
use crate::error::Context;
use crate::session::HostAccess;

/// Retention time of the console of a dead lab.
const CONSOLE_RETENTION: Duration = Duration::from_secs(7 * 24 * 3600);

/// Prefix of the names of labs that `lab run` starts; the process id follows.
pub const RUN_PREFIX: &str = "run-";

/// Published entry of a running lab.
#[derive(Clone, Serialize, Deserialize)]
pub struct Entry {
    /// Name of the lab, unique among the user's.
    pub name: String,
    /// The process that owns it.
    pub pid: u32,
    /// Hosts, with the access to each.
    pub hosts: Vec<(String, HostAccess)>,
    /// The program that was put into the hosts.
    pub program: ProgramId,
}

/// A build of the program, and of the programs beside it.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramId {
    bytes: u64,
    modified_ns: i128,
    /// Programs beside it, by name. Labs of older commands have none.
    #[serde(default)]
    beside: Vec<(String, FileId)>,
}

/// A build of one file.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct FileId {
    bytes: u64,
    modified_ns: i128,
}

impl ProgramId {
    /// The running program's.
    pub fn own() -> Result<Self, LabError> {
        let FileId { bytes, modified_ns } = FileId::of(Path::new("/proc/self/exe"))?;
        let beside = programs_beside().map(|(name, path)| Ok((name.to_owned(), FileId::of(&path)?)));
        Ok(Self {
            bytes,
            modified_ns,
            beside: beside.collect::<Result<_, LabError>>()?,
        })
    }
}

impl FileId {
    fn of(path: &Path) -> Result<Self, LabError> {
        let metadata = fs::metadata(path).on("look at", path)?;
        Ok(Self {
            bytes: metadata.len(),
            modified_ns: i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec()),
        })
    }
}

/// Names and paths of the programs of [`BESIDE`] that lie beside the running program.
pub fn programs_beside() -> impl Iterator<Item = (&'static str, PathBuf)> {
    let own = std::env::current_exe().ok();
    let paths = BESIDE
        .into_iter()
        .filter_map(move |name| Some((name, own.as_ref()?.with_file_name(name))));
    paths.filter(|(_, path)| path.is_file())
}

/// The user's cache directory for labs.
pub fn cache() -> Result<PathBuf, LabError> {
    let base = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if Path::new(&cache).is_absolute() => PathBuf::from(cache),
        (_, Some(home)) => PathBuf::from(home).join(".cache"),
        _ => PathBuf::from(format!("/tmp/.cache-{}", nix::unistd::geteuid())),
    };
    let path = base.join("mirrorball/lab");
    make_private(&path)?;
    Ok(path)
}

/// Makes a directory, and those above it, for this user alone.
fn make_private(path: &Path) -> Result<(), LabError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(path).on("make", path)
}

/// Where images are, whose files never change; made when missing, so that a running lab sees images built
/// later.
pub fn images() -> Option<PathBuf> {
    let data = diskstore::image::data_directory()?;
    let images = std::path::absolute(data).ok()?.join("images");
    fs::create_dir_all(&images).ok()?;
    // The mount inside has the canonical path: the target of a link may be elsewhere.
    fs::canonicalize(images).ok()
}

fn labs() -> Result<PathBuf, LabError> {
    Ok(cache()?.join("labs"))
}

/// The directory of the lab `name`.
pub fn directory(name: &str) -> Result<PathBuf, LabError> {
    check(name)?;
    Ok(labs()?.join(name))
}

/// Returns the file on which the users of the lab `name` hold a shared lock. It outlives the lab.
pub fn sessions(name: &str) -> Result<PathBuf, LabError> {
    check(name)?;
    Ok(cache()?.join(format!("{name}.sessions")))
}

/// Exclusive ownership of a lab's name, until dropped.
pub struct Claim {
    /// The lab's directory.
    pub directory: PathBuf,
    _lock: Flock<File>,
}

/// Claims a name for a lab, and removes the files of dead labs.
pub fn claim(name: &str) -> Result<Claim, LabError> {
    check(name)?;
    prune();
    let directory = labs()?.join(name);
    // A process that checks whether the lab runs holds the lock briefly, and a pruner may remove the
    // directory again.
    let mut tries_left = 10;
    let lock = loop {
        make_private(&directory)?;
        match lock(&directory.join("lock"), FlockArg::LockExclusiveNonblock) {
            Ok(Some(lock)) => break lock,
            result if tries_left == 0 => {
                result?;
                return Err(LabError::Running(name.to_string()));
            }
            _ => tries_left -= 1,
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    for old in ["state.json", "died"] {
        let _ = fs::remove_file(directory.join(old));
    }
    Ok(Claim {
        directory,
        _lock: lock,
    })
}

/// Removes the directories of labs whose owner was killed, and, after a week, those kept for their consoles.
fn prune() {
    let Ok(labs) = labs() else { return };
    for entry in fs::read_dir(labs).into_iter().flatten().flatten() {
        let directory = entry.path();
        let kept = fs::metadata(directory.join("died"))
            .and_then(|died| died.modified())
            .is_ok_and(|died| died.elapsed().unwrap_or_default() < CONSOLE_RETENTION);
        if !kept && let Ok(Some(_lock)) = lock(&directory.join("lock"), FlockArg::LockExclusiveNonblock) {
            let _ = fs::remove_dir_all(&directory);
        }
    }
}

/// Locks the file at `path`, which is created if absent. Returns `None` if another process holds the lock.
pub fn lock(path: &Path, how: FlockArg) -> Result<Option<Flock<File>>, LabError> {
    loop {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path)
            .on("open", path)?;
        let lock = match Flock::lock(file, how) {
            Ok(lock) => lock,
            Err((_, Errno::EAGAIN)) => return Ok(None),
            Err((_, Errno::EINTR)) => continue,
            Err((_, error)) => return Err(error).on("lock", path),
        };
        // A lock on a file that was removed meanwhile excludes no process.
        let (ours, there) = (lock.metadata().on("look at", path)?, fs::metadata(path));
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
            return Ok(Some(lock));
        }
    }
}

impl Claim {
    /// Publishes the lab's entry.
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

    /// Keeps the directory, with the reason why the lab ended.
    pub fn keep(&self, why: &str) {
        let _ = fs::remove_file(self.directory.join("state.json"));
        let _ = fs::write(self.directory.join("died"), why);
    }

    /// Moves the files of a lab that did not start to a separate directory, which is kept as long as a dead
    /// lab's, and returns it.
    pub fn set_aside(&self, why: &str) -> Result<PathBuf, LabError> {
        let labs = labs()?;
        // The prefix keeps it out of the list of dead labs: this lab continues.
        let name = |number: u32| labs.join(format!("{RUN_PREFIX}{}-start-{number}", std::process::id()));
        let kept = (1..).map(name).find(|path| !path.exists());
        let kept = kept.expect("numbers do not run out");
        make_private(&kept)?;
        // First, so that no process takes the directory for that of a dead lab.
        let died = kept.join("died");
        fs::write(&died, why).on("write", &died)?;
        for entry in fs::read_dir(&self.directory)
            .on("read", &self.directory)?
            .flatten()
        {
            if entry.file_name() != "lock" {
                let path = entry.path();
                fs::rename(&path, kept.join(entry.file_name())).on("move", &path)?;
            }
        }
        Ok(kept)
    }
}

/// Returns the reason why the last lab of that name died; `None` if it did not, or another was started since.
pub fn last_words(name: &str) -> Option<String> {
    check(name).ok()?;
    fs::read_to_string(labs().ok()?.join(name).join("died")).ok()
}

/// Returns the background labs that died, with the reasons.
pub fn dead() -> Result<Vec<(String, String)>, LabError> {
    let mut dead: Vec<_> = fs::read_dir(labs()?)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !name.starts_with(RUN_PREFIX))
        .filter_map(|name| Some((name.clone(), last_words(&name)?)))
        .collect();
    dead.sort();
    Ok(dead)
}

/// Returns the running lab of that name.
pub fn find(name: &str) -> Result<Option<Entry>, LabError> {
    let directory = directory(name)?;
    if !directory.join("state.json").exists()
        || lock(&directory.join("lock"), FlockArg::LockSharedNonblock)?.is_some()
    {
        return Ok(None);
    }
    let text = fs::read(directory.join("state.json")).unwrap_or_default();
    Ok(serde_json::from_slice(&text).ok())
}

/// Returns all running labs, and removes the files of dead ones.
pub fn list() -> Result<Vec<Entry>, LabError> {
    prune();
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
