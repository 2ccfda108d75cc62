//! The last bytes of a console, in a file in memory that a monitor leaves to its successor.
//!
//! ```text
//!   total: u64 | the bytes, at their number modulo the capacity
//! ```
//!
//! The bytes are written before the total that counts them, so a monitor that is killed in between loses
//! those bytes alone. The file has holes where no byte has been written, so it takes as much memory as bytes
//! have come.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

/// Number of kept bytes.
pub(super) const KEPT_BYTES: u64 = 1 << 20;
/// Offset of the bytes in the file.
const BYTES_AT: u64 = size_of::<u64>() as u64;

/// The last [`KEPT_BYTES`] of a console.
#[derive(Debug)]
pub(super) struct Ring {
    file: File,
    /// Number of bytes that ever came.
    total: u64,
}

impl Ring {
    /// Makes an empty ring.
    ///
    /// # Errors
    /// If the host has no files left.
    pub(super) fn new() -> io::Result<Self> {
        let file = File::from(memfd_create(c"console", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(BYTES_AT + KEPT_BYTES)?;
        Ok(Self { file, total: 0 })
    }

    /// Takes over the ring of a predecessor.
    ///
    /// # Errors
    /// If the file is too short for a ring.
    pub(super) fn adopt(file: OwnedFd) -> io::Result<Self> {
        let file = File::from(file);
        let mut total = [0; BYTES_AT as usize];
        file.read_exact_at(&mut total, 0)?;
        Ok(Self {
            file,
            total: u64::from_le_bytes(total),
        })
    }

    /// Number of bytes that ever came.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The number of the oldest byte that is kept.
    pub(super) fn oldest(&self) -> u64 {
        self.total.saturating_sub(KEPT_BYTES)
    }

    /// Adds bytes. Those for which the host has no memory are lost: the guest runs on.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        let total = self.total + bytes.len() as u64;
        let kept = &bytes[bytes.len().saturating_sub(KEPT_BYTES as usize)..];
        let first = total - kept.len() as u64;
        for piece in pieces(first, kept.len() as u64) {
            let (begin, end) = ((piece.start - first) as usize, (piece.end - first) as usize);
            let _ = self
                .file
                .write_all_at(&kept[begin..end], BYTES_AT + piece.start % KEPT_BYTES);
        }
        self.total = total;
        let _ = self.file.write_all_at(&total.to_le_bytes(), 0);
    }

    /// The bytes from number `from` on, `most` at most, and the number of lost bytes before them.
    pub(super) fn after(&self, from: u64, most: u64) -> (Vec<u8>, u64) {
        let start = from.max(self.oldest()).min(self.total);
        let count = most.min(self.total - start);
        let mut bytes = vec![0; count as usize];
        for piece in pieces(start, count) {
            let (begin, end) = ((piece.start - start) as usize, (piece.end - start) as usize);
            // Bytes that can't be read stay zero.
            let _ = self
                .file
                .read_exact_at(&mut bytes[begin..end], BYTES_AT + piece.start % KEPT_BYTES);
        }
        (bytes, start.saturating_sub(from))
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The runs of `count` bytes from number `start` on that are contiguous in the file: one, or two.
fn pieces(start: u64, count: u64) -> impl Iterator<Item = std::ops::Range<u64>> {
    let wrap = (start / KEPT_BYTES + 1) * KEPT_BYTES;
    let (end, middle) = (start + count, wrap.min(start + count));
    [start..middle, middle..end]
        .into_iter()
        .filter(|piece| !piece.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_keeps_the_last_bytes_in_order_wherever_it_wraps() {
        let mut ring = Ring::new().unwrap();
        let mut all: Vec<u8> = Vec::new();
        for (round, length) in [3, 700_000, 400_000, 1, 1 << 20, (2 << 20) + 7, 12]
            .into_iter()
            .enumerate()
        {
            let bytes: Vec<u8> = (0..length).map(|byte: usize| (byte * 7 + round) as u8).collect();
            ring.add(&bytes);
            all.extend(&bytes);
            let kept = all.len().min(KEPT_BYTES as usize);
            let oldest = (all.len() - kept) as u64;
            assert_eq!((ring.total(), ring.oldest()), (all.len() as u64, oldest));
            let (bytes, lost) = ring.after(0, u64::MAX);
            assert_eq!(lost, oldest);
            assert!(bytes == all[all.len() - kept..], "round {round}");
            let (bytes, lost) = ring.after(ring.total() - 3, 2);
            assert_eq!((bytes, lost), (all[all.len() - 3..][..2].to_vec(), 0));
        }
        assert_eq!(ring.after(ring.total() + 5, 9), (Vec::new(), 0));
    }

    #[test]
    fn successor_reads_what_its_predecessor_kept_and_adds_to_it() {
        let mut ring = Ring::new().unwrap();
        ring.add(b"before ");
        let mut successor = Ring::adopt(ring.as_fd().try_clone_to_owned().unwrap()).unwrap();
        drop(ring);
        successor.add(b"and after");
        assert_eq!(successor.after(0, u64::MAX), (b"before and after".to_vec(), 0));
    }

    #[test]
    fn empty_ring_takes_little_memory() {
        use std::os::unix::fs::MetadataExt;
        let mut ring = Ring::new().unwrap();
        ring.add(b"one line\n");
        assert!(ring.file.metadata().unwrap().blocks() * 512 <= 4096);
    }
}
