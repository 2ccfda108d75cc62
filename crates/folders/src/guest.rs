//! A guest's side of the protocol, for tests: requests written by hand.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::cmsg_space;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, send, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::packet::{
    PACKET_BYTES_MAX, REPLY_HEADER_BYTES, REQUEST_HEADER_BYTES, ReplyHeader, lent_node, opcode, set_u32_at,
    set_unique, u32_at, u64_at,
};

/// Node of the folder itself.
pub const ROOT: u64 = 1;
/// Time limit for a reply, seconds.
const LIMIT_S: i64 = 20;

/// A guest with a connection to a folder's server. All calls panic where the server sends no whole reply.
#[derive(Debug)]
pub struct Guest {
    socket: OwnedFd,
    unique: u64,
    lent: Vec<(u64, OwnedFd)>,
}

impl Guest {
    /// Begins a connection.
    pub fn begin(socket: OwnedFd) -> Self {
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(LIMIT_S)).expect("a socket");
        let mut guest = Self {
            socket,
            unique: 0,
            lent: Vec::new(),
        };
        let init = words(&[7, 36, 1 << 20, u32::MAX]);
        guest.ask(opcode::INIT, 0, &init).expect("a connection");
        guest
    }

    /// Sends a request; returns the reply without its header, or the error.
    ///
    /// # Errors
    /// The server's error.
    pub fn ask(&mut self, operation: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.unique += 1;
        let mut request = vec![0; REQUEST_HEADER_BYTES];
        request.extend(body);
        let length = request.len() as u32;
        set_u32_at(&mut request, 0, length);
        set_u32_at(&mut request, 4, operation);
        set_unique(&mut request, self.unique);
        request[16..24].copy_from_slice(&node.to_le_bytes());
        // A user of the guest whom the host may not know.
        set_u32_at(&mut request, 24, 4321);
        send(self.socket.as_raw_fd(), &request, MsgFlags::MSG_NOSIGNAL).expect("a server");
        let reply = self.receive();
        let header = ReplyHeader::of_packet(&reply).expect("a whole reply");
        assert_eq!(header.unique, self.unique);
        match header.error {
            0 => Ok(reply[REPLY_HEADER_BYTES..].to_vec()),
            error => Err(-error),
        }
    }

    /// Receives a reply, and the files that were passed before it.
    fn receive(&mut self) -> Vec<u8> {
        loop {
            let mut packet = vec![0; 2 * PACKET_BYTES_MAX];
            let mut rights = cmsg_space!([RawFd; 1]);
            let mut parts = [IoSliceMut::new(&mut packet)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message = recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, Some(&mut rights), flags)
                .expect("a reply in time");
            let length = message.bytes;
            let mut files = Vec::new();
            for control in message.cmsgs().expect("room for a file") {
                if let ControlMessageOwned::ScmRights(fds) = control {
                    // SAFETY: the kernel has just made these descriptors, and nothing else owns them.
                    files.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                }
            }
            packet.truncate(length);
            match lent_node(&packet) {
                Some(node) => self.lent.extend(files.into_iter().map(|file| (node, file))),
                None => return packet,
            }
        }
    }

    /// Returns the files that the server has passed since the last call, with their nodes.
    pub fn lent(&mut self) -> Vec<(u64, OwnedFd)> {
        std::mem::take(&mut self.lent)
    }

    /// Looks up a name; returns its node.
    ///
    /// # Errors
    /// The server's error.
    pub fn lookup(&mut self, parent: u64, name: &[u8]) -> Result<u64, i32> {
        let reply = self.ask(opcode::LOOKUP, parent, &[name, b"\0"].concat())?;
        Ok(u64_at(&reply, 0).expect("a whole reply"))
    }

    /// Creates a file and opens it; returns its node and its handle.
    ///
    /// # Errors
    /// The server's error.
    pub fn create(&mut self, name: &[u8], mode: u32) -> Result<(u64, u64), i32> {
        let flags = (libc::O_CREAT | libc::O_RDWR) as u32;
        let body = [&words(&[flags, mode, 0, 0]), name, b"\0"].concat();
        let reply = self.ask(opcode::CREATE, ROOT, &body)?;
        Ok((
            u64_at(&reply, 0).expect("a whole reply"),
            u64_at(&reply, 128).expect("a whole reply"),
        ))
    }

    /// Opens a file; returns its handle.
    ///
    /// # Errors
    /// The server's error.
    pub fn open(&mut self, node: u64, flags: i32) -> Result<u64, i32> {
        let reply = self.ask(opcode::OPEN, node, &words(&[flags as u32, 0]))?;
        Ok(u64_at(&reply, 0).expect("a whole reply"))
    }

    /// Writes to an open file; returns the number of bytes.
    ///
    /// # Errors
    /// The server's error.
    pub fn write(&mut self, node: u64, handle: u64, offset: u64, data: &[u8]) -> Result<u32, i32> {
        let mut body = io_body(handle, offset, data.len());
        body.extend(data);
        let reply = self.ask(opcode::WRITE, node, &body)?;
        Ok(u32_at(&reply, 0).expect("a whole reply"))
    }

    /// Reads from an open file.
    ///
    /// # Errors
    /// The server's error.
    pub fn read(&mut self, node: u64, handle: u64, offset: u64, size: usize) -> Result<Vec<u8>, i32> {
        self.ask(opcode::READ, node, &io_body(handle, offset, size))
    }
}

/// The bytes of 32-bit fields.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The body of READ, READDIR and READDIRPLUS, and the start of WRITE.
pub fn io_body(handle: u64, offset: u64, size: usize) -> Vec<u8> {
    let mut body = [handle.to_le_bytes(), offset.to_le_bytes()].concat();
    body.extend(words(&[size as u32, 0, 0, 0, libc::O_RDWR as u32, 0]));
    body
}
