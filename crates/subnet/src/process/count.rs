//! Number of frames that a card's filter has dropped: eight bytes in memory that its process writes and the
//! monitor reads.
//!
//! The monitor therefore reads no messages of a process that a guest may have compromised, and the count
//! outlives that process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

const BYTES: usize = 8;
/// Seals of the file: its writer can neither enlarge nor shrink it.
const SEALS: SealFlag = SealFlag::F_SEAL_GROW
    .union(SealFlag::F_SEAL_SHRINK)
    .union(SealFlag::F_SEAL_SEAL);

/// A count in a file in memory.
#[derive(Debug)]
pub struct Count(File);

impl Count {
    /// Creates a count of 0.
    ///
    /// # Errors
    /// Fails if the host has no files or memory left.
    pub fn new() -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"filtered", flags)?);
        file.set_len(BYTES as u64)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
        Ok(Self(file))
    }

    /// Adopts the count of a predecessor.
    ///
    /// # Errors
    /// Fails if the file differs from those of [`Count::new`].
    pub fn adopt(file: OwnedFd) -> io::Result<Self> {
        let file = File::from(file);
        let seals = SealFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SEALS) || file.metadata()?.len() != BYTES as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self(file))
    }

    /// Returns the count, which is only as trustworthy as its writer.
    pub fn get(&self) -> u64 {
        let mut bytes = [0; BYTES];
        // The file has these bytes as long as it exists.
        let _ = self.0.read_exact_at(&mut bytes, 0);
        u64::from_le_bytes(bytes)
    }
}

impl AsFd for Count {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_is_what_its_writer_wrote_and_its_file_stays_small() {
        let count = Count::new().unwrap();
        assert_eq!(count.get(), 0);
        let writer = File::from(count.as_fd().try_clone_to_owned().unwrap());
        writer.write_all_at(&7_u64.to_le_bytes(), 0).unwrap();
        assert_eq!(count.get(), 7);
        assert!(writer.write_all_at(&[0], BYTES as u64).is_err());
        assert!(writer.set_len(0).is_err() && writer.set_len(1 << 20).is_err());
        assert_eq!(count.get(), 7);
    }

    #[test]
    fn adopted_count_reads_later_writes() {
        let count = Count::new().unwrap();
        let copy = || count.as_fd().try_clone_to_owned().unwrap();
        let (writer, adopted) = (File::from(copy()), Count::adopt(copy()).unwrap());
        for number in [7_u64, 8] {
            writer.write_all_at(&number.to_le_bytes(), 0).unwrap();
            assert_eq!((adopted.get(), count.get()), (number, number));
        }
    }

    #[test]
    fn file_that_is_no_count_is_not_adopted() {
        assert!(Count::adopt(File::open("/dev/null").unwrap().into()).is_err());
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memory = || File::from(memfd_create(c"other", flags).unwrap());
        let unsealed = memory();
        unsealed.set_len(BYTES as u64).unwrap();
        assert!(Count::adopt(unsealed.into()).is_err());
        let empty = memory();
        fcntl(&empty, FcntlArg::F_ADD_SEALS(SEALS)).unwrap();
        assert!(Count::adopt(empty.into()).is_err());
    }
}
