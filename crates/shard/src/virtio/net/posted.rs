//! Receive buffers that the guest has posted and the device has taken from the ring, but not filled yet.
//!
//! They are kept between frames. A small frame therefore costs the parsing of one chain, instead of the 43
//! chains that the largest frame may need.

use std::collections::VecDeque;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use super::header::NUM_BUFFERS_OFFSET;
use crate::virtio::device::DeviceError;
use crate::virtio::segments::{Direction, SEGMENTS_MAX, Segments};

struct Buffer {
    head: u16,
    pieces: usize,
    bytes: usize,
}

/// Receive buffers in the order in which the guest posted them.
pub struct Posted {
    buffers: VecDeque<Buffer>,
    segments: Segments,
    mergeable: bool,
}

impl Posted {
    /// Creates an empty list. `mergeable` means that one frame may span several buffers
    /// (VIRTIO_NET_F_MRG_RXBUF).
    pub fn new(mergeable: bool) -> Self {
        Self {
            buffers: VecDeque::new(),
            segments: Segments::default(),
            mergeable,
        }
    }

    /// Takes buffers from the ring until a frame and its header of `wanted` bytes fit. Returns false if the
    /// guest has not posted enough yet. If it never can, its buffers are accepted as they are.
    pub fn fill(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        queue: &mut Queue,
        wanted: usize,
    ) -> Result<bool, DeviceError> {
        let size = usize::from(queue.size());
        if self.enough(wanted) {
            return Ok(true);
        }
        let chains = queue
            .iter(memory)
            .map_err(|error| DeviceError::Protocol(error.to_string()))?;
        for chain in chains {
            let head = chain.head_index();
            let (pieces, bytes) = self.segments.append(memory, chain, Direction::ToDriver)?;
            self.buffers.push_back(Buffer { head, pieces, bytes });
            if self.buffers.len() > size {
                return Err(DeviceError::Protocol(
                    "more receive buffers than the queue has".to_owned(),
                ));
            }
            if self.enough(wanted) {
                return Ok(true);
            }
        }
        Ok(self.buffers.len() == size)
    }

    fn enough(&self, wanted: usize) -> bool {
        if self.mergeable {
            self.segments.bytes() >= wanted || self.segments.pieces().len() >= SEGMENTS_MAX
        } else {
            // The guest chooses the size of its only buffer for a frame; a frame that does not fit is
            // dropped.
            !self.buffers.is_empty()
        }
    }

    /// Returns the memory for the next frame: all buffers if they merge, else the first.
    pub fn room(&self) -> &[libc::iovec] {
        let pieces = self.segments.pieces();
        let count = if self.mergeable {
            pieces.len()
        } else {
            self.buffers.front().map_or(0, |first| first.pieces)
        };
        &pieces[..count.min(SEGMENTS_MAX)]
    }

    /// Returns the number of bytes of [`Posted::room`].
    pub fn room_bytes(&self) -> usize {
        self.room().iter().map(|piece| piece.iov_len).sum()
    }

    /// Copies `data` to byte `offset` of the next frame's memory.
    pub fn write_at(&self, offset: usize, data: &[u8]) {
        self.segments.write_at(offset, data);
    }

    /// Returns the buffers with the first `bytes` bytes to the guest, after setting the header's
    /// `num_buffers`.
    pub fn deliver(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        queue: &mut Queue,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let mut count: u16 = 0;
        let mut covered = 0;
        for buffer in &self.buffers {
            count += 1;
            covered += buffer.bytes;
            if covered >= bytes {
                break;
            }
        }
        self.segments.write_at(NUM_BUFFERS_OFFSET, &count.to_le_bytes());
        let mut left = bytes;
        for _ in 0..count {
            let Some(buffer) = self.buffers.pop_front() else {
                break;
            };
            let used = buffer.bytes.min(left);
            left -= used;
            self.segments.drop_front(buffer.pieces, buffer.bytes);
            // `used` is at most the frame's size, far below 4 GiB.
            queue
                .add_used(memory, buffer.head, used as u32)
                .map_err(|error| DeviceError::Protocol(error.to_string()))?;
        }
        Ok(())
    }
}
