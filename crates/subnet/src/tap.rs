//! Opens TAP devices.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::SubnetError;

use ioctls::{tun_set_header_bytes, tun_set_iff};

mod ioctls {
    #![allow(missing_docs, reason = "the macros' functions carry the kernel's names")]
    nix::ioctl_write_ptr_bad!(
        tun_set_iff,
        nix::request_code_write!(b'T', 202, size_of::<libc::c_int>()),
        libc::ifreq
    );
    nix::ioctl_write_ptr!(tun_set_header_bytes, b'T', 216, libc::c_int);
}

/// Bytes of the header before each frame (`virtio_net_hdr_v1`).
const HEADER_BYTES: libc::c_int = 12;

/// Opens the existing TAP device `name`, one file for each queue pair: nonblocking, each frame after a
/// virtio-net header of 12 bytes. Never creates a device.
pub fn open(name: &str, queue_pairs: u16) -> Result<Vec<OwnedFd>, SubnetError> {
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', ' ', '%', '\0']) {
        return Err(SubnetError::TapName(name.to_owned()));
    }
    let multi = queue_pairs > 1;
    // Before the device is looked up: without tun it can't exist.
    let first = open_tun()?;
    // TUNSETIFF creates a missing device if the user may, so the device is looked up first.
    if !interface_exists(name) {
        return Err(SubnetError::NoSuchTap(name.to_owned(), multi_flag(multi)));
    }
    let mut files = vec![attach(first, name, multi, queue_pairs)?];
    for _ in 1..queue_pairs {
        files.push(attach(open_tun()?, name, multi, queue_pairs)?);
    }
    Ok(files)
}

fn multi_flag(multi: bool) -> &'static str {
    if multi { " multi_queue" } else { "" }
}

fn open_tun() -> Result<File, SubnetError> {
    let options = libc::O_NONBLOCK | libc::O_CLOEXEC;
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(options)
        .open("/dev/net/tun")
        .map_err(|error| match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => SubnetError::TunPermission(error),
            _ => SubnetError::NoTun,
        })
}

/// Returns whether the network namespace of this thread has the interface (`/sys` may show another
/// namespace's).
fn interface_exists(name: &str) -> bool {
    nix::net::if_::if_nametoindex(name).is_ok()
}

fn attach(file: File, name: &str, multi: bool, queue_pairs: u16) -> Result<OwnedFd, SubnetError> {
    // SAFETY: an all-zero `ifreq` is valid: it is plain numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (target, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *target = byte as libc::c_char;
    }
    let flags =
        libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | if multi { libc::IFF_MULTI_QUEUE } else { 0 };
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    let name = name.to_owned();
    let failed = |what: &'static str, error: nix::Error| SubnetError::Tap {
        name: name.clone(),
        what,
        source: io::Error::from(error),
    };
    // SAFETY: the file is open and `request` lives through the call.
    if let Err(error) = unsafe { tun_set_iff(file.as_raw_fd(), &request) } {
        return Err(match error {
            nix::Error::EBUSY => SubnetError::TapBusy(name),
            nix::Error::EPERM => SubnetError::TapPermission(name),
            nix::Error::EINVAL | nix::Error::E2BIG => {
                SubnetError::TapKind(name, queue_pairs, multi_flag(multi))
            }
            error => failed("cannot attach", error),
        });
    }
    // SAFETY: as above, with a live c_int.
    unsafe { tun_set_header_bytes(file.as_raw_fd(), &HEADER_BYTES) }
        .map_err(|error| failed("cannot set the header's size", error))?;
    Ok(file.into())
}

#[cfg(test)]
mod tests;
