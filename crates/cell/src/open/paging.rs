//! The paging file of a VM whose memory is paged.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use diskstore::disk::nameless_file;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::{Whence, lseek};
use shard_api::launch::{PAGING_FILE_MARK, PagingLaunch};

use super::files::scratch_directory;
use super::{OpenError, Opening};
use crate::coherence::userfaultfd;

/// Length of a paging file beyond the guest's memory and the paging disk, bytes: the mark, and pages on their
/// way.
const BESIDE_BYTES: u64 = 4 << 20;
/// Bytes of a device that must be zero, or begin with the mark. Superblocks of file systems and tables of
/// partitions lie there.
const CHECKED_BYTES: usize = 128 << 10;

impl Opening<'_> {
    /// Opens the paging file, if the spec has one.
    pub fn paging(&mut self) -> Result<Option<PagingLaunch>, OpenError> {
        let Some(resident) = self.spec.resident else {
            return Ok(None);
        };
        let directory = scratch_directory();
        let path = self.spec.paging_file.as_deref().unwrap_or(&directory);
        let failed = |help| {
            move |source| OpenError::File {
                what: "paging file",
                path: path.to_owned(),
                help,
                source,
            }
        };
        let (file, name) = if path.is_dir() {
            let help = "name a directory that this user may write, by `paging_file`";
            let file = nameless_file(path).map_err(failed(help))?;
            write_mark(&file).map_err(failed(help))?;
            (file, format!("without a name in {}", path.display()))
        } else {
            let help = "name a new or empty file, a directory, or a block device without content, that this \
                        user may write and no other VM uses";
            let file = claim(path, self.paging_device_bytes()).map_err(failed(help))?;
            (file, path.display().to_string())
        };
        Ok(Some(PagingLaunch {
            resident_bytes: resident.0,
            file: self.files.add(file),
            name,
            userfaultfd: userfaultfd().map(|device| self.files.add(device)),
            disk_bytes: self.spec.paging_disk.map_or(0, |disk| disk.0),
        }))
    }

    /// Minimum length of a block device as the paging file, bytes. With a paging disk it has room for all
    /// pages: the guest's swap can't wait until there is some.
    fn paging_device_bytes(&self) -> u64 {
        let all = |disk: config::Size| self.spec.memory.0.saturating_add(disk.0);
        self.spec
            .paging_disk
            .map_or(0, |disk| all(disk).saturating_add(BESIDE_BYTES))
    }

    /// Maximum length of the paging file, bytes; 0 if there is none.
    pub fn paging_file_bytes(&self) -> u64 {
        let disk = self.spec.paging_disk.map_or(0, |disk| disk.0);
        let memory = self.spec.resident.map(|_| self.spec.memory.0);
        memory.map_or(0, |bytes| bytes.saturating_add(disk).saturating_add(BESIDE_BYTES))
    }
}

/// Opens a paging file with a name, keeps it from other VMs until its last descriptor is closed, and empties
/// it. A file or device with other content is refused: it would be lost. A device with less than
/// `device_bytes` is refused.
fn claim(path: &Path, device_bytes: u64) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(io::Error::other("another VM uses it; name another file"));
        }
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let mut begin = vec![0; CHECKED_BYTES];
    let length = read_begin(&file, &mut begin)?;
    let begin = &begin[..length];
    if !begin.starts_with(PAGING_FILE_MARK) && begin.iter().any(|byte| *byte != 0) {
        return Err(io::Error::other(
            "it has other content, which would be lost; name another file, or empty this one",
        ));
    }
    let metadata = file.metadata()?;
    if metadata.is_file() {
        file.set_len(0)?;
    } else if metadata.file_type().is_block_device() {
        check_device(lseek(&file, 0, Whence::SeekEnd)?, device_bytes)?;
    }
    write_mark(&file)?;
    Ok(file)
}

/// Checks the length of a block device.
fn check_device(length: i64, needed: u64) -> io::Result<()> {
    if u64::try_from(length).unwrap_or(0) < needed {
        return Err(io::Error::other(format!(
            "the device has {length} bytes, but the memory and the paging disk need {needed}"
        )));
    }
    Ok(())
}

/// A page at an address that direct I/O takes.
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Writes the first page of a paging file, by direct I/O if the file takes it: pages of the guest would be in
/// the host's page cache otherwise, when they have just left memory.
fn write_mark(file: &File) -> io::Result<()> {
    let mut page = Box::new(Page([0; 4096]));
    page.0[..PAGING_FILE_MARK.len()].copy_from_slice(PAGING_FILE_MARK);
    let flags = OFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GETFL)?);
    let is_direct = fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)).is_ok();
    if is_direct && file.write_all_at(&page.0, 0).is_ok() {
        return Ok(());
    }
    fcntl(file, FcntlArg::F_SETFL(flags))?;
    file.write_all_at(&page.0, 0)
}

/// Reads the first bytes of a file. Returns their number.
fn read_begin(file: &File, bytes: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paging_file_is_used_by_one_vm_at_a_time_and_again_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("paging");
        let file = claim(&path, 0).unwrap();
        let content = Box::new(Page([7; 4096]));
        file.write_all_at(&content.0, 4096).unwrap();
        assert!(claim(&path, 0).unwrap_err().to_string().contains("another VM"));
        // The shard's descriptor keeps the claim.
        let passed = file.try_clone().unwrap();
        drop(file);
        assert!(claim(&path, 0).is_err());
        drop(passed);
        let again = claim(&path, 0).unwrap();
        assert_eq!(again.metadata().unwrap().len(), 4096);
    }

    #[test]
    fn device_without_room_for_memory_and_disk_is_refused_with_both_sizes() {
        assert!(check_device(4096, 4096).is_ok());
        let error = check_device(4095, 4096).unwrap_err().to_string();
        assert_eq!(
            error,
            "the device has 4095 bytes, but the memory and the paging disk need 4096"
        );
        // A file grows, whatever its length is now.
        let directory = tempfile::tempdir().unwrap();
        claim(&directory.path().join("paging"), 1 << 40).unwrap();
    }

    #[test]
    fn file_with_other_content_keeps_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        // The first superblock of a btrfs is at 64 KiB.
        let mut disk = vec![0; 70 << 10];
        disk[(64 << 10) + 64] = b'_';
        std::fs::write(&path, &disk).unwrap();
        assert!(claim(&path, 0).unwrap_err().to_string().contains("other content"));
        assert_eq!(std::fs::read(&path).unwrap(), disk);
        std::fs::write(&path, vec![0; 9000]).unwrap();
        claim(&path, 0).unwrap();
    }
}
