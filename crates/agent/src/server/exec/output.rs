//! Output of a program.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;

use crate::protocol::Kind;
use crate::server::kept::Chunk;

/// One output of the program: a pipe, or its terminal.
pub(super) struct Output {
    pub(super) kind: Kind,
    pub(super) file: Option<File>,
    /// Set when the program has ended: bytes in the pipe at that time, which must be sent.
    pub(super) owed: usize,
}

impl Output {
    /// Records how much output is still in the pipe when the program has ended.
    pub(super) fn settle(&mut self) {
        let Some(file) = &self.file else { return };
        let mut bytes: libc::c_int = 0;
        // SAFETY: FIONREAD writes one int to `bytes`, which outlives the call.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::FIONREAD, &mut bytes) };
        if result == 0 {
            self.owed = bytes.max(0) as usize;
        }
    }

    /// Reads some output.
    pub(super) fn read(&mut self) -> Option<Chunk> {
        let file = self.file.as_mut()?;
        let mut buffer = [0; 32 << 10];
        match file.read(&mut buffer) {
            Ok(length) if length > 0 => {
                self.owed = self.owed.saturating_sub(length);
                return Some((self.kind, buffer[..length].to_vec()));
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                self.owed = 0;
            }
            // The end of the output; a terminal reports it by an error.
            _ => {
                self.file = None;
                self.owed = 0;
            }
        }
        None
    }
}
