//! Receives packets of the folder's process, with the files that it passes.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use folders::packet::PACKET_BYTES_MAX;
use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

/// Buffers for packets.
pub struct Receiver {
    /// The last packet.
    pub packet: Box<[u8]>,
    rights: Vec<u8>,
}

impl Default for Receiver {
    fn default() -> Self {
        Self {
            packet: vec![0; PACKET_BYTES_MAX].into(),
            rights: cmsg_space!([RawFd; 1]),
        }
    }
}

impl Receiver {
    /// Receives a packet without waiting. Returns its length, which may be greater than that of the buffer,
    /// and its file if files are wanted. The kernel closes all others.
    pub fn receive(&mut self, socket: &OwnedFd, wants_file: bool) -> Result<(usize, Option<File>), Errno> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC | MsgFlags::MSG_CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(&mut self.packet)];
        let rights = wants_file.then_some(self.rights.as_mut_slice());
        let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, rights, flags)?;
        let length = message.bytes;
        let mut file = None;
        if wants_file {
            for control in message.cmsgs()? {
                let ControlMessageOwned::ScmRights(fds) = control else {
                    continue;
                };
                for fd in fds {
                    // SAFETY: the kernel has just given this process the descriptor; nothing else owns it.
                    file = Some(unsafe { File::from_raw_fd(fd) });
                }
            }
        }
        Ok((length, file))
    }
}
