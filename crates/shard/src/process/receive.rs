//! The first message: a line of JSON with every file as SCM_RIGHTS.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

use crate::launch::{Fd, LaunchSpec};

/// Files that one message can carry (SCM_MAX_FD of Linux).
pub const FILES_MAX: usize = 253;
/// Longest spec, bytes.
const SPEC_BYTES_MAX: usize = 1 << 20;

/// Why the first message is no good.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The socket broke.
    #[error("cannot receive the VM's spec from the monitor")]
    Io(#[from] io::Error),
    /// The monitor went away, or its message never ends.
    #[error("the monitor's first message is incomplete")]
    Incomplete,
    /// Not a spec.
    #[error("the monitor's first message is no launch spec")]
    Json(#[from] serde_json::Error),
    /// A file that was not passed, or is used twice.
    #[error("the launch spec names file {0}, which was not passed or is used already")]
    NoFile(usize),
    /// More files than a message carries.
    #[error("the VM needs {0} open files; a shard takes {FILES_MAX}")]
    TooManyFiles(usize),
}

/// The files of the message, each to be taken once.
#[derive(Debug, Default)]
pub struct Files(Vec<Option<File>>);

impl Files {
    /// Takes a file.
    pub fn take(&mut self, fd: Fd) -> Result<File, ReceiveError> {
        self.0
            .get_mut(fd.0)
            .and_then(Option::take)
            .ok_or(ReceiveError::NoFile(fd.0))
    }
}

/// Sends `spec` and `files`, whose indices the spec uses: the monitor's side of [`receive`].
pub fn send_spec(
    socket: &mut UnixStream,
    spec: &LaunchSpec,
    files: &[BorrowedFd<'_>],
) -> Result<(), ReceiveError> {
    if files.len() > FILES_MAX {
        return Err(ReceiveError::TooManyFiles(files.len()));
    }
    let mut line = serde_json::to_vec(spec)?;
    line.push(b'\n');
    let files: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let sent = sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(&line)],
        &[ControlMessage::ScmRights(&files)],
        MsgFlags::MSG_NOSIGNAL,
        None,
    )
    .map_err(io::Error::from)?;
    socket.write_all(&line[sent..])?;
    Ok(())
}

/// Receives the spec and its files. Nothing beyond the line is read.
pub fn receive(socket: &mut UnixStream) -> Result<(LaunchSpec, Files), ReceiveError> {
    // The monitor sends orders only after `Report::Running`, so what comes until then is the line.
    let mut line = vec![0; 64 << 10];
    let mut rights = nix::cmsg_space!([RawFd; FILES_MAX]);
    let (mut filled, files) = {
        let mut parts = [IoSliceMut::new(&mut line)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut rights), flags)
            .map_err(io::Error::from)?;
        let mut files = Vec::new();
        for control in message.cmsgs().map_err(|_| ReceiveError::Incomplete)? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                // SAFETY: the kernel has just given us these descriptors; nobody else knows them.
                files.extend(fds.into_iter().map(|fd| Some(unsafe { File::from_raw_fd(fd) })));
            }
        }
        (message.bytes, files)
    };
    while filled == 0 || line[filled - 1] != b'\n' {
        if filled >= SPEC_BYTES_MAX {
            return Err(ReceiveError::Incomplete);
        }
        line.resize((filled + (64 << 10)).min(SPEC_BYTES_MAX), 0);
        match socket.read(&mut line[filled..])? {
            0 => return Err(ReceiveError::Incomplete),
            bytes => filled += bytes,
        }
    }
    Ok((serde_json::from_slice(&line[..filled])?, Files(files)))
}
