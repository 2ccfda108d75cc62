//! The TAP backend: one file for each queue pair, each frame after a 12-byte virtio-net header.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use virtio_bindings::virtio_net as spec;

use super::header::HEADER_BYTES;

// The kernel's request numbers have the size of `int` (`unsigned int`), whatever the argument is.
/// Request `TUNSETOFFLOAD`, which sets the offloads.
pub const SET_OFFLOAD: u64 = nix::request_code_write!(b'T', 208, size_of::<libc::c_uint>());
/// Request `TUNSETVNETHDRSZ`, which sets the size of the virtio-net header.
pub const SET_HEADER_BYTES: u64 = nix::request_code_write!(b'T', 216, size_of::<libc::c_int>());
/// Request `TUNSETQUEUE`, which attaches or detaches a queue.
pub const SET_QUEUE: u64 = nix::request_code_write!(b'T', 217, size_of::<libc::c_int>());

nix::ioctl_write_int_bad!(tun_set_offload, SET_OFFLOAD);
nix::ioctl_write_ptr_bad!(tun_set_queue, SET_QUEUE, libc::ifreq);
nix::ioctl_write_ptr_bad!(tun_set_header_bytes, SET_HEADER_BYTES, libc::c_int);

const TUN_F_CSUM: i32 = 1;
const TUN_F_TSO4: i32 = 2;
const TUN_F_TSO6: i32 = 4;
const TUN_F_TSO_ECN: i32 = 8;

/// A TAP device's queues. Queues from `attached` on are detached, so that the kernel sends nothing to them.
pub struct Tap {
    files: Vec<OwnedFd>,
    attached: usize,
}

impl Tap {
    /// Creates the device from files opened with IFF_VNET_HDR, all of which are attached after `open`.
    pub fn new(files: Vec<OwnedFd>) -> Self {
        let attached = files.len();
        Self { files, attached }
    }

    /// Returns the number of queue pairs.
    pub fn pairs(&self) -> usize {
        self.files.len()
    }

    /// Returns the number of queue pairs that the kernel uses.
    pub fn attached(&self) -> usize {
        self.attached
    }

    /// Returns the file of a pair.
    pub fn file(&self, pair: usize) -> BorrowedFd<'_> {
        self.files[pair].as_fd()
    }

    /// Sets the frames that the guest accepts without checksum or segmentation, by its negotiated features.
    pub fn set_offloads(&self, features: u64) -> io::Result<()> {
        let has = |bit: u32| features & (1 << bit) != 0;
        let mut flags = 0;
        if has(spec::VIRTIO_NET_F_GUEST_CSUM) {
            flags |= TUN_F_CSUM;
            for (bit, flag) in [
                (spec::VIRTIO_NET_F_GUEST_TSO4, TUN_F_TSO4),
                (spec::VIRTIO_NET_F_GUEST_TSO6, TUN_F_TSO6),
                (spec::VIRTIO_NET_F_GUEST_ECN, TUN_F_TSO_ECN),
            ] {
                if has(bit) {
                    flags |= flag;
                }
            }
            // The kernel refuses ECN without TCP segmentation.
            if flags & (TUN_F_TSO4 | TUN_F_TSO6) == 0 {
                flags &= !TUN_F_TSO_ECN;
            }
        }
        let bytes = HEADER_BYTES as libc::c_int;
        let fd = self.files[0].as_raw_fd();
        // SAFETY: `fd` is an open TAP file; the argument of the one is a number, of the other a live c_int.
        unsafe {
            tun_set_header_bytes(fd, &bytes)?;
            tun_set_offload(fd, flags)?;
        }
        Ok(())
    }

    /// Attaches the first `count` queues and detaches the others.
    pub fn attach(&mut self, count: usize) -> io::Result<()> {
        while self.attached > count.max(1) {
            self.switch(self.attached - 1, libc::IFF_DETACH_QUEUE)?;
            self.attached -= 1;
        }
        while self.attached < count.min(self.files.len()) {
            self.switch(self.attached, libc::IFF_ATTACH_QUEUE)?;
            self.attached += 1;
        }
        Ok(())
    }

    fn switch(&self, pair: usize, flags: libc::c_int) -> io::Result<()> {
        // SAFETY: an all-zero `ifreq` is valid: it is plain numbers.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        // SAFETY: the file is an open TAP file and `request` lives through the call.
        unsafe { tun_set_queue(self.files[pair].as_raw_fd(), &request)? };
        Ok(())
    }

    /// Reads one frame with its header into `room`; the bytes beyond `room` are lost.
    pub fn read(&self, pair: usize, room: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: `room` holds pieces of mapped guest memory (see `Segments`); the kernel checks nothing
        // more.
        let count = unsafe {
            libc::readv(
                self.files[pair].as_raw_fd(),
                room.as_ptr(),
                room.len() as libc::c_int,
            )
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Writes one frame with its header.
    pub fn write(&self, pair: usize, frame: &[libc::iovec]) -> io::Result<()> {
        // SAFETY: as in `read`, the other way.
        let count = unsafe {
            libc::writev(
                self.files[pair].as_raw_fd(),
                frame.as_ptr(),
                frame.len() as libc::c_int,
            )
        };
        if count < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
}
