//! Namespaces and root directory of a folder's process: it sees the folder and its own descriptors.
//!
//! The root is a read-only file system in memory with two directories: the folder, and the process's own
//! descriptors, by whose names the file system opens files that it has found. Mounts within the folder stay
//! visible. The descriptor of the folder itself belongs to the host's mounts, from where `..` leads out, so
//! it is replaced.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::Mode;
use nix::unistd::{dup2_stdout, fchdir, getegid, geteuid};

use super::root::NewRoot;

/// The folder in the new root.
pub const FOLDER: &str = "/folder";
/// The folder where the process keeps the host's root: its standard output. The last component lets the
/// directory be opened without following a link at the last name.
pub const FOLDER_OF_HOST: &str = "/proc/self/fd/1/.";
/// A directory of every Linux host. The new root is mounted over it, in this mount namespace only.
const MOUNT_POINT: &str = "/sys";
/// Mount options of the root.
const ROOT_OPTIONS: &str = "size=64k,nr_inodes=16,mode=0755";

/// `mount_setattr(2)`'s structure.
#[repr(C)]
#[derive(Default)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Moves this process, which has one thread, into namespaces and a root of its own. The folder is this
/// process's standard output, which is replaced.
///
/// # Errors
/// Fails if the host does not permit it. The process must not serve the guest by [`FOLDER`] then.
pub fn enter(folder: BorrowedFd<'_>, read_only: bool) -> io::Result<()> {
    // The current directory follows into the new mount namespace; a descriptor does not.
    fchdir(folder)?;
    let (uid, gid) = (geteuid(), getegid());
    let mut namespaces = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS;
    if !uid.is_root() {
        namespaces |= CloneFlags::CLONE_NEWUSER;
    }
    unshare(namespaces)?;
    if !uid.is_root() {
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
        fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    }
    let none = None::<&Path>;
    let root = NewRoot::mount(MOUNT_POINT, ROOT_OPTIONS)?;
    let within = |path: &str| format!("{MOUNT_POINT}{path}");
    fs::create_dir(within(FOLDER))?;
    fs::create_dir_all(within("/proc/self/fd"))?;
    // The file system opens it, and reads it in a mode that is not used.
    fs::write(within("/proc/self/mountinfo"), "")?;
    let bind = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some("."), within(FOLDER).as_str(), none, bind, none)?;
    restrict(&within(FOLDER), read_only)?;
    let descriptors = within("/proc/self/fd");
    mount(
        Some("/proc/self/fd"),
        descriptors.as_str(),
        none,
        MsFlags::MS_BIND,
        none,
    )?;
    let nothing = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
    root.enter()?;
    // Last, as the folder is needed if a step before fails.
    dup2_stdout(nothing.as_fd())?;
    Ok(())
}

/// Makes neither devices nor programs of the folder's mounts usable, nor writes to them if `read_only`.
fn restrict(path: &str, read_only: bool) -> io::Result<()> {
    let mut set = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    if read_only {
        set |= libc::MOUNT_ATTR_RDONLY;
    }
    let attributes = MountAttributes {
        set,
        ..MountAttributes::default()
    };
    let path = std::ffi::CString::new(path)?;
    // SAFETY: the path is a string with a zero byte, and the structure has the layout and the length that the
    // call gets; both live through the call, which only reads them.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_RECURSIVE,
            &attributes,
            size_of::<MountAttributes>(),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
