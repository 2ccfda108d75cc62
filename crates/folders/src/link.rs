//! Hard links. The file system makes one by the descriptor of a file that it has only found
//! (`AT_EMPTY_PATH`), for which Linux demands a capability before 6.10. Here the file's name among the
//! process's own descriptors is linked, which needs none.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;

use fuse_backend_rs::api::filesystem::{Context, FileSystem};
use fuse_backend_rs::passthrough::PassthroughFs;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::linkat;

use crate::packet::{REQUEST_HEADER_BYTES, node_of, opcode, set_u32_at, u64_at};

/// Length of a node's number, bytes.
const NODE_BYTES: usize = 8;

/// Makes the link that a LINK request asks for, and turns the request into a LOOKUP of the new name, whose
/// reply is the same. Returns its length.
///
/// # Errors
/// Fails as the host's file system does.
pub fn make(files: &PassthroughFs, request: &mut [u8]) -> io::Result<usize> {
    let invalid = || io::Error::from(Errno::EINVAL);
    let directory = node_of(request).ok_or_else(invalid)?;
    let old = u64_at(request, REQUEST_HEADER_BYTES).ok_or_else(invalid)?;
    let named = request
        .get(REQUEST_HEADER_BYTES + NODE_BYTES..)
        .ok_or_else(invalid)?;
    let name = CStr::from_bytes_until_nul(named).map_err(|_| invalid())?;
    let bytes = name.to_bytes();
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
        return Err(invalid());
    }
    let (old, target) = (found(files, old)?, found(files, directory)?);
    let path = CString::new(format!("/proc/self/fd/{}", old.as_raw_fd()))?;
    linkat(
        AT_FDCWD,
        path.as_c_str(),
        target.as_fd(),
        name,
        AtFlags::AT_SYMLINK_FOLLOW,
    )?;
    request.copy_within(REQUEST_HEADER_BYTES + NODE_BYTES.., REQUEST_HEADER_BYTES);
    let length = request.len() - NODE_BYTES;
    // A packet is shorter than 4 GiB.
    set_u32_at(request, 0, length as u32);
    set_u32_at(request, 4, opcode::LOOKUP);
    Ok(length)
}

/// Finds the file of a node by its present name, and checks that it is the same file.
pub(crate) fn found(files: &PassthroughFs, node: u64) -> io::Result<File> {
    let (known, _) = files.getattr(&Context::default(), node, None)?;
    let path = files.readlinkat_proc_file(node)?;
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let file = File::from(open(&path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if (metadata.dev(), metadata.ino()) != (known.st_dev, known.st_ino) {
        return Err(Errno::ESTALE.into());
    }
    Ok(file)
}
