//! FUSE messages in packets: lengths, headers, operations. Pure.
//!
//! The layout is that of `linux/fuse.h`, little endian as on x86-64.

/// Length of a request's header (`fuse_in_header`), bytes.
pub const REQUEST_HEADER_BYTES: usize = 40;
/// Length of a reply's header (`fuse_out_header`), bytes.
pub const REPLY_HEADER_BYTES: usize = 16;
/// Pages of data that a message carries at most; Linux's default for guests without a negotiated value.
pub const PAGES_MAX: u16 = 32;
/// Data that a message carries at most, bytes.
pub const DATA_BYTES_MAX: usize = PAGES_MAX as usize * 4096;
/// Length of a packet at most, bytes: data, and a page for headers and names. A socket's default buffer holds
/// 208 KiB.
pub const PACKET_BYTES_MAX: usize = DATA_BYTES_MAX + 4096;
/// Greatest number of an error in a reply.
const ERRNO_MAX: i32 = 4095;

/// Operations of FUSE that this crate names.
#[allow(missing_docs, reason = "the names are those of linux/fuse.h")]
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
}

/// Fields of a request's header that both sides read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Length of the whole request, bytes.
    pub length: u32,
    /// Operation.
    pub opcode: u32,
    /// Id of the request.
    pub unique: u64,
}

impl RequestHeader {
    /// Reads the header at the start of a request; none if it is cut.
    pub fn read(request: &[u8]) -> Option<Self> {
        let header = request.get(..REQUEST_HEADER_BYTES)?;
        Some(Self {
            length: u32_at(header, 0)?,
            opcode: u32_at(header, 4)?,
            unique: u64_at(header, 8)?,
        })
    }

    /// Whether the sender waits for a reply.
    pub fn has_reply(&self) -> bool {
        !matches!(
            self.opcode,
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT
        )
    }
}

/// Writes the id of a request into its header.
pub fn set_unique(request: &mut [u8], unique: u64) {
    if let Some(field) = request.get_mut(8..16) {
        field.copy_from_slice(&unique.to_le_bytes());
    }
}

/// Header of a reply (`fuse_out_header`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader {
    /// Length of the whole reply, bytes.
    pub length: u32,
    /// Zero, or the negative number of an error.
    pub error: i32,
    /// Id of the request.
    pub unique: u64,
}

impl ReplyHeader {
    /// Header of a reply that consists of an error's number.
    pub fn of_error(unique: u64, errno: i32) -> Self {
        Self {
            length: REPLY_HEADER_BYTES as u32,
            error: -errno,
            unique,
        }
    }

    /// Reads the header of a whole reply; none unless its length is that of the packet, and its error is a
    /// number of the kernel's, without data.
    pub fn of_packet(packet: &[u8]) -> Option<Self> {
        let header = Self {
            length: u32_at(packet, 0)?,
            error: u32_at(packet, 4)?.cast_signed(),
            unique: u64_at(packet, 8)?,
        };
        let is_whole = usize::try_from(header.length).is_ok_and(|length| length == packet.len());
        let is_plain = header.error == 0 || packet.len() == REPLY_HEADER_BYTES;
        let is_error = (-ERRNO_MAX..=0).contains(&header.error);
        (is_whole && is_plain && is_error).then_some(header)
    }

    /// Returns the bytes of the header.
    pub fn bytes(&self) -> [u8; REPLY_HEADER_BYTES] {
        let mut bytes = [0; REPLY_HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.error.to_le_bytes());
        bytes[8..].copy_from_slice(&self.unique.to_le_bytes());
        bytes
    }
}

/// Length of the packet that passes a file, bytes: a header that is a reply to nothing, and a node.
const LENT_FILE_BYTES: usize = REPLY_HEADER_BYTES + 8;

/// The packet with which the folder's process passes the open file of a node.
pub fn lent_file(node: u64) -> [u8; LENT_FILE_BYTES] {
    let header = ReplyHeader {
        length: LENT_FILE_BYTES as u32,
        error: 0,
        unique: 0,
    };
    let mut packet = [0; LENT_FILE_BYTES];
    packet[..REPLY_HEADER_BYTES].copy_from_slice(&header.bytes());
    packet[REPLY_HEADER_BYTES..].copy_from_slice(&node.to_le_bytes());
    packet
}

/// Returns the node if the packet is one of [`lent_file`].
pub fn lent_node(packet: &[u8]) -> Option<u64> {
    let header = ReplyHeader::of_packet(packet)?;
    let is_it = header.unique == 0 && packet.len() == LENT_FILE_BYTES;
    is_it.then(|| u64_at(packet, REPLY_HEADER_BYTES)).flatten()
}

/// Node of a request; none if its header is cut.
pub fn node_of(request: &[u8]) -> Option<u64> {
    u64_at(request, 16)
}

/// Offset in the file of a READ request; none if it is cut.
pub fn read_offset(request: &[u8]) -> Option<u64> {
    u64_at(request, REQUEST_HEADER_BYTES + 8)
}

/// Reads a number at an offset; none beyond the end.
pub fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let field = bytes.get(offset..offset.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

/// Reads a number at an offset; none beyond the end.
pub fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let field = bytes.get(offset..offset.checked_add(8)?)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}

/// Writes a number at an offset; nothing beyond the end.
pub fn set_u32_at(bytes: &mut [u8], offset: usize, value: u32) {
    if let Some(field) = bytes.get_mut(offset..offset.saturating_add(4)) {
        field.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reply_of_another_length_with_a_strange_error_or_with_data_beside_an_error_is_refused() {
        let good = ReplyHeader::of_error(7, libc::EIO);
        assert_eq!(ReplyHeader::of_packet(&good.bytes()), Some(good));
        let with = |change: fn(&mut ReplyHeader), more: usize| {
            let mut header = good;
            change(&mut header);
            let mut packet = header.bytes().to_vec();
            packet.extend(vec![0; more]);
            ReplyHeader::of_packet(&packet)
        };
        assert_eq!(with(|header| header.length = 17, 0), None);
        assert_eq!(with(|header| header.length = 15, 0), None);
        assert_eq!(with(|header| header.error = 5, 0), None);
        assert_eq!(with(|header| header.error = -4096, 0), None);
        assert_eq!(with(|header| header.error = i32::MIN, 0), None);
        assert_eq!(with(|header| header.length = 20, 4), None);
        let data = with(
            |header| {
                header.length = 20;
                header.error = 0;
            },
            4,
        );
        assert_eq!(data.map(|header| header.unique), Some(7));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = RequestHeader::read(&bytes);
            if let Some(header) = ReplyHeader::of_packet(&bytes) {
                prop_assert_eq!(header.length as usize, bytes.len());
            }
        }
    }
}
