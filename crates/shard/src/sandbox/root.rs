//! Moves the process into a read-only root of its own.

use std::io;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};

const NONE: Option<&Path> = None;
/// Flags of the root.
const FLAGS: MsFlags = MsFlags::MS_NOSUID
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

/// Creates a mount namespace that contains an empty directory only.
///
/// The namespace is created here even if the monitor has created one already, so that the mounts of the host
/// can't be affected.
pub fn enter_empty() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    // A directory of every Linux system.
    let root = NewRoot::mount("/proc", "size=64k,nr_inodes=8,mode=0755")?;
    root.enter()
}

/// A root to be: a file system in memory, mounted in this mount namespace only.
pub struct NewRoot {
    /// The directory over which it is mounted.
    pub path: &'static str,
}

impl NewRoot {
    /// Mounts an empty file system over a directory. This process has a mount namespace of its own.
    pub fn mount(path: &'static str, options: &str) -> io::Result<Self> {
        mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
        mount(Some("none"), path, Some("tmpfs"), FLAGS, Some(options))?;
        Ok(Self { path })
    }

    /// Makes it read-only, and the root of this process. The host's mounts leave the namespace.
    pub fn enter(self) -> io::Result<()> {
        chdir(self.path)?;
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | FLAGS;
        mount(NONE, ".", NONE, flags, NONE)?;
        pivot_root(".", ".")?;
        umount2(".", MntFlags::MNT_DETACH)?;
        chdir("/")?;
        Ok(())
    }
}
