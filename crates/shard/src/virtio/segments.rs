//! The memory behind one descriptor chain, as the kernel's scatter-gather calls take it.
//!
//! A chain is checked whole before any byte of it is used: every address inside guest memory, all descriptors of the
//! one direction the queue is for, no loop, at most [`SEGMENTS_MAX`] pieces. What is not so is a protocol error.

use libc::iovec;
use virtio_queue::DescriptorChain;
use vm_memory::{GuestMemory, GuestMemoryMmap, Permissions};

use super::device::DeviceError;

/// The most pieces one chain may have: what `readv` and `writev` take at once (UIO_MAXIOV).
pub const SEGMENTS_MAX: usize = 1024;

/// Who writes the bytes of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The driver wrote them; the device reads.
    FromDriver,
    /// The device writes them.
    ToDriver,
}

/// Pieces of guest memory, in order. The owner keeps the guest's memory mapped for as long as it uses them.
#[derive(Default)]
pub struct Segments {
    pieces: Vec<iovec>,
    bytes: usize,
}

// SAFETY: the pointers are to guest memory, which is shared with the vCPUs anyway and mapped for as long as the owner
// of the segments holds the guest's memory; nothing in them is tied to a thread.
unsafe impl Send for Segments {}

impl Segments {
    /// The pieces as `readv` and `writev` take them; empty pieces are left out.
    pub fn pieces(&self) -> &[iovec] {
        &self.pieces
    }

    /// The sum of the pieces' lengths.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets all pieces.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
    }

    /// Forgets the first `count` pieces, which have `bytes` bytes together.
    pub fn drop_front(&mut self, count: usize, bytes: usize) {
        self.pieces.drain(..count.min(self.pieces.len()));
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Appends a chain's pieces and returns how many pieces and bytes it had.
    pub fn append(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        chain: DescriptorChain<&GuestMemoryMmap<()>>,
        direction: Direction,
    ) -> Result<(usize, usize), DeviceError> {
        let (pieces_before, bytes_before) = (self.pieces.len(), self.bytes);
        let result = self.append_checked(memory, chain, direction);
        if result.is_err() {
            self.pieces.truncate(pieces_before);
            self.bytes = bytes_before;
        }
        result.map(|()| (self.pieces.len() - pieces_before, self.bytes - bytes_before))
    }

    fn append_checked(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        chain: DescriptorChain<&GuestMemoryMmap<()>>,
        direction: Direction,
    ) -> Result<(), DeviceError> {
        let broken = |what: &str| DeviceError::Protocol(what.to_owned());
        let first = self.pieces.len();
        let mut descriptors = 0_usize;
        let mut complete = false;
        for descriptor in chain {
            descriptors += 1;
            complete = !descriptor.has_next();
            if descriptor.is_write_only() != (direction == Direction::ToDriver) {
                return Err(broken(
                    "a buffer is writable where it must be readable, or the reverse",
                ));
            }
            let length = descriptor.len() as usize;
            if length > 0 {
                let slices = memory
                    .get_slices(descriptor.addr(), length, Permissions::ReadWrite)
                    .map_err(|_| broken("a buffer lies outside memory"))?;
                for slice in slices {
                    let slice = slice.map_err(|_| broken("a buffer lies outside memory"))?;
                    let base = slice.ptr_guard_mut().as_ptr().cast();
                    self.pieces.push(iovec {
                        iov_base: base,
                        iov_len: slice.len(),
                    });
                    // No overflow: the iterator of the chain ends it at 4 GiB.
                    self.bytes += slice.len();
                }
            }
            if descriptors > SEGMENTS_MAX || self.pieces.len() - first > SEGMENTS_MAX {
                return Err(broken("a chain has too many buffers"));
            }
        }
        // The iterator ends early at a loop, a wild index or a wild indirect table.
        if complete {
            Ok(())
        } else {
            Err(broken("a chain has a loop or leaves its table"))
        }
    }

    /// Copies `data` to the pieces from byte `offset` on; returns how much fitted.
    pub fn write_at(&self, offset: usize, data: &[u8]) -> usize {
        self.walk(offset, data.len(), |guest, done, count| {
            // SAFETY: `walk` gives a range inside a piece, which was checked to be guest memory when it was appended;
            // `data[done..done + count]` is in bounds because `walk` never passes the length it got.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr().add(done), guest, count) };
        })
    }

    /// Copies from the pieces from byte `offset` on to `data`; returns how much there was.
    pub fn read_at(&self, offset: usize, data: &mut [u8]) -> usize {
        let target = data.as_mut_ptr();
        self.walk(offset, data.len(), |guest, done, count| {
            // SAFETY: as in `write_at`, the other way; `target` is the start of `data`, borrowed for this call.
            unsafe { std::ptr::copy_nonoverlapping(guest, target.add(done), count) };
        })
    }

    fn walk(&self, mut offset: usize, length: usize, mut visit: impl FnMut(*mut u8, usize, usize)) -> usize {
        let mut done = 0;
        for piece in &self.pieces {
            if done == length {
                break;
            }
            if offset >= piece.iov_len {
                offset -= piece.iov_len;
                continue;
            }
            let count = (piece.iov_len - offset).min(length - done);
            visit(piece.iov_base.cast::<u8>().wrapping_add(offset), done, count);
            done += count;
            offset = 0;
        }
        done
    }
}
