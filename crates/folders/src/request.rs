//! Decisions about a guest's requests, before the file system sees them. Pure.
//!
//! The server acts as one user of the host, whatever the guest's user is. A guest chooses neither ids nor
//! device files nor the bits that run a program as another user; it reads and writes no other extended
//! attributes than those of users; and with a read-only folder it changes nothing.

use crate::packet::{DATA_BYTES_MAX, REQUEST_HEADER_BYTES, RequestHeader, opcode, set_u32_at, u32_at};

/// Rights of the guest in the folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// Whether the guest may change nothing.
    pub read_only: bool,
    /// Whether the guest may use extended attributes of users.
    pub xattr: bool,
}

/// Decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The file system serves the request.
    Serve,
    /// The reply is this error's number.
    Refuse(i32),
    /// The request has no effect and no reply.
    Ignore,
    /// The connection begins.
    Init,
    /// The connection ends.
    Destroy,
}

/// Flags with which a guest may open a file. `O_DIRECT` is left out: the server's buffers are not aligned.
const OPEN_FLAGS: u32 = (libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_TRUNC
    | libc::O_CREAT
    | libc::O_EXCL
    | libc::O_NONBLOCK
    | libc::O_DSYNC
    | libc::O_SYNC
    | libc::O_DIRECTORY) as u32
    | LARGE_FILE;
/// `O_LARGEFILE` of the kernel; zero in the C library of 64-bit systems.
const LARGE_FILE: u32 = 0o100_000;
/// Bits of a mode that a guest may not set: set-user-ID and set-group-ID.
const PRIVILEGE_BITS: u32 = libc::S_ISUID | libc::S_ISGID;
/// Prefix of the extended attributes that a guest may use.
const USER_ATTRIBUTE: &[u8] = b"user.";
/// Length of one item of a BATCH_FORGET request, bytes.
const FORGET_ITEM_BYTES: usize = 16;
/// Length of a WRITE request before its data, without the header, bytes.
const WRITE_BYTES: usize = 40;

/// Offsets of fields in the bodies of requests.
mod field {
    use crate::packet::REQUEST_HEADER_BYTES;

    const fn body(offset: usize) -> usize {
        REQUEST_HEADER_BYTES + offset
    }
    pub const UID: usize = 24;
    pub const GID: usize = 28;
    pub const FIRST: usize = body(0);
    /// The mode of CREATE.
    pub const CREATE_MODE: usize = body(4);
    /// The mode of SETATTR.
    pub const SETATTR_MODE: usize = body(68);
    /// The size of READ, READDIR, READDIRPLUS and WRITE.
    pub const SIZE: usize = body(16);
    /// The file's flags in READ and WRITE.
    pub const IO_FLAGS: usize = body(32);
    /// The name of GETXATTR and SETXATTR.
    pub const XATTR_NAME: usize = body(8);
}

/// Decides about the request, and removes from it what the guest may not choose.
pub fn admit(request: &mut [u8], rights: Rights) -> Verdict {
    let Some(header) = RequestHeader::read(request) else {
        return Verdict::Ignore;
    };
    if !header.has_reply() {
        return admit_forget(request, header.opcode);
    }
    if usize::try_from(header.length) != Ok(request.len()) {
        return Verdict::Refuse(libc::EINVAL);
    }
    // The file system would take the ids of another user, which this process cannot.
    set_u32_at(request, field::UID, 0);
    set_u32_at(request, field::GID, 0);
    if rights.read_only
        && let Some(refused) = refuse_change(request, header.opcode)
    {
        return refused;
    }
    admit_operation(request, header.opcode, rights)
}

/// Requests without a reply: an error could not be reported.
fn admit_forget(request: &[u8], operation: u32) -> Verdict {
    let count = u32_at(request, field::FIRST).and_then(|count| usize::try_from(count).ok());
    let items = request.len().saturating_sub(REQUEST_HEADER_BYTES + 8) / FORGET_ITEM_BYTES;
    match operation {
        opcode::FORGET => Verdict::Serve,
        opcode::BATCH_FORGET if count.is_some_and(|count| count <= items) => Verdict::Serve,
        // The server finishes every request that it has begun.
        _ => Verdict::Ignore,
    }
}

/// Refuses a request that would change a read-only folder.
fn refuse_change(request: &[u8], operation: u32) -> Option<Verdict> {
    let first = u32_at(request, field::FIRST).unwrap_or(0);
    let changes = match operation {
        opcode::SETATTR
        | opcode::SYMLINK
        | opcode::MKNOD
        | opcode::MKDIR
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::RENAME
        | opcode::RENAME2
        | opcode::LINK
        | opcode::WRITE
        | opcode::SETXATTR
        | opcode::REMOVEXATTR
        | opcode::CREATE
        | opcode::FALLOCATE => true,
        opcode::OPEN => first & (libc::O_ACCMODE | libc::O_TRUNC) as u32 != libc::O_RDONLY as u32,
        opcode::ACCESS => first & libc::W_OK as u32 != 0,
        _ => false,
    };
    changes.then_some(Verdict::Refuse(libc::EROFS))
}

fn admit_operation(request: &mut [u8], operation: u32, rights: Rights) -> Verdict {
    match operation {
        opcode::INIT => Verdict::Init,
        opcode::DESTROY => Verdict::Destroy,
        opcode::LOOKUP => admit_lookup(request),
        opcode::OPEN | opcode::OPENDIR => mask(request, field::FIRST, OPEN_FLAGS),
        opcode::CREATE => {
            mask(request, field::FIRST, OPEN_FLAGS);
            mask(request, field::CREATE_MODE, !PRIVILEGE_BITS)
        }
        opcode::MKDIR => mask(request, field::FIRST, !PRIVILEGE_BITS),
        opcode::SETATTR => mask(request, field::SETATTR_MODE, !PRIVILEGE_BITS),
        opcode::MKNOD => admit_node(request),
        opcode::READ => {
            mask(request, field::IO_FLAGS, OPEN_FLAGS);
            bounded(request, field::SIZE)
        }
        opcode::READDIR | opcode::READDIRPLUS => bounded(request, field::SIZE),
        opcode::WRITE => admit_write(request),
        opcode::SETXATTR | opcode::GETXATTR | opcode::LISTXATTR | opcode::REMOVEXATTR => {
            admit_xattr(request, operation, rights)
        }
        opcode::GETATTR
        | opcode::READLINK
        | opcode::SYMLINK
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::RENAME
        | opcode::RENAME2
        | opcode::LINK
        | opcode::STATFS
        | opcode::RELEASE
        | opcode::FSYNC
        | opcode::FLUSH
        | opcode::RELEASEDIR
        | opcode::FSYNCDIR
        | opcode::ACCESS
        | opcode::FALLOCATE
        | opcode::LSEEK => Verdict::Serve,
        _ => Verdict::Refuse(libc::ENOSYS),
    }
}

/// Names of the directory itself and of its parent are for exports by NFS, which a guest's kernel does only
/// if that was negotiated. The parent of a directory that the host has moved may be outside the folder.
fn admit_lookup(request: &[u8]) -> Verdict {
    match name(request, field::FIRST) {
        b"." | b".." => Verdict::Refuse(libc::EINVAL),
        _ => Verdict::Serve,
    }
}

fn admit_node(request: &mut [u8]) -> Verdict {
    let mode = u32_at(request, field::FIRST).unwrap_or(0);
    match mode & libc::S_IFMT {
        0 | libc::S_IFREG | libc::S_IFIFO | libc::S_IFSOCK => mask(request, field::FIRST, !PRIVILEGE_BITS),
        _ => Verdict::Refuse(libc::EPERM),
    }
}

fn admit_write(request: &mut [u8]) -> Verdict {
    let data = request.len().checked_sub(REQUEST_HEADER_BYTES + WRITE_BYTES);
    let size = u32_at(request, field::SIZE).and_then(|size| usize::try_from(size).ok());
    if data.is_none() || size != data {
        return Verdict::Refuse(libc::EINVAL);
    }
    mask(request, field::IO_FLAGS, OPEN_FLAGS);
    bounded(request, field::SIZE)
}

fn admit_xattr(request: &[u8], operation: u32, rights: Rights) -> Verdict {
    if !rights.xattr {
        // The guest's kernel does not ask again.
        return Verdict::Refuse(libc::ENOSYS);
    }
    let name = match operation {
        opcode::LISTXATTR => return bounded(request, field::FIRST),
        opcode::REMOVEXATTR => name(request, field::FIRST),
        _ => name(request, field::XATTR_NAME),
    };
    if !name.starts_with(USER_ATTRIBUTE) {
        return Verdict::Refuse(libc::EOPNOTSUPP);
    }
    match operation {
        opcode::GETXATTR => bounded(request, field::FIRST),
        _ => Verdict::Serve,
    }
}

/// Keeps only these bits of a number.
fn mask(request: &mut [u8], offset: usize, bits: u32) -> Verdict {
    match u32_at(request, offset) {
        Some(value) => {
            set_u32_at(request, offset, value & bits);
            Verdict::Serve
        }
        None => Verdict::Refuse(libc::EINVAL),
    }
}

/// Refuses a size whose data does not fit a packet.
fn bounded(request: &[u8], offset: usize) -> Verdict {
    match u32_at(request, offset).map(usize::try_from) {
        Some(Ok(size)) if size <= DATA_BYTES_MAX => Verdict::Serve,
        _ => Verdict::Refuse(libc::EINVAL),
    }
}

/// Returns the name that begins at an offset, without its zero byte; empty beyond the end.
fn name(request: &[u8], offset: usize) -> &[u8] {
    let rest = request.get(offset..).unwrap_or_default();
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
    &rest[..end]
}

#[cfg(test)]
mod tests;
