//! Output of a process that a guest may have compromised: a file in memory of fixed length.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Length of the file, bytes.
const BYTES: u64 = 4096;

/// Output of a process, as text for people.
#[derive(Debug)]
pub struct BoundedLog(File);

impl BoundedLog {
    /// Creates an empty file that keeps its length, whatever the process writes.
    ///
    /// # Errors
    /// Fails if the host has no descriptors or no memory left.
    pub fn new() -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let log = File::from(memfd_create(c"log", flags)?);
        log.set_len(BYTES)?;
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&log, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(Self(log))
    }

    /// Takes over the file of a process that a predecessor started.
    pub fn adopt(file: OwnedFd) -> Self {
        Self(file.into())
    }

    /// Duplicates the file, for the process's standard error.
    ///
    /// # Errors
    /// Fails if the host has no descriptors left.
    pub fn writer(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// Returns what the process wrote; of a longer text, the start.
    pub fn text(&self) -> String {
        let mut bytes = [0; BYTES as usize];
        let count = self.0.read_at(&mut bytes, 0).unwrap_or(0);
        let text = bytes[..count].split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }
}

impl AsFd for BoundedLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn log_keeps_the_start_of_what_is_written_and_never_grows() {
        let log = BoundedLog::new().unwrap();
        assert_eq!(log.text(), "");
        let mut writer = log.writer().unwrap();
        writer.write_all(b"first\nlast\n").unwrap();
        assert_eq!(log.text(), "first\nlast\n");
        assert!(writer.write_all(&[b'x'; 2 * BYTES as usize]).is_err());
        assert_eq!(log.text().len(), BYTES as usize);
        assert!(writer.set_len(2 * BYTES).is_err());
    }
}
