//! Closes a connection without waiting for descriptors that its peer has sent.
//!
//! A peer may send descriptors (`SCM_RIGHTS`, `unix(7)`) that this process never receives. The close of the
//! connection closes them, too. A TCP socket among them that has `SO_LINGER` (`socket(7)`) blocks its last
//! closer for as long as the peer chose. A task that exits does not linger (`PF_EXITING` in `inet_release`,
//! `net/ipv4/af_inet.c` of Linux). So the last holder of the connection is a task that has a copy of the
//! table of descriptors and exits: a thread (`unshare(2)`, `CLONE_FILES`) or, where `unshare` is refused as
//! in some containers, a child process (`fork(2)`).

use std::convert::Infallible;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};

use super::STACK_BYTES;

/// Threads that wait for the end of a close at most, where the host has no process to spare either.
const WAITING_MAX: usize = 32;

/// Closes a connection. The caller does not wait for the peer.
pub(super) fn close(stream: UnixStream) {
    close_held(stream, hold_all);
}

/// The same, with a thread that `hold` makes or, if that fails, a child process.
fn close_held(stream: UnixStream, hold: impl FnOnce() -> io::Result<Sender<Infallible>>) {
    static WAITING: Bound = Bound(AtomicUsize::new(0), WAITING_MAX);
    if let Ok(holder) = hold() {
        // The holder exits afterwards.
        drop(stream);
        drop(holder);
    } else if let Ok(holder) = Holder::start() {
        drop(stream);
        holder.end();
    } else if WAITING.take() {
        // Another thread waits instead. Without one for it, as without memory, this process serves no
        // client anyway.
        let close = move || {
            drop(stream);
            WAITING.give_back();
        };
        if begin(close).is_err() {
            WAITING.give_back();
        }
    }
    // Else this thread waits: so many threads wait already that each more would take the host's memory.
}

/// Maximum number of connections that are being closed at once.
struct Bound(AtomicUsize, usize);

impl Bound {
    /// Takes one of the places, if one is free.
    fn take(&self) -> bool {
        let more = |count| (count < self.1).then_some(count + 1);
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .is_ok()
    }

    fn give_back(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
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

/// A child process that holds all descriptors of this process until [`Holder::end`].
struct Holder {
    child: nix::unistd::Pid,
    go: io::PipeWriter,
}

impl Holder {
    fn start() -> io::Result<Self> {
        let (wait, go) = io::pipe()?;
        let wait = OwnedFd::from(wait);
        // SAFETY: the child calls nothing but read and _exit, which a child of a process with threads may.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Self { child, go }),
            ForkResult::Child => {
                let mut byte = 0_u8;
                // A byte and not the end, of which another child may hold a copy.
                // SAFETY: reads one byte into a variable of ours.
                while unsafe { libc::read(wait.as_raw_fd(), (&raw mut byte).cast(), 1) } < 0
                    && nix::errno::Errno::last() == nix::errno::Errno::EINTR
                {}
                // SAFETY: ends the process without running anything of the parent's.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Has the child exit, which closes what it alone holds. Returns when it has.
    fn end(mut self) {
        // A child that was killed has closed everything.
        let _ = self.go.write_all(&[0]);
        while waitpid(self.child, None) == Err(nix::errno::Errno::EINTR) {}
    }
}

fn begin(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name("closing".into())
        .stack_size(STACK_BYTES)
        .spawn(work)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::tests::{SOON, trapped};
    use super::*;

    fn refused() -> io::Result<Sender<Infallible>> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    #[test]
    fn close_where_unshare_is_refused_waits_for_nothing_and_takes_no_thread() {
        const TRAPS: usize = 8;
        let traps: Vec<_> = (0..TRAPS).map(|_| trapped(b"")).collect();
        let begun = Instant::now();
        let _listeners: Vec<_> = traps
            .into_iter()
            .map(|(connection, listener)| {
                close_held(connection, refused);
                listener
            })
            .collect();
        let took = begun.elapsed();
        assert!(took < SOON, "{took:?}");
        let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let closing = names.filter(|name| name.trim() == "closing").count();
        assert!(closing < TRAPS, "{closing} threads wait");
    }

    #[test]
    fn bound_gives_so_many_places_and_again_those_that_are_given_back() {
        let bound = Bound(AtomicUsize::new(0), 2);
        assert_eq!([bound.take(), bound.take(), bound.take()], [true, true, false]);
        bound.give_back();
        assert_eq!([bound.take(), bound.take()], [true, false]);
    }
}
