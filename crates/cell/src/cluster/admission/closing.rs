//! Closes a connection without waiting for what its peer has passed along.
//!
//! A peer may send descriptors (`SCM_RIGHTS`, `unix(7)`) that this process never receives. The close of the
//! connection closes them, too. A TCP socket among them that has `SO_LINGER` (`socket(7)`) blocks its last
//! closer for as long as the peer chose. A task that exits does not linger (`PF_EXITING` in `inet_release`,
//! `net/ipv4/af_inet.c` of Linux). So the last holder of the connection is a thread that has a copy of the
//! table of descriptors (`unshare(2)`, `CLONE_FILES`) and exits.

use std::convert::Infallible;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use nix::sched::{CloneFlags, unshare};

use super::STACK_BYTES;

/// Closes a connection. The caller does not wait for the peer.
pub(super) fn close(stream: UnixStream) {
    if let Ok(holder) = hold_all() {
        // The holder exits afterwards.
        drop(stream);
        drop(holder);
    } else {
        // Another thread waits instead. Without one for it, as without memory, this process serves nobody
        // anyway.
        let _ = begin(move || drop(stream));
    }
}

/// A thread that holds all descriptors of this process until the returned value is dropped, and exits then.
fn hold_all() -> io::Result<Sender<Infallible>> {
    let (report, reported) = channel();
    let (holder, is_over) = channel();
    begin(move || {
        let _ = report.send(unshare(CloneFlags::CLONE_FILES));
        // Ends with an error when the other end is dropped.
        let _ = is_over.recv();
    })?;
    reported.recv().map_err(io::Error::other)??;
    Ok(holder)
}

fn begin(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name("closing".into())
        .stack_size(STACK_BYTES)
        .spawn(work)
        .map(drop)
}
