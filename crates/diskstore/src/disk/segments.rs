//! Memory that an I/O reads or fills: a list of pieces, usually of a guest.

use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;

/// Pieces of memory that an I/O reads or fills, in order.
///
/// The memory is shared with a guest that may change it at any time. It is only passed to the kernel or
/// copied, never interpreted.
#[derive(Debug, Default)]
pub struct Segments {
    pieces: Vec<libc::iovec>,
    bytes: u64,
    _shared: PhantomData<*mut u8>,
}

// SAFETY: a piece is a plain address; the caller of `push` guarantees that it is valid on any thread until
// the I/O ends.
unsafe impl Send for Segments {}

impl Segments {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a piece.
    ///
    /// # Safety
    /// The memory must stay mapped, readable, and writable where I/O reads into it, until that I/O is
    /// complete. No Rust reference to it may be relied on meanwhile.
    pub unsafe fn push(&mut self, start: *mut u8, bytes: usize) {
        if bytes > 0 {
            self.pieces.push(libc::iovec {
                iov_base: start.cast(),
                iov_len: bytes,
            });
            self.bytes += bytes as u64;
        }
    }

    /// Total bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of pieces.
    pub fn count(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the pieces as I/O vectors.
    pub fn iovecs(&self) -> &[libc::iovec] {
        &self.pieces
    }

    /// Returns the part of `bytes` bytes from `start`, cut to the available bytes.
    pub fn part(&self, start: u64, bytes: u64) -> Self {
        let mut part = Self::new();
        let (mut skip, mut left) = (start, bytes);
        for piece in &self.pieces {
            let length = piece.iov_len as u64;
            if skip >= length {
                skip -= length;
                continue;
            }
            let take = (length - skip).min(left);
            if take == 0 {
                break;
            }
            // SAFETY: inside a piece of `self`, whose pusher guaranteed its validity.
            unsafe { part.push(piece.iov_base.cast::<u8>().add(skip as usize), take as usize) };
            (skip, left) = (0, left - take);
        }
        part
    }

    /// Fills everything with zeroes.
    pub fn zero(&self) {
        for piece in &self.pieces {
            // SAFETY: the caller of `push` guaranteed that the memory is writable.
            unsafe { std::ptr::write_bytes(piece.iov_base.cast::<u8>(), 0, piece.iov_len) };
        }
    }

    /// Returns the pieces as sources of a write.
    pub(super) fn sources(&self) -> Vec<IoSlice<'_>> {
        self.pieces
            .iter()
            // SAFETY: readable by the guarantee of `push`. A guest may change the bytes: they only go to the
            // kernel.
            .map(|piece| unsafe {
                IoSlice::new(std::slice::from_raw_parts(piece.iov_base.cast(), piece.iov_len))
            })
            .collect()
    }

    /// Returns the pieces as targets of a read.
    pub(super) fn targets(&self) -> Vec<IoSliceMut<'_>> {
        self.pieces
            .iter()
            // SAFETY: writable by the guarantee of `push`. A guest may change the bytes: they only come from
            // the kernel.
            .map(|piece| unsafe {
                IoSliceMut::new(std::slice::from_raw_parts_mut(
                    piece.iov_base.cast(),
                    piece.iov_len,
                ))
            })
            .collect()
    }
}
