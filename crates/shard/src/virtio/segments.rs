//! Memory of one descriptor chain in the form of the kernel's scatter-gather calls.
//!
//! A chain is checked whole before any byte of it is used. Every address must be inside guest memory and all
//! descriptors must have the queue's direction; a loop or more than [`SEGMENTS_MAX`] pieces are refused. A
//! violation is a protocol error.

use libc::iovec;
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{GuestMemory, GuestMemoryMmap, Permissions};

use super::device::DeviceError;

/// Greatest number of pieces of one chain: the limit of `readv` and `writev` (UIO_MAXIOV).
pub const SEGMENTS_MAX: usize = 1024;

/// Direction of a chain's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The driver wrote the bytes; the device reads them.
    FromDriver,
    /// The device writes the bytes.
    ToDriver,
}

/// Pieces of guest memory, in order. The owner keeps guest memory mapped as long as it uses them.
#[derive(Default)]
pub struct Segments {
    pieces: Vec<iovec>,
    bytes: usize,
}

// SAFETY: the pointers are to guest memory, which is shared with the vCPUs anyway and mapped for as long as
// the owner of the segments holds the guest's memory; nothing in them is tied to a thread.
unsafe impl Send for Segments {}

impl Segments {
    /// Returns the pieces for `readv` and `writev`; empty pieces are omitted.
    pub fn pieces(&self) -> &[iovec] {
        &self.pieces
    }

    /// Returns the sum of the pieces' lengths.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Removes all pieces.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
    }

    /// Removes the first `count` pieces, which have `bytes` bytes together.
    pub fn drop_front(&mut self, count: usize, bytes: usize) {
        self.pieces.drain(..count.min(self.pieces.len()));
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Appends a chain's pieces and returns the number of its pieces and bytes.
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
            self.push(memory, &descriptor)?;
            if descriptors > SEGMENTS_MAX || self.pieces.len() - first > SEGMENTS_MAX {
                return Err(broken("a chain has too many buffers"));
            }
        }
        // The iterator ends early at a loop, an invalid index or an invalid indirect table.
        if complete {
            Ok(())
        } else {
            Err(broken("a chain has a loop or leaves its table"))
        }
    }

    /// Returns the pieces of a request, and those for its reply: a chain's readable buffers, then its
    /// writable ones.
    pub fn of_request(
        memory: &GuestMemoryMmap<()>,
        chain: DescriptorChain<&GuestMemoryMmap<()>>,
    ) -> Result<(Self, Self), DeviceError> {
        let (mut request, mut reply) = (Self::default(), Self::default());
        let (mut descriptors, mut complete, mut replies) = (0_usize, false, false);
        for descriptor in chain {
            descriptors += 1;
            complete = !descriptor.has_next();
            match (descriptor.is_write_only(), replies) {
                (false, false) => request.push(memory, &descriptor)?,
                (true, _) => {
                    replies = true;
                    reply.push(memory, &descriptor)?;
                }
                (false, true) => return Err(broken("a readable buffer follows a writable one")),
            }
            let pieces = request.pieces.len() + reply.pieces.len();
            if descriptors > SEGMENTS_MAX || pieces > SEGMENTS_MAX {
                return Err(broken("a chain has too many buffers"));
            }
        }
        if complete {
            Ok((request, reply))
        } else {
            Err(broken("a chain has a loop or leaves its table"))
        }
    }

    /// Appends the pieces of one buffer.
    fn push(&mut self, memory: &GuestMemoryMmap<()>, descriptor: &Descriptor) -> Result<(), DeviceError> {
        let length = descriptor.len() as usize;
        if length == 0 {
            return Ok(());
        }
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
        Ok(())
    }

    /// Returns the addresses in this process and lengths of `length` bytes from byte `offset` on.
    pub fn ranges(&self, offset: usize, length: usize) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        self.walk(offset, length, |guest, _, count| {
            ranges.push((guest as u64, count as u64))
        });
        ranges
    }

    /// Copies `data` to the pieces from byte `offset` on; returns the number of copied bytes.
    pub fn write_at(&self, offset: usize, data: &[u8]) -> usize {
        self.walk(offset, data.len(), |guest, done, count| {
            // SAFETY: `walk` gives a range inside a piece, which was checked to be guest memory when it was
            // appended; `data[done..done + count]` is in bounds because `walk` never passes the length it
            // got.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr().add(done), guest, count) };
        })
    }

    /// Copies from the pieces from byte `offset` on to `data`; returns the number of copied bytes.
    pub fn read_at(&self, offset: usize, data: &mut [u8]) -> usize {
        let target = data.as_mut_ptr();
        self.walk(offset, data.len(), |guest, done, count| {
            // SAFETY: as in `write_at`, the other way; `target` is the start of `data`, borrowed for this
            // call.
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

fn broken(what: &str) -> DeviceError {
    DeviceError::Protocol(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::test_driver::{DriverQueue, memory};
    use virtio_queue::QueueT;
    use vm_memory::{Bytes, GuestAddress};

    /// The pieces of one chain of readable or writable buffers.
    fn append(buffers: &[(u64, u32)], writable: bool, direction: Direction) -> Result<Segments, DeviceError> {
        let memory = memory();
        for (address, length) in buffers {
            // Some tests use buffers outside memory.
            let _ = memory.write_slice(
                &vec![address.to_le_bytes()[1]; *length as usize],
                GuestAddress(*address),
            );
        }
        let mut driver = DriverQueue::new(&memory, 0);
        driver.add(buffers, writable);
        let mut queue = driver.active().queue;
        let chain = queue.pop_descriptor_chain(&*memory).unwrap();
        let mut segments = Segments::default();
        let counted = segments.append(&memory, chain, direction);
        // The mapping outlives the test.
        std::mem::forget(memory);
        match counted {
            Ok(counted) => {
                assert_eq!(counted, (segments.pieces().len(), segments.bytes()));
                Ok(segments)
            }
            Err(error) => {
                assert_eq!(
                    (segments.pieces().len(), segments.bytes()),
                    (0, 0),
                    "a refused chain leaves pieces"
                );
                Err(error)
            }
        }
    }

    #[test]
    fn bytes_are_copied_across_the_borders_of_pieces() {
        let buffers = [(0x10_0100, 3), (0x10_0200, 0), (0x10_0300, 4)];
        let segments = append(&buffers, false, Direction::FromDriver).unwrap();
        assert_eq!((segments.pieces().len(), segments.bytes()), (2, 7));
        let read = |offset: usize, count: usize| {
            let mut data = vec![0xFF; count];
            let done = segments.read_at(offset, &mut data);
            data.truncate(done);
            data
        };
        assert_eq!(read(0, 7), [1, 1, 1, 3, 3, 3, 3]);
        assert_eq!(read(2, 2), [1, 3]);
        assert_eq!(read(3, 9), [3, 3, 3, 3]);
        assert!(read(7, 1).is_empty());
        assert_eq!(segments.write_at(1, &[8, 9, 10]), 3);
        assert_eq!(read(0, 7), [1, 8, 9, 10, 3, 3, 3]);
        assert_eq!(segments.write_at(6, &[5, 5]), 1);
        assert_eq!(read(5, 2), [3, 5]);
    }

    #[test]
    fn pieces_are_dropped_from_the_front_or_all_at_once() {
        let buffers = [(0x10_0100, 3), (0x10_0300, 4)];
        let mut segments = append(&buffers, true, Direction::ToDriver).unwrap();
        segments.drop_front(1, 3);
        assert_eq!((segments.pieces().len(), segments.bytes()), (1, 4));
        let mut byte = [0];
        assert_eq!((segments.read_at(0, &mut byte), byte), (1, [3]));
        segments.clear();
        assert_eq!((segments.pieces().len(), segments.bytes()), (0, 0));
    }

    #[test]
    fn a_chain_is_taken_whole_or_not_at_all() {
        for (writable, direction) in [(true, Direction::FromDriver), (false, Direction::ToDriver)] {
            assert!(append(&[(0x10_0000, 16)], writable, direction).is_err());
        }
        // The second buffer ends one byte past the end of memory.
        let outside = [(0x10_0000, 16), ((8 << 20) - 15, 16)];
        assert!(append(&outside, false, Direction::FromDriver).is_err());
        let inside = [(0x10_0000, 16), ((8 << 20) - 16, 16)];
        assert!(append(&inside, false, Direction::FromDriver).is_ok());
    }
}
