//! A connection to the gateway: lines, and descriptors with the first byte of a line.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

use super::{OF_CLIENT, RESPONSE_BYTES_MAX, Request, Response};

/// Size of one read, bytes.
const READ_BYTES: usize = 16 << 10;
/// Greatest number of descriptors that one read accepts; the kernel closes further ones.
pub const RECEIVED_FILES_MAX: usize = 4;

/// Returns the path of the gateway's socket in a runtime directory.
pub fn socket_path(runtime: &Path) -> PathBuf {
    runtime.join("subnet.sock")
}

/// The client's end of a connection.
#[derive(Debug)]
pub struct Connection {
    socket: UnixStream,
    /// Received bytes that are no whole line yet.
    begun: Vec<u8>,
    /// Number of those bytes that have no end of a line.
    searched: usize,
}

/// Bytes of one read, and the descriptors that came with them.
#[derive(Debug, Default)]
pub struct Received {
    /// The bytes; empty at the end of the connection.
    pub bytes: Vec<u8>,
    /// The descriptors.
    pub files: Vec<OwnedFd>,
}

impl Received {
    /// Reads the available bytes of a socket, once, without waiting.
    ///
    /// # Errors
    /// `WouldBlock` if there are none.
    pub fn read(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let mut bytes = vec![0; READ_BYTES];
        let mut rights = cmsg_space!([RawFd; RECEIVED_FILES_MAX]);
        let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
        loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut rights), flags);
            let (count, files) = match received {
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(message) => {
                    let mut files = Vec::new();
                    for control in message.cmsgs().into_iter().flatten() {
                        if let ControlMessageOwned::ScmRights(fds) = control {
                            // SAFETY: the kernel has just returned these descriptors, which have no other
                            // owner.
                            files.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                        }
                    }
                    (message.bytes, files)
                }
            };
            bytes.truncate(count);
            return Ok(Self { bytes, files });
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<OwnedFd> for Connection {
    /// Returns the connection of a predecessor of this process, between two lines.
    fn from(socket: OwnedFd) -> Self {
        Self {
            socket: socket.into(),
            begun: Vec::new(),
            searched: 0,
        }
    }
}

impl Connection {
    /// Connects to the gateway of the user of this runtime directory.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` if none runs.
    pub fn open(runtime: &Path) -> io::Result<Self> {
        Ok(Self {
            socket: UnixStream::connect(socket_path(runtime))?,
            begun: Vec::new(),
            searched: 0,
        })
    }

    /// Sends a request with descriptors, which travel with its first byte.
    ///
    /// # Errors
    /// If the gateway is gone, or does not read within the limit of [`Self::set_limit`].
    pub fn send(&mut self, request: &Request, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let line = OF_CLIENT.write(request)?;
        let files: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&files)];
        let mut sent = 0;
        while sent < line.len() {
            let rights = if sent == 0 && !files.is_empty() {
                &rights[..]
            } else {
                &[]
            };
            let parts = [IoSlice::new(&line[sent..])];
            let socket = self.socket.as_raw_fd();
            match sendmsg::<()>(socket, &parts, rights, MsgFlags::MSG_NOSIGNAL, None) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Limits the time of each read and write; none means no limit.
    ///
    /// # Errors
    /// If the limit is zero.
    pub fn set_limit(&self, limit: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(limit)?;
        self.socket.set_write_timeout(limit)
    }

    /// Waits for the next message. Returns none at the end of the connection.
    ///
    /// # Errors
    /// If the limit has passed, or the gateway sends what is no message.
    pub fn receive(&mut self) -> io::Result<Option<Response>> {
        loop {
            if let Some(response) = self.take_line()? {
                return Ok(Some(response));
            }
            let mut bytes = [0; READ_BYTES];
            match io::Read::read(&mut self.socket, &mut bytes) {
                Ok(0) => return Ok(None),
                Ok(count) => self.begun.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads the available bytes without waiting. Returns the next message, if one is whole.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end of the connection.
    pub fn receive_now(&mut self) -> io::Result<Option<Response>> {
        if let Some(response) = self.take_line()? {
            return Ok(Some(response));
        }
        match Received::read(self.socket.as_fd()) {
            Ok(Received { bytes, .. }) if bytes.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(Received { bytes, .. }) => {
                self.begun.extend_from_slice(&bytes);
                self.take_line()
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn take_line(&mut self) -> io::Result<Option<Response>> {
        let new = self.begun.get(self.searched..).unwrap_or_default();
        let Some(end) = new.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.begun.len();
            if self.begun.len() > RESPONSE_BYTES_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            return Ok(None);
        };
        let rest = self.begun.split_off(self.searched + end + 1);
        self.searched = 0;
        let line = std::mem::replace(&mut self.begun, rest);
        let line = String::from_utf8_lossy(&line);
        OF_CLIENT.read(&line).map(Some).map_err(io::Error::other)
    }

    /// Ends the exchange of lines: returns the socket, and the bytes after the last line.
    pub fn into_stream(self) -> (UnixStream, Vec<u8>) {
        (self.socket, self.begun)
    }
}
