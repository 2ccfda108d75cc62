//! The number of frames that a card's filter has dropped: eight bytes in memory that its process writes and
//! the monitor reads.
//!
//! So the monitor reads no messages of a process that a guest may have taken over, and the count outlives
//! that process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

const BYTES: usize = 8;

/// A count in a file in memory.
#[derive(Debug)]
pub struct Count(File);

impl Count {
    /// A count of 0.
    ///
    /// # Errors
    /// If the host has no more files or memory.
    pub fn new() -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"filtered", flags)?);
        file.set_len(BYTES as u64)?;
        // Its writer can neither make it large nor take it away.
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(Self(file))
    }

    /// The count, which is only as true as its writer.
    pub fn get(&self) -> u64 {
        let mut bytes = [0; BYTES];
        // The file has these bytes as long as it is there.
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
}
