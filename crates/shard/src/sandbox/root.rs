//! Moves the process into an empty, read-only root of its own.

use std::io;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};

/// A directory of every Linux system. The new root is mounted over it, in this mount namespace only.
const MOUNT_POINT: &str = "/proc";
/// Mount options of the root, to which nothing is written.
const ROOT_OPTIONS: &str = "size=64k,nr_inodes=8,mode=0755";

/// Creates a mount namespace that contains an empty directory only.
///
/// The namespace is created here even if the monitor has created one already, so that the mounts of the host
/// can't be affected.
pub fn enter_empty() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&Path>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(
        Some("none"),
        MOUNT_POINT,
        Some("tmpfs"),
        flags,
        Some(ROOT_OPTIONS),
    )?;
    chdir(MOUNT_POINT)?;
    mount(
        none,
        ".",
        none,
        MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | flags,
        none,
    )?;
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")?;
    Ok(())
}
