//! Runs a test program as an ordinary user: without root, without further groups, and without control groups
//! of its own.
//!
//! Root starts this program with [`ARGUMENT`] and the test program's words. It gives the user a home with the
//! images that guest tests boot, and reaches the test program by a bind mount: folders above the build
//! directory may be closed to others.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::worker;

/// The argument that makes this program start another one as a user.
pub const ARGUMENT: &str = "--as-user";
/// The same, while the host refuses user namespaces.
pub const WITHOUT_NAMESPACES: &str = "--as-user-without-namespaces";

/// User and group id of the user. No account needs to exist.
const ID: u32 = 1000;
/// The home, in memory.
const HOME: &str = "/run/guest-tests-user";
/// The mount point of the build directory.
const PROGRAMS: &str = "/run/guest-tests-programs";
const USER_NAMESPACES: &str = "/proc/sys/user/max_user_namespaces";

/// Runs the program `words` as the user. Returns its exit status.
pub fn serve(kind: &str, words: &[String]) -> ExitCode {
    let ended = match kind {
        WITHOUT_NAMESPACES => without_namespaces(words),
        _ => run(words),
    };
    match ended {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
        Err(error) => {
            eprintln!("test-runner: {error}");
            ExitCode::from(2)
        }
    }
}

fn without_namespaces(words: &[String]) -> Result<i32, String> {
    let before = fs::read_to_string(USER_NAMESPACES).map_err(|error| in_file(USER_NAMESPACES, &error))?;
    fs::write(USER_NAMESPACES, "0").map_err(|error| in_file(USER_NAMESPACES, &error))?;
    let ended = run(words);
    fs::write(USER_NAMESPACES, before).map_err(|error| in_file(USER_NAMESPACES, &error))?;
    ended
}

fn run(words: &[String]) -> Result<i32, String> {
    let (program, arguments) = words.split_first().ok_or("no program to run as a user")?;
    let home = Path::new(HOME);
    if !home.exists() {
        make_home(home).map_err(|error| in_file(HOME, &error))?;
    }
    let group = open_kvm().map_err(|error| in_file("/dev/kvm", &error))?;
    let mut command = Command::new(mounted(Path::new(program))?);
    command
        .args(arguments)
        .current_dir(home)
        .env("HOME", home)
        .env("TMPDIR", home.join("tmp"))
        .env("MIRRORBALL_SCRATCH", home.join("tmp"))
        .env("XDG_RUNTIME_DIR", home.join("runtime"))
        .env("MIRRORBALL_DATA", home.join("data"))
        .env("MIRRORBALL_BIN", home.join("mirrorball"))
        // The groups of root go with its id.
        .uid(ID)
        .gid(group);
    Ok(worker::ended(command.status(), program))
}

/// Makes the home: the command, and the small images.
fn make_home(home: &Path) -> std::io::Result<()> {
    let images = guest_tests::host::data_directory().join("images");
    let own_images = home.join("data/images");
    for folder in [&home.join("tmp"), &home.join("runtime"), &own_images] {
        fs::create_dir_all(folder)?;
    }
    for image in ["tiny", "tiny-generic"] {
        fs::create_dir(own_images.join(image))?;
        for file in fs::read_dir(images.join(image))? {
            let file = file?;
            fs::copy(file.path(), own_images.join(image).join(file.file_name()))?;
        }
    }
    guest_tests::command::copy_binary(&home.join("mirrorball"))?;
    give(home)?;
    fs::set_permissions(home.join("runtime"), fs::Permissions::from_mode(0o700))
}

/// Gives the user a folder and all in it.
fn give(path: &Path) -> std::io::Result<()> {
    chown(path, Some(ID), Some(ID))?;
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            give(&entry?.path())?;
        }
    }
    Ok(())
}

/// Lets the user open `/dev/kvm`. Returns the group to run with.
fn open_kvm() -> std::io::Result<u32> {
    let kvm = fs::metadata("/dev/kvm")?;
    if kvm.mode() & 0o060 == 0o060 && kvm.gid() != 0 {
        return Ok(kvm.gid());
    }
    // A lab host has no udev, which would give the device a group.
    if guest_tests::host::in_lab() {
        fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o666))?;
    }
    Ok(ID)
}

/// The path of a test program below [`PROGRAMS`], where its build directory is mounted for this process
/// alone.
fn mounted(program: &Path) -> Result<PathBuf, String> {
    // Test programs are in the build directory's `deps`; tools that they start are beside that.
    let folder = program.parent().and_then(Path::parent);
    let (Some(folder), Some(name)) = (folder, program.file_name()) else {
        return Err(format!("{} is in no build directory", program.display()));
    };
    fs::create_dir_all(PROGRAMS).map_err(|error| in_file(PROGRAMS, &error))?;
    let own = || -> nix::Result<()> {
        let none = None::<&str>;
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some(folder), PROGRAMS, none, MsFlags::MS_BIND, none)
    };
    own().map_err(|error| format!("{PROGRAMS}: mount {}: {error}", folder.display()))?;
    Ok(Path::new(PROGRAMS).join("deps").join(name))
}

fn in_file(path: &str, error: &std::io::Error) -> String {
    format!("{path}: {error}")
}
