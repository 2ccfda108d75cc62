//! Decodes one request from a descriptor chain. Reads nothing but the header and the ranges.
//!
//! The driver chooses the framing (Virtio 1.2, section 2.7.4.3): the header is the first 16 readable bytes
//! and the status the last writable byte, at any borders of descriptors.

use diskstore::disk::{Operation, SECTOR_BYTES, Segments};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use crate::virtio::DeviceError;

/// Bytes of `struct virtio_blk_req` before the data.
const HEADER_BYTES: u64 = 16;
/// Bytes of `struct virtio_blk_discard_write_zeroes`.
const RANGE_BYTES: u64 = 16;
/// Greatest number of a request's buffers; more than any driver that respects `seg_max` uses.
const BUFFERS_MAX: usize = 512;
/// Greatest number of memory pieces in one call of the kernel (UIO_MAXIOV).
const PIECES_MAX: usize = 1024;
/// Greatest range of one discard or write-zeroes, in sectors: 512 MiB.
pub(super) const RANGE_SECTORS_MAX: u32 = 1 << 20;

/// Properties of a disk that requests depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Disk {
    pub sectors: u64,
    pub read_only: bool,
    pub id: [u8; VIRTIO_BLK_ID_BYTES as usize],
}

/// A request that can be completed.
#[derive(Debug)]
pub(super) struct Request {
    /// Address of the status byte.
    pub status: GuestAddress,
    pub action: Action,
}

/// Action that a request requires.
#[derive(Debug)]
pub(super) enum Action {
    /// Perform this operation. A read fills the given number of bytes of the driver's buffers.
    Io(Operation),
    /// Write the disk's name to this memory.
    Name(Segments),
    /// Refuse with this status.
    Refuse(u8),
}

impl Action {
    /// Returns the bytes that it reads from the disk, or writes there.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Io(Operation::Read { into, .. }) => into.bytes(),
            Self::Io(Operation::Write { from, .. }) => from.bytes(),
            Self::Io(_) | Self::Name(_) | Self::Refuse(_) => 0,
        }
    }
}

const FAILED: Action = Action::Refuse(VIRTIO_BLK_S_IOERR as u8);
const UNSUPPORTED: Action = Action::Refuse(VIRTIO_BLK_S_UNSUPP as u8);

/// The buffers of a chain, kept for reuse.
#[derive(Debug, Default)]
pub(super) struct Parser {
    readable: Vec<(GuestAddress, u64)>,
    writable: Vec<(GuestAddress, u64)>,
}

impl Parser {
    /// Reads a chain. Fails if the request cannot be completed.
    pub fn parse(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        chain: DescriptorChain<&GuestMemoryMmap<()>>,
        disk: &Disk,
    ) -> Result<Request, DeviceError> {
        let too_many = self.collect(chain)?;
        let status = self.take_status()?;
        let action = if too_many {
            FAILED
        } else {
            self.action(memory, disk)
        };
        Ok(Request { status, action })
    }

    /// Sorts the buffers. Returns true if there are more than [`BUFFERS_MAX`]; then the last writable one is
    /// kept.
    fn collect(&mut self, chain: DescriptorChain<&GuestMemoryMmap<()>>) -> Result<bool, DeviceError> {
        self.readable.clear();
        self.writable.clear();
        let (mut complete, mut too_many) = (false, false);
        for descriptor in chain {
            complete = !descriptor.has_next();
            let buffer = (descriptor.addr(), u64::from(descriptor.len()));
            let list = match (descriptor.is_write_only(), self.writable.is_empty()) {
                (true, _) => &mut self.writable,
                (false, true) => &mut self.readable,
                (false, false) => return Err(broken("a readable buffer follows a writable one")),
            };
            if buffer.1 == 0 {
                continue;
            }
            if list.len() == BUFFERS_MAX {
                too_many = true;
                list.pop();
            }
            list.push(buffer);
        }
        // The iterator ends early at a loop, an invalid index or an invalid indirect table.
        if complete {
            Ok(too_many)
        } else {
            Err(broken("a chain has a loop or leaves its table"))
        }
    }

    /// Removes the status byte from the writable buffers.
    fn take_status(&mut self) -> Result<GuestAddress, DeviceError> {
        let last = self
            .writable
            .last_mut()
            .ok_or_else(|| broken("a request has no place for its status"))?;
        last.1 -= 1;
        let status = last
            .0
            .0
            .checked_add(last.1)
            .ok_or_else(|| broken("a buffer wraps around"))?;
        if last.1 == 0 {
            self.writable.pop();
        }
        Ok(GuestAddress(status))
    }

    fn action(&mut self, memory: &GuestMemoryMmap<()>, disk: &Disk) -> Action {
        let mut header = [0; HEADER_BYTES as usize];
        if !self.take_readable(memory, &mut header) {
            return FAILED;
        }
        let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        match u32::from_le_bytes([k0, k1, k2, k3]) {
            VIRTIO_BLK_T_IN => transfer(memory, &self.writable, sector, disk)
                .map_or(FAILED, |(offset, into)| {
                    Action::Io(Operation::Read { offset, into })
                }),
            VIRTIO_BLK_T_OUT if disk.read_only => FAILED,
            VIRTIO_BLK_T_OUT => transfer(memory, &self.readable, sector, disk)
                .map_or(FAILED, |(offset, from)| {
                    Action::Io(Operation::Write { offset, from })
                }),
            VIRTIO_BLK_T_FLUSH => Action::Io(Operation::Flush),
            VIRTIO_BLK_T_GET_ID => segments(memory, &self.writable).map_or(FAILED, Action::Name),
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if disk.read_only => FAILED,
            VIRTIO_BLK_T_DISCARD => self.range(memory, disk, |offset, bytes, flags| match flags {
                0 => Action::Io(Operation::Discard { offset, bytes }),
                _ => UNSUPPORTED,
            }),
            VIRTIO_BLK_T_WRITE_ZEROES => self.range(memory, disk, |offset, bytes, flags| match flags {
                0 => Action::Io(Operation::WriteZeroes {
                    offset,
                    bytes,
                    unmap: false,
                }),
                VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP => Action::Io(Operation::WriteZeroes {
                    offset,
                    bytes,
                    unmap: true,
                }),
                _ => UNSUPPORTED,
            }),
            _ => UNSUPPORTED,
        }
    }

    /// Reads the one range of a discard or write-zeroes.
    fn range(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        disk: &Disk,
        action: impl FnOnce(u64, u64, u32) -> Action,
    ) -> Action {
        let mut range = [0; RANGE_BYTES as usize];
        // One range per request, as the configuration space states.
        if !self.take_readable(memory, &mut range) || !self.readable.is_empty() {
            return FAILED;
        }
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = range;
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
        let end = sector.checked_add(u64::from(sectors));
        if sectors == 0 || sectors > RANGE_SECTORS_MAX || end.is_none_or(|end| end > disk.sectors) {
            return FAILED;
        }
        action(
            sector * SECTOR_BYTES,
            u64::from(sectors) * SECTOR_BYTES,
            u32::from_le_bytes(flags),
        )
    }

    /// Moves the first readable bytes to `into`; returns false if there are too few or they lie outside
    /// memory.
    fn take_readable(&mut self, memory: &GuestMemoryMmap<()>, into: &mut [u8]) -> bool {
        let mut done = 0;
        let mut used = 0;
        for (address, length) in &mut self.readable {
            if done == into.len() {
                break;
            }
            let take = (*length).min((into.len() - done) as u64);
            // `take` is at most the length of `into`.
            let part = &mut into[done..done + take as usize];
            if memory.read_slice(part, *address).is_err() {
                return false;
            }
            done += take as usize;
            *length -= take;
            // Cannot overflow: the bytes up to here were just read.
            address.0 = address.0.wrapping_add(take);
            used += usize::from(*length == 0);
        }
        self.readable.drain(..used);
        done == into.len()
    }
}

/// Checks a transfer's range and gathers its memory.
fn transfer(
    memory: &GuestMemoryMmap<()>,
    buffers: &[(GuestAddress, u64)],
    sector: u64,
    disk: &Disk,
) -> Option<(u64, Segments)> {
    // No overflow: the iterator of the chain ends it at 4 GiB.
    let bytes: u64 = buffers.iter().map(|(_, length)| length).sum();
    let end = sector.checked_add(bytes / SECTOR_BYTES)?;
    if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) || end > disk.sectors {
        return None;
    }
    Some((sector * SECTOR_BYTES, segments(memory, buffers)?))
}

/// Returns the memory of buffers; `None` if any of it is outside guest memory.
fn segments(memory: &GuestMemoryMmap<()>, buffers: &[(GuestAddress, u64)]) -> Option<Segments> {
    let mut segments = Segments::new();
    for (address, length) in buffers {
        let length = usize::try_from(*length).ok()?;
        for slice in memory.get_slices(*address, length, Permissions::ReadWrite).ok()? {
            let slice = slice.ok()?;
            // SAFETY: guest memory, mapped for as long as the handler holds the activation's `GuestRam`; the
            // handler waits for all its I/O before it releases it. No Rust reference to guest memory
            // exists.
            unsafe { segments.push(slice.ptr_guard_mut().as_ptr(), slice.len()) };
        }
    }
    (segments.count() <= PIECES_MAX).then_some(segments)
}

fn broken(what: &str) -> DeviceError {
    DeviceError::Protocol(what.to_owned())
}
