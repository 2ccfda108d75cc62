//! Checks files that a shard sends for clones, so that they are safe to pass on.
//!
//! A guest may have taken its shard over. So the monitor trusts no shard's report about a file: it checks the
//! file, and no clone gets a file that this shard, or another clone, can change afterwards.

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;
use std::path::Path;

use diskstore::disk::{copy_scratch, nameless_file};

/// The reason why a file of a shard is not passed on.
#[derive(Debug, thiserror::Error)]
pub enum HandedError {
    /// The file is a pipe, a device or a directory.
    #[error("the shard hands out {what} that is no regular file; kill the VM and start it again")]
    Kind {
        /// The file's use in the VM.
        what: &'static str,
    },
    /// The shard could still change it.
    #[error("the shard hands out {what} that it can still change; kill the VM and start it again")]
    Unsealed {
        /// The file's use in the VM.
        what: &'static str,
    },
    /// The file was cut off, or is another one.
    #[error("the shard hands out {what} of {bytes} bytes, which cannot be; kill the VM and start it again")]
    Length {
        /// The file's use in the VM.
        what: &'static str,
        /// Its length.
        bytes: u64,
    },
    /// The host refused an access.
    #[error(
        "{what} cannot be made safe to share: {source}; see whether the host is out of files or disk space"
    )]
    Host {
        /// The file's use in the VM.
        what: &'static str,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

/// Checks that no process can change `file`, a file in memory, any more, and that its length is one of
/// `bytes`.
pub fn check_sealed(file: &File, what: &'static str, bytes: RangeInclusive<u64>) -> Result<(), HandedError> {
    check(file, what, bytes)?;
    let wanted = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    // SAFETY: takes no pointers. A file that has no seals answers with an error, which is a negative number.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & wanted != wanted {
        return Err(HandedError::Unsealed { what });
    }
    Ok(())
}

/// The content of `file`, which a shard has filled, for reading only: in the same file if no process has it
/// open for writing any more, otherwise in a copy in `directory`.
pub fn for_reading(
    file: File,
    what: &'static str,
    bytes: u64,
    directory: &Path,
) -> Result<File, HandedError> {
    check(&file, what, bytes..=bytes)?;
    let host = |source| HandedError::Host { what, source };
    let reader = reopen(&file).map_err(host)?;
    drop(file);
    let settled = if has_no_writer(&reader) {
        reader
    } else {
        let copy = nameless_file(directory).map_err(host)?;
        copy_scratch(&reader, &copy).map_err(host)?;
        reopen(&copy).map_err(host)?
    };
    // Until now a shard that kept the file could have cut it off.
    check(&settled, what, bytes..=bytes)?;
    Ok(settled)
}

fn check(file: &File, what: &'static str, bytes: RangeInclusive<u64>) -> Result<(), HandedError> {
    let about = file
        .metadata()
        .map_err(|source| HandedError::Host { what, source })?;
    if !about.is_file() {
        return Err(HandedError::Kind { what });
    }
    if !bytes.contains(&about.len()) {
        let bytes = about.len();
        return Err(HandedError::Length { what, bytes });
    }
    Ok(())
}

/// Opens the file again, for reading only; it need not have a name.
fn reopen(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Whether no process has the file open or mapped for writing: then the kernel grants a read lease, which is
/// returned at once. False, too, on file systems without leases. Not for files of `memfd_create`, whose first
/// writer the kernel does not count.
fn has_no_writer(reader: &File) -> bool {
    /// A constant of Linux; the crate `libc` has no name for it.
    const F_SETSIG: libc::c_int = 10;
    let set = |command, value: libc::c_int| {
        // SAFETY: takes no pointers.
        unsafe { libc::fcntl(reader.as_raw_fd(), command, value) == 0 }
    };
    // A process that opens the file for writing meanwhile breaks the lease; the usual signal for that would
    // end this process.
    set(F_SETSIG, libc::SIGURG)
        && set(libc::F_SETLEASE, libc::F_RDLCK)
        && set(libc::F_SETLEASE, libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const BYTES: u64 = 3 << 16;

    fn filled(directory: &Path) -> File {
        let file = nameless_file(directory).unwrap();
        file.set_len(BYTES).unwrap();
        file.write_all_at(b"frozen", 1 << 16).unwrap();
        file
    }

    fn content(file: &File) -> [u8; 6] {
        let mut bytes = [0; 6];
        file.read_exact_at(&mut bytes, 1 << 16).unwrap();
        bytes
    }

    #[test]
    fn a_frozen_disk_is_handed_on_for_reading_only() {
        let directory = tempfile::tempdir().unwrap();
        let reader = for_reading(filled(directory.path()), "a disk", BYTES, directory.path()).unwrap();
        let refused = reader.write_at(b"x", 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
        assert_eq!(reader.set_len(0).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(content(&reader), *b"frozen");
    }

    #[test]
    fn writer_that_a_shard_kept_does_not_reach_the_file_of_a_clone() {
        let directory = tempfile::tempdir().unwrap();
        let file = filled(directory.path());
        let kept = file.try_clone().unwrap();
        let reader = for_reading(file, "a disk", BYTES, directory.path()).unwrap();
        kept.write_all_at(b"forged", 1 << 16).unwrap();
        kept.set_len(0).unwrap();
        assert_eq!(content(&reader), *b"frozen");
        assert_eq!(reader.metadata().unwrap().len(), BYTES);
    }

    #[test]
    fn a_mapping_that_a_shard_kept_counts_as_a_writer() {
        let directory = tempfile::tempdir().unwrap();
        let file = filled(directory.path());
        let region: vm_memory::MmapRegion = vm_memory::MmapRegion::from_file(
            vm_memory::FileOffset::new(file.try_clone().unwrap(), 0),
            BYTES as usize,
        )
        .unwrap();
        let reader = reopen(&file).unwrap();
        drop(file);
        assert!(!has_no_writer(&reader));
        drop(region);
        assert!(has_no_writer(&reader));
    }

    #[test]
    fn a_disk_of_another_length_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = filled(directory.path());
        file.set_len(BYTES - 1).unwrap();
        let error = for_reading(file, "a disk", BYTES, directory.path()).unwrap_err();
        assert!(
            matches!(error, HandedError::Length { bytes, .. } if bytes == BYTES - 1),
            "{error}"
        );
    }
}
