//! Copies of images for share groups, whose VMs share memory only with one another.
//!
//! VMs share memory through the page cache of a file. So each share group has its own copy of every image
//! that one of its VMs uses. It is made once, and shares disk space with the original where the file system
//! can. No page of memory is then common to VMs of two groups.
//!
//! ```text
//! <data>/groups/<group>/<device>-<inode>-<bytes>-<written>-<changed>    a copy of a file with these values
//! ```

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hostfiles::{AtomicFile, lock, private};

use crate::disk::{DiskError, Lock, Share, copy_scratch as copy_sparse, inherit_format, take_lock};

/// From `linux/fs.h`: `FICLONE`.
const SHARE_SPACE: libc::Ioctl = 0x4004_9409;
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";
/// Time limit for another VM of the group to copy a file. At 100 MB/s, a disk's rate, that is 60 GB.
const COPY_MAX: Duration = Duration::from_secs(600);

/// A group's copy of a file. The original stays locked while this lives, as by a VM that uses it privately.
#[derive(Debug)]
pub struct GroupCopy {
    /// Path of the copy.
    pub path: PathBuf,
    original: File,
    _lock: Lock,
}

impl GroupCopy {
    /// The open original, whose lock lasts as long as a copy of this descriptor.
    pub fn original(&self) -> BorrowedFd<'_> {
        self.original.as_fd()
    }
}

/// Reason why a group has no copy of a file.
#[derive(Debug, thiserror::Error)]
pub enum GroupCopyError {
    /// The original is in use.
    #[error(transparent)]
    Original(#[from] DiskError),
    /// The copy can't be created.
    #[error(transparent)]
    Copy(#[from] io::Error),
}

/// Returns the group's copy of `file` for the VM `vm`, and creates it when there is none. The file was opened
/// for reading at `original`; `data` is the data directory.
///
/// # Errors
/// If a VM has the original exclusively, space is short, or the file has a backing file (qcow2), which would
/// be shared all the same.
pub fn group_copy(
    data: &Path,
    group: &str,
    file: File,
    original: &Path,
    vm: &str,
) -> Result<GroupCopy, GroupCopyError> {
    let mut magic = [0; 4];
    if file.read_at(&mut magic, 0)? == magic.len() && magic == QCOW2_MAGIC {
        return Err(GroupCopyError::Copy(io::Error::other(
            "a share group takes raw disks only; convert it with `qemu-img convert -O raw`",
        )));
    }
    // Locks first: an exclusive user would write the file while it is copied.
    let held = take_lock(original, &file, Share::Shared, vm)?;
    let path = copy_of(data, group, &file)?;
    Ok(GroupCopy {
        path,
        original: file,
        _lock: held,
    })
}

/// Path of the group's copy of a file that no VM writes.
fn copy_of(data: &Path, group: &str, file: &File) -> io::Result<PathBuf> {
    let about = file.metadata()?;
    let of = format!("{:x}-{:x}-", about.dev(), about.ino());
    // An owner may choose the time of the last write, and a new file may have the inode of a deleted one. The
    // time of the inode's last change is the kernel's.
    let name = format!(
        "{of}{:x}-{:x}.{:x}-{:x}.{:x}",
        about.len(),
        about.mtime(),
        about.mtime_nsec(),
        about.ctime(),
        about.ctime_nsec()
    );
    let folder = data.join("groups").join(group);
    private::directories(&folder)?;
    let copy = folder.join(&name);
    // Two VMs of the group that start simultaneously make one copy.
    let path = folder.join(".lock");
    let _lock = lock::within(
        &path,
        private::lock_file(&path)?,
        lock::Share::Exclusive,
        COPY_MAX,
    )?;
    if copy.exists() {
        return Ok(copy);
    }
    let new = AtomicFile::beside(&copy)?;
    // SAFETY: takes two descriptors and no pointers.
    if unsafe { libc::ioctl(new.file().as_raw_fd(), SHARE_SPACE, file.as_raw_fd()) } != 0 {
        copy_sparse(file, new.file())?;
    }
    inherit_format(file, new.file());
    new.file().set_permissions(fs::Permissions::from_mode(0o400))?;
    // Copies of former content of the file: VMs that use one keep it until they end.
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&of) {
            fs::remove_file(entry.path())?;
        }
    }
    new.replace()?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{DiskRequest, Mode, open};

    fn made(data: &Path, group: &str, original: &Path, vm: &str) -> Result<GroupCopy, GroupCopyError> {
        group_copy(data, group, File::open(original)?, original, vm)
    }

    #[test]
    fn each_group_has_a_copy_until_the_original_changes() {
        let data = tempfile::tempdir().unwrap();
        let original = data.path().join("image");
        fs::write(&original, vec![7; 300_000]).unwrap();
        let group_copy = |group| made(data.path(), group, &original, "vm").unwrap().path;
        let (one, other) = (group_copy("one"), group_copy("other"));
        assert_eq!(group_copy("one"), one);
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        assert!(inode(&one) != inode(&other) && inode(&one) != inode(&original));
        assert_eq!(fs::read(&one).unwrap(), vec![7; 300_000]);
        fs::write(&original, "new").unwrap();
        let newer = group_copy("one");
        assert_eq!(fs::read(&newer).unwrap(), b"new");
        assert!(!one.exists(), "the old copy stays forever");
        assert_eq!(fs::read(&other).unwrap(), vec![7; 300_000]);
    }

    #[test]
    fn disk_with_a_backing_file_is_refused() {
        let data = tempfile::tempdir().unwrap();
        let original = data.path().join("overlay");
        fs::write(&original, [&QCOW2_MAGIC[..], &[0; 100]].concat()).unwrap();
        let error = made(data.path(), "one", &original, "vm").unwrap_err();
        assert!(error.to_string().contains("raw disks only"), "{error}");
    }

    #[test]
    fn a_disk_that_a_vm_has_exclusively_is_not_copied_and_a_copied_one_is_not_taken_exclusively() {
        let data = tempfile::tempdir().unwrap();
        let original = data.path().join("disk");
        fs::write(&original, vec![7; 4096]).unwrap();
        let exclusive = DiskRequest {
            path: original.clone(),
            format: None,
            mode: Mode::Exclusive,
            persistent: true,
            read_only: false,
            overlay_path: None,
            scratch_dir: data.path().to_owned(),
            vm_name: "writer".into(),
            below: None,
        };
        let writer = open(&exclusive).unwrap();
        let error = made(data.path(), "one", &original, "member").unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("in use exclusively by") && text.contains("VM writer"),
            "{text}"
        );
        drop(writer);
        let member = made(data.path(), "one", &original, "member").unwrap();
        let text = open(&exclusive).unwrap_err().to_string();
        assert!(text.contains("VM member"), "{text}");
        drop(member);
        open(&exclusive).unwrap();
    }
}
