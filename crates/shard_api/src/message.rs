//! Messages with files over stream sockets: a line of JSON, with the files that it names by number as
//! SCM_RIGHTS.
//!
//! They ask a shard to freeze its VM, and bring what it froze. The launch goes by the [control
//! socket](crate::control).

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::launch::Fd;

/// Files that one message can carry (SCM_MAX_FD of Linux).
pub const FILES_MAX: usize = 253;
/// Longest message, bytes.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Why a message is no good.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The socket broke.
    #[error("cannot exchange a message between monitor and shard")]
    Io(#[from] io::Error),
    /// The monitor went away, or its message never ends.
    #[error("a message between monitor and shard is incomplete")]
    Incomplete,
    /// More than one message may have.
    #[error("a message between monitor and shard has {0} bytes, more than it may have")]
    TooLong(usize),
    /// No part of a message, or files where none may be.
    #[error("a packet between monitor and shard is not understood")]
    Packet,
    /// Not what was expected.
    #[error("a message between monitor and shard is not understood")]
    Json(#[from] serde_json::Error),
    /// A file that was not passed, or is used twice.
    #[error("the message names file {0}, which was not passed or is used already")]
    NoFile(usize),
    /// More files than a message carries.
    #[error("the VM needs {0} open files; a shard takes {FILES_MAX}")]
    TooManyFiles(usize),
}

/// The files of the message, each to be taken once.
#[derive(Debug, Default)]
pub struct Files(Vec<Option<File>>);

impl Files {
    /// The files of a message, by their indices in it.
    pub(crate) fn of(files: Vec<File>) -> Self {
        Self(files.into_iter().map(Some).collect())
    }

    /// Takes a file.
    pub fn take(&mut self, fd: Fd) -> Result<File, ReceiveError> {
        self.0
            .get_mut(fd.0)
            .and_then(Option::take)
            .ok_or(ReceiveError::NoFile(fd.0))
    }
}

/// Sends `message` and `files`, whose indices the message uses: the other side of [`receive`].
pub fn send(
    socket: &mut UnixStream,
    message: &impl Serialize,
    files: &[BorrowedFd<'_>],
) -> Result<(), ReceiveError> {
    if files.len() > FILES_MAX {
        return Err(ReceiveError::TooManyFiles(files.len()));
    }
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let files: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&files)];
    let sent = sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(&line)],
        if files.is_empty() { &[] } else { &rights },
        MsgFlags::MSG_NOSIGNAL,
        None,
    )
    .map_err(io::Error::from)?;
    socket.write_all(&line[sent..])?;
    Ok(())
}

/// Receives a message and its files. Whoever sends one sends nothing more before it has an answer, so what
/// comes until then is the line.
pub fn receive<M: DeserializeOwned>(socket: &mut UnixStream) -> Result<(M, Files), ReceiveError> {
    receive_until(socket, None)
}

/// The same, of a sender that may be in a guest's hands: the whole message comes before `deadline`.
pub fn receive_by<M: DeserializeOwned>(
    socket: &mut UnixStream,
    deadline: Instant,
) -> Result<(M, Files), ReceiveError> {
    receive_until(socket, Some(deadline))
}

/// Limits the next read to what is left of the time.
fn limit(socket: &UnixStream, deadline: Option<Instant>) -> io::Result<()> {
    let Some(deadline) = deadline else { return Ok(()) };
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => socket.set_read_timeout(Some(left)),
    }
}

fn receive_until<M: DeserializeOwned>(
    socket: &mut UnixStream,
    deadline: Option<Instant>,
) -> Result<(M, Files), ReceiveError> {
    limit(socket, deadline)?;
    let mut line = vec![0; 64 << 10];
    let mut rights = nix::cmsg_space!([RawFd; FILES_MAX]);
    let (mut filled, files) = {
        let mut parts = [IoSliceMut::new(&mut line)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = loop {
            match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut rights), flags) {
                // The kernel does not go on by itself if the socket has a time limit (`signal(7)`).
                Err(Errno::EINTR) => limit(socket, deadline)?,
                received => break received.map_err(io::Error::from)?,
            }
        };
        let mut files = Vec::new();
        for control in message.cmsgs().map_err(|_| ReceiveError::Incomplete)? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                // SAFETY: the kernel has just given us these descriptors; nobody else knows them.
                files.extend(fds.into_iter().map(|fd| unsafe { File::from_raw_fd(fd) }));
            }
        }
        (message.bytes, files)
    };
    while filled == 0 || line[filled - 1] != b'\n' {
        if filled >= MESSAGE_BYTES_MAX {
            return Err(ReceiveError::Incomplete);
        }
        line.resize((filled + (64 << 10)).min(MESSAGE_BYTES_MAX), 0);
        limit(socket, deadline)?;
        match socket.read(&mut line[filled..]) {
            Ok(0) => return Err(ReceiveError::Incomplete),
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok((serde_json::from_slice(&line[..filled])?, Files::of(files)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::thread::JoinHandleExt;

    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    use super::*;

    #[test]
    fn a_message_that_comes_byte_by_byte_is_not_waited_for_beyond_the_deadline() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while far.write_all(b"x").is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let start = Instant::now();
            let deadline = start + Duration::from_millis(200);
            let received = receive_by::<String>(&mut near, deadline).map(|(message, _)| message);
            assert!(matches!(received, Err(ReceiveError::Io(_))), "{received:?}");
            assert!(start.elapsed() < Duration::from_secs(5));
            drop(near);
        });
    }

    #[test]
    fn message_is_received_although_a_signal_comes_meanwhile() {
        extern "C" fn nothing(_: nix::libc::c_int) {}
        let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler does nothing, and no other test uses the signal.
        unsafe { sigaction(Signal::SIGUSR2, &action) }.unwrap();
        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let receiver = std::thread::spawn(move || receive::<String>(&mut near).map(|(message, _)| message));
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(5));
            // SAFETY: the thread is not joined yet, so the id is its own.
            let result = unsafe { nix::libc::pthread_kill(receiver.as_pthread_t(), nix::libc::SIGUSR2) };
            assert!(result == 0 || receiver.is_finished());
        }
        send(&mut far, &"late".to_owned(), &[]).unwrap();
        assert_eq!(receiver.join().unwrap().unwrap(), "late");
    }
}
