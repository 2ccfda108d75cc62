//! Commands that run for another host of the cluster: by the rights of their owner, with names of files below
//! the directories that this host allows.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf, absolute};
use std::process::Command;
use std::sync::OnceLock;

use cell::cluster::commands::{FORWARDED_VARIABLE, RULES_VARIABLE, TERMINAL_VARIABLE};
use child_process::Credentials;
use config::HostFacts;
use hostfiles::groups::groups_of;
use hostfiles::names::{Access, Below, Kind};
use hostfiles::passwd::user_of;
use miette::{IntoDiagnostic, Result, miette};
use nix::errno::Errno;
use registry::cluster::admission;
use registry::lease::OWN_PROGRAM;
use registry::monitor::NameRules;

/// Search path of a command by another user's rights.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Directory of the users' runtime directories.
const RUNTIME_DIRECTORIES: &str = "/run/user";
/// First descriptor after the standard ones.
const FIRST_INHERITED: libc::c_uint = 3;

/// Returns the rules for names of files; none for a command that was given on this host.
///
/// # Errors
/// If the cell that started this command has passed none that can be read.
pub fn rules() -> Result<Option<&'static NameRules>> {
    static RULES: OnceLock<Option<Result<NameRules, String>>> = OnceLock::new();
    let read = || {
        let text = std::env::var_os(RULES_VARIABLE)?;
        let rules = serde_json::from_slice(text.as_encoded_bytes());
        Some(rules.map_err(|error| error.to_string()))
    };
    match RULES.get_or_init(read) {
        None => Ok(None),
        Some(Ok(rules)) => Ok(Some(rules)),
        Some(Err(error)) => Err(miette!(
            help = "let no other program set it",
            "{RULES_VARIABLE}: {error}"
        )),
    }
}

/// Whether another host has requested this command, or a command that has started this process.
pub fn is_for_another_host() -> bool {
    std::env::var_os(RULES_VARIABLE).is_some()
}

/// The error of a command that only this host's users give.
pub fn not_for_other_hosts() -> miette::Report {
    miette!(
        help = "give it on this host",
        "this command does not run for other hosts of the cluster"
    )
}

/// Directories below which names count, if this command is for another host.
fn below() -> io::Result<Option<Below>> {
    match rules() {
        Ok(rules) => Ok(rules.map(NameRules::below)),
        Err(error) => Err(io::Error::other(error.to_string())),
    }
}

/// Opens a regular file for reading.
///
/// # Errors
/// Those of the file, and a name that this host does not allow.
pub fn open(path: &Path) -> io::Result<File> {
    match below()? {
        None => File::open(path),
        Some(below) => below.open(&absolute(path)?, Kind::File, Access::Read),
    }
}

/// Facts about this host for the checks of a spec. Files that another host names are checked where they are
/// opened.
///
/// # Errors
/// As [`rules`].
pub fn host_facts() -> Result<HostFacts> {
    Ok(match rules()? {
        None => HostFacts::of_this_host(),
        Some(_) => HostFacts::without_files(),
    })
}

/// A place for a new file or directory.
#[derive(Debug)]
pub struct NewPlace {
    /// Path that leads there while this lives.
    pub path: PathBuf,
    _folder: Option<File>,
}

/// Finds the place for a new file or directory at `path`; in `path`, with the name `name`, if that is a
/// directory.
///
/// # Errors
/// Those of the directory, and a name that this host does not allow.
pub fn new_place(path: &Path, name: Option<&std::ffi::OsStr>) -> io::Result<NewPlace> {
    let Some(below) = below()? else {
        let path = match name {
            Some(name) if path.is_dir() => path.join(name),
            _ => path.to_owned(),
        };
        return Ok(NewPlace { path, _folder: None });
    };
    let path = absolute(path)?;
    let path = match name {
        Some(name) if is_directory(&below, &path) => path.join(name),
        _ => path,
    };
    let (folder, path) = below.new_file(&path)?;
    Ok(NewPlace {
        path,
        _folder: Some(folder),
    })
}

fn is_directory(below: &Below, path: &Path) -> bool {
    let found = below.find(path).and_then(|found| found.metadata());
    below.directories.iter().any(|directory| directory == path) || found.is_ok_and(|about| about.is_dir())
}

/// Finds a directory, and returns its path without symbolic links.
///
/// # Errors
/// Those of the directory, and a name that this host does not allow.
pub fn directory(path: &Path) -> io::Result<PathBuf> {
    match below()? {
        None => path.canonicalize(),
        Some(below) => {
            let found = below.open(&absolute(path)?, Kind::Directory, Access::Read)?;
            let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found));
            std::fs::read_link(link)
        }
    }
}

/// Runs the command `words` by the rights of the user with the id `uid`. Returns only if that fails.
///
/// # Errors
/// If there is no such user, or this process can't take the user's rights.
pub fn run_as(uid: &str, words: &[&str]) -> Result<()> {
    let user = uid.parse().ok().and_then(user_of);
    let user = user.ok_or_else(|| {
        miette!(
            help = "add the user here, or give the command as root",
            "this host has no user with the id {uid}"
        )
    })?;
    let folder = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let mut command = Command::new(OWN_PROGRAM);
    command.arg0("mirrorball").args(words).env_clear();
    // All others are root's: directories of data, and settings of the cell.
    for name in [
        TERMINAL_VARIABLE,
        FORWARDED_VARIABLE,
        RULES_VARIABLE,
        admission::VARIABLE,
    ] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command.env("PATH", SEARCH_PATH).env("HOME", &user.home);
    command.env("USER", &user.name).env("LOGNAME", &user.name);
    let runtime = Path::new(RUNTIME_DIRECTORIES).join(user.uid.to_string());
    if runtime
        .symlink_metadata()
        .is_ok_and(|about| about.is_dir() && about.uid() == user.uid)
    {
        command.env("XDG_RUNTIME_DIR", runtime);
    }
    let owner = Credentials {
        uid: user.uid,
        gid: user.gid,
        groups: groups_of(&user.name, user.gid),
    };
    std::env::set_current_dir("/").into_diagnostic()?;
    close_inherited().into_diagnostic()?;
    owner.take().map_err(|error| miette!("{error}"))?;
    // A directory that the user may not enter is not the command's.
    let _ = std::env::set_current_dir(folder);
    let error = command.exec();
    Err(miette!(
        help = "let all users execute it",
        "user {} can't run this program: {error}",
        user.name
    ))
}

/// Closes all descriptors but the standard ones. Other threads of the cell start commands at the same time,
/// and this process may have inherited a descriptor, as of a terminal, that is for one of those.
fn close_inherited() -> io::Result<()> {
    // SAFETY: this process has opened nothing that it still uses, so no value owns one of these descriptors.
    let closed = unsafe { libc::close_range(FIRST_INHERITED, libc::c_uint::MAX, 0) };
    match Errno::result(closed) {
        // Before Linux 5.9. Names beneath directories need 5.6, so that such a host is a rare one.
        Ok(_) | Err(Errno::ENOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
