//! Copies of images for groups of VMs that share memory with one another and with nobody else.
//!
//! What VMs share is the page cache of a file. So each share group has files of its own: a copy of every image that one of
//! its VMs uses, made once, sharing its space with the original where the file system can. No page of memory is then the
//! same for VMs of two groups.
//!
//! ```text
//! <data>/groups/<group>/<device>-<inode>-<bytes>-<written>    a copy of the file that was so when it was made
//! ```

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::disk::{copy_scratch as copy_sparse, inherit_format};

/// From `linux/fs.h`: `FICLONE`.
const SHARE_SPACE: libc::Ioctl = 0x4004_9409;
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// The group's own copy of `original`, made when there is none. `data` is the data directory.
///
/// # Errors
/// When there is no room, or the file stands on others (qcow2): they would be shared all the same.
pub fn own_copy(data: &Path, group: &str, original: &Path) -> io::Result<PathBuf> {
    let file = File::open(original)?;
    let mut magic = [0; 4];
    if file.read_at(&mut magic, 0)? == magic.len() && magic == QCOW2_MAGIC {
        return Err(io::Error::other(
            "a share group takes raw disks only; convert it with `qemu-img convert -O raw`",
        ));
    }
    let about = file.metadata()?;
    let of = format!("{:x}-{:x}-", about.dev(), about.ino());
    let name = format!(
        "{of}{:x}-{:x}.{:x}",
        about.len(),
        about.mtime(),
        about.mtime_nsec()
    );
    let folder = data.join("groups").join(group);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)?;
    let copy = folder.join(&name);
    // Two VMs of the group that start at once make one copy.
    let lock = File::create(folder.join(".lock"))?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| io::Error::from(error))?;
    if copy.exists() {
        return Ok(copy);
    }
    let partial = folder.join(".partial");
    let to = File::create(&partial)?;
    // SAFETY: takes two descriptors and no pointers.
    if unsafe { libc::ioctl(to.as_raw_fd(), SHARE_SPACE, file.as_raw_fd()) } != 0 {
        copy_sparse(&file, &to)?;
    }
    inherit_format(&file, &to);
    to.set_permissions(fs::Permissions::from_mode(0o400))?;
    to.sync_all()?;
    // Copies of what the file was before: VMs that use one keep it until they end.
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&of) {
            fs::remove_file(entry.path())?;
        }
    }
    fs::rename(&partial, &copy)?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_has_a_copy_until_the_original_changes() {
        let data = tempfile::tempdir().unwrap();
        let original = data.path().join("image");
        fs::write(&original, vec![7; 300_000]).unwrap();
        let one = own_copy(data.path(), "one", &original).unwrap();
        let other = own_copy(data.path(), "other", &original).unwrap();
        assert_eq!(own_copy(data.path(), "one", &original).unwrap(), one);
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        assert!(inode(&one) != inode(&other) && inode(&one) != inode(&original));
        assert_eq!(fs::read(&one).unwrap(), vec![7; 300_000]);
        fs::write(&original, "new").unwrap();
        let newer = own_copy(data.path(), "one", &original).unwrap();
        assert_eq!(fs::read(&newer).unwrap(), b"new");
        assert!(!one.exists(), "the old copy stays for ever");
        assert_eq!(fs::read(&other).unwrap(), vec![7; 300_000]);
    }

    #[test]
    fn a_disk_that_stands_on_others_is_refused() {
        let data = tempfile::tempdir().unwrap();
        let original = data.path().join("overlay");
        fs::write(&original, [&QCOW2_MAGIC[..], &[0; 100]].concat()).unwrap();
        let error = own_copy(data.path(), "one", &original).unwrap_err();
        assert!(error.to_string().contains("raw disks only"), "{error}");
    }
}
