//! A connection of a client: lines both ways, and a captured stream to it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};
use registry::subnet::{
    Captured, OF_GATEWAY, RECEIVED_FILES_MAX, REQUEST_BYTES_MAX, Received, Request, Response,
};

/// Greatest number of captured bytes that wait for a slow reader.
const CAPTURED_BYTES_MAX: usize = 4 << 20;

/// The role of a client.
#[derive(Debug, Default)]
pub(crate) enum Role {
    /// It sends requests.
    #[default]
    Asking,
    /// It has joined a card, which has the client's number.
    Joined {
        /// Whether a request for facts has no reply yet.
        owes_facts: bool,
    },
    /// It reads the frames of these cards.
    Capturing {
        /// The cards.
        of: Captured,
        /// Number of frames that had no room.
        lost: u64,
    },
}

/// A connected client.
#[derive(Debug)]
pub(crate) struct Client {
    socket: UnixStream,
    pub(crate) role: Role,
    received: Vec<u8>,
    /// Descriptors that came with lines that are not whole yet.
    files: Vec<OwnedFd>,
    to_send: Vec<u8>,
    sent: usize,
    /// Whether the event loop waits for room in the socket.
    pub(crate) waits_for_room: bool,
}

/// A request with its descriptors.
pub(crate) type Asked = (Request, Vec<OwnedFd>);

impl Client {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            role: Role::default(),
            received: Vec::new(),
            files: Vec::new(),
            to_send: Vec::new(),
            sent: 0,
            waits_for_room: false,
        }
    }

    /// Reads the available bytes, and returns the requests that are whole.
    ///
    /// # Errors
    /// If the connection has ended, or the client sends another line than a request. The client may receive a
    /// reason before.
    pub(crate) fn read(&mut self) -> io::Result<Vec<Asked>> {
        let Received { bytes, files } = match Received::read(self.socket.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Vec::new()),
            received => received?,
        };
        if bytes.is_empty() || self.files.len() + files.len() > RECEIVED_FILES_MAX {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.files.extend(files);
        let mut searched = self.received.len();
        self.received.extend_from_slice(&bytes);
        let mut requests = Vec::new();
        while let Some(end) = self.received[searched..].iter().position(|byte| *byte == b'\n') {
            let rest = self.received.split_off(searched + end + 1);
            let line = std::mem::replace(&mut self.received, rest);
            searched = 0;
            match OF_GATEWAY.read(&String::from_utf8_lossy(&line)) {
                Ok(request) => requests.push((request, std::mem::take(&mut self.files))),
                Err(error) => {
                    self.respond(&Response::Refused {
                        why: error.to_string(),
                    });
                    // The part that has room goes out before the connection ends.
                    self.flush();
                    return Err(io::ErrorKind::InvalidData.into());
                }
            }
        }
        if self.received.len() > REQUEST_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(requests)
    }

    /// Sends a response, now or when the socket has room.
    pub(crate) fn respond(&mut self, response: &Response) {
        // A response is an object in JSON.
        if let Ok(line) = OF_GATEWAY.write(response) {
            self.to_send.extend_from_slice(&line);
        }
        self.flush();
    }

    /// Sends bytes of a capture. Counts a loss if a slow reader leaves no room.
    pub(crate) fn capture(&mut self, parts: [&[u8]; 2]) {
        let bytes = parts[0].len() + parts[1].len();
        if self.to_send.len() - self.sent + bytes > CAPTURED_BYTES_MAX {
            if let Role::Capturing { lost, .. } = &mut self.role {
                *lost = lost.saturating_add(1);
            }
            return;
        }
        parts.iter().for_each(|part| self.to_send.extend_from_slice(part));
    }

    /// Sends the bytes that wait, as far as the socket has room. A failure shows at the next read.
    pub(crate) fn flush(&mut self) {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while self.sent < self.to_send.len() {
            match send(self.socket.as_raw_fd(), &self.to_send[self.sent..], flags) {
                Ok(count) => self.sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    // Sent bytes are removed once they are the greater part.
                    if self.sent > self.to_send.len() / 2 {
                        self.to_send.drain(..self.sent);
                        self.sent = 0;
                    }
                    return;
                }
                Err(_) => break,
            }
        }
        self.to_send.clear();
        self.sent = 0;
    }

    /// Whether bytes wait for room.
    pub(crate) fn is_waiting(&self) -> bool {
        self.sent < self.to_send.len()
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
