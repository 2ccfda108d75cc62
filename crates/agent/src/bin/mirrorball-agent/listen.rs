//! Listens on the agent's vsock port and serves each connection in a thread.
//!
//! Only the host is served: other guests and programs of this guest are refused.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, getpeername};

/// Greatest number of connections served at once.
const CONNECTIONS_MAX: usize = 64;

/// The host's own address.
const CID_HOST: u32 = libc::VMADDR_CID_HOST;

/// Serves connections until accepting fails, and returns why.
fn accept(listener: &OwnedFd) -> io::Error {
    let active = Arc::new(AtomicUsize::new(0));
    loop {
        // SAFETY: a null address is allowed; the result is checked before it is owned.
        let fd = unsafe {
            libc::accept4(
                listener.as_raw_fd(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                libc::SOCK_CLOEXEC,
            )
        };
        let connection = match Errno::result(fd) {
            // SAFETY: accept4 just returned it; nothing else owns it.
            Ok(fd) => File::from(unsafe { OwnedFd::from_raw_fd(fd) }),
            Err(Errno::EINTR | Errno::ECONNABORTED) => continue,
            Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::ENOBUFS) => {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
            Err(error) => return error.into(),
        };
        if !getpeername::<VsockAddr>(connection.as_raw_fd()).is_ok_and(|peer| peer.cid() == CID_HOST) {
            continue;
        }
        if active.load(Ordering::Acquire) >= CONNECTIONS_MAX {
            continue;
        }
        active.fetch_add(1, Ordering::AcqRel);
        let count = Arc::clone(&active);
        let started = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
            // The client notices its broken connection itself.
            let _ = agent::server::serve(connection);
            count.fetch_sub(1, Ordering::AcqRel);
        });
        if started.is_err() {
            active.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Listens on vsock once all CPUs are online; returns only with an error.
pub fn listen() -> io::Error {
    crate::cpus::come_online();
    match listener() {
        Ok(listener) => accept(&listener),
        Err(error) => error,
    }
}

fn listener() -> io::Result<OwnedFd> {
    let listener = socket::socket(
        AddressFamily::Vsock,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    bind(
        listener.as_raw_fd(),
        &VsockAddr::new(libc::VMADDR_CID_ANY, agent::VSOCK_PORT),
    )?;
    socket::listen(&listener, Backlog::new(64)?)?;
    Ok(listener)
}
