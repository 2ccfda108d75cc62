//! Puts the process into an empty, read-only root of its own.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};

/// Any directory that every Linux system has; the new root is built over it, in this mount namespace only.
const MOUNT_POINT: &str = "/proc";
/// Room for the root's directories; nothing is ever written to it.
const ROOT_OPTIONS: &str = "size=64k,nr_inodes=8,mode=0755";

/// Makes a mount namespace and leaves nothing in it but an empty directory, and `ports` as `/ports`.
///
/// The namespace is made here, even where the monitor has made one already: so the mounts of the host can't be meant.
pub fn enter_empty(ports: Option<BorrowedFd<'_>>) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&Path>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    // Resolved before the mount point, /proc, is covered.
    let ports = ports.map(|fd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))).transpose()?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("none"), MOUNT_POINT, Some("tmpfs"), flags, Some(ROOT_OPTIONS))?;
    chdir(MOUNT_POINT)?;
    if let Some(ports) = &ports {
        std::fs::create_dir("ports")?;
        mount(Some(ports), "ports", none, MsFlags::MS_BIND, none)?;
    }
    mount(none, ".", none, MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | flags, none)?;
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")?;
    Ok(())
}
