//! The reply to a guest's INIT request: version, features and limits of the connection. Pure.

use crate::packet::{
    DATA_BYTES_MAX, PAGES_MAX, REPLY_HEADER_BYTES, REQUEST_HEADER_BYTES, ReplyHeader, u32_at,
};

/// Major version of the protocol.
const MAJOR: u32 = 7;
/// Minor version that this server speaks.
const MINOR: u32 = 33;
/// Oldest minor version that is served: that of Linux 5.4, the first with virtio-fs.
const MINOR_MIN: u32 = 31;
/// Length of the reply's body (`fuse_init_out`), bytes.
const BODY_BYTES: usize = 64;
/// Requests in the background that the guest's kernel has in flight at most.
const BACKGROUND_MAX: u16 = 64;

/// Features of the connection, where the guest has them. Without the flags for locks the guest's kernel keeps
/// all locks itself.
const FEATURES: u32 = ASYNC_READ
    | ATOMIC_O_TRUNC
    | BIG_WRITES
    | AUTO_INVAL_DATA
    | DO_READDIRPLUS
    | READDIRPLUS_AUTO
    | PARALLEL_DIROPS
    | MAX_PAGES;
const ASYNC_READ: u32 = 1 << 0;
const ATOMIC_O_TRUNC: u32 = 1 << 3;
const BIG_WRITES: u32 = 1 << 5;
const AUTO_INVAL_DATA: u32 = 1 << 12;
const DO_READDIRPLUS: u32 = 1 << 13;
const READDIRPLUS_AUTO: u32 = 1 << 14;
const PARALLEL_DIROPS: u32 = 1 << 18;
const MAX_PAGES: u32 = 1 << 22;

/// Returns the reply to an INIT request with this id. A guest of an older version gets `EPROTO`.
pub fn reply(request: &[u8], unique: u64) -> Vec<u8> {
    let body = request.get(REQUEST_HEADER_BYTES..).unwrap_or_default();
    let field = |offset| u32_at(body, offset);
    let (Some(major), Some(minor)) = (field(0), field(4)) else {
        return ReplyHeader::of_error(unique, libc::EINVAL).bytes().to_vec();
    };
    if major < MAJOR || (major == MAJOR && minor < MINOR_MIN) {
        return ReplyHeader::of_error(unique, libc::EPROTO).bytes().to_vec();
    }
    let limit = DATA_BYTES_MAX as u32;
    let mut out = [0; BODY_BYTES];
    let mut set = |offset: usize, bytes: &[u8]| out[offset..offset + bytes.len()].copy_from_slice(bytes);
    set(0, &MAJOR.to_le_bytes());
    set(4, &MINOR.min(minor).to_le_bytes());
    // A guest of a newer major version sends INIT again.
    if major == MAJOR {
        set(8, &field(8).unwrap_or(0).min(limit).to_le_bytes());
        set(12, &(field(12).unwrap_or(0) & FEATURES).to_le_bytes());
        set(16, &BACKGROUND_MAX.to_le_bytes());
        set(18, &(BACKGROUND_MAX / 4 * 3).to_le_bytes());
        set(20, &limit.to_le_bytes());
        // Times have nanoseconds.
        set(24, &1_u32.to_le_bytes());
        set(28, &PAGES_MAX.to_le_bytes());
    }
    let header = ReplyHeader {
        length: (REPLY_HEADER_BYTES + BODY_BYTES) as u32,
        error: 0,
        unique,
    };
    [&header.bytes()[..], &out].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(words: &[u32]) -> Vec<u8> {
        let mut request = vec![0; REQUEST_HEADER_BYTES];
        request.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        reply(&request, 9)
    }

    #[test]
    fn connection_has_features_of_both_sides_and_messages_that_fit_a_packet() {
        let reply = init(&[7, 36, 1 << 20, u32::MAX]);
        let header = ReplyHeader::of_packet(&reply).unwrap();
        assert_eq!((header.error, header.unique), (0, 9));
        let field = |offset| u32_at(&reply, REPLY_HEADER_BYTES + offset).unwrap();
        assert_eq!((field(0), field(4)), (7, 33));
        assert_eq!((field(8), field(20)), (128 << 10, 128 << 10));
        assert_eq!(field(28) & 0xffff, 32);
        // Neither kind of locks, and no memory of the host in the guest.
        let (posix_locks, flocks, map_alignment) = (1 << 1, 1 << 10, 1 << 26);
        assert_eq!(field(12) & (posix_locks | flocks | map_alignment), 0);
        assert_eq!(field(12), FEATURES);
        let reply = init(&[7, 31, 0, ASYNC_READ]);
        assert_eq!(u32_at(&reply, REPLY_HEADER_BYTES + 12), Some(ASYNC_READ));
        assert_eq!(u32_at(&reply, REPLY_HEADER_BYTES + 4), Some(31));
    }

    #[test]
    fn old_or_cut_request_is_refused_and_a_newer_one_receives_the_version() {
        let error = |words: &[u32]| ReplyHeader::of_packet(&init(words)).unwrap().error;
        assert_eq!(error(&[6, 40, 0, 0]), -libc::EPROTO);
        assert_eq!(error(&[7, 30, 0, 0]), -libc::EPROTO);
        assert_eq!(error(&[7]), -libc::EINVAL);
        let newer = init(&[8, 0, 0, u32::MAX]);
        assert_eq!(u32_at(&newer, REPLY_HEADER_BYTES), Some(7));
        assert_eq!(u32_at(&newer, REPLY_HEADER_BYTES + 12), Some(0));
    }
}
