//! Messages with files over stream sockets: a line of JSON, with the files that it names by number as
//! SCM_RIGHTS.
//!
//! They request a freeze from a shard, and return the frozen state. The launch uses the [control
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

/// Greatest number of files of one message (SCM_MAX_FD of Linux).
pub const FILES_MAX: usize = 253;
/// Greatest length of a message, bytes.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Reason why a message is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The socket broke.
    #[error("cannot exchange a message between monitor and shard")]
    Io(#[from] io::Error),
    /// The monitor is gone, or its message never ends.
    #[error("a message between monitor and shard is incomplete")]
    Incomplete,
    /// The message is longer than the limit.
    #[error("a message between monitor and shard has {0} bytes, more than it may have")]
    TooLong(usize),
    /// The packet is not part of a message, or has files that are not allowed.
    #[error("a packet between monitor and shard is not understood")]
    Packet,
    /// The message is not valid JSON of its type.
    #[error("a message between monitor and shard is not understood")]
    Json(#[from] serde_json::Error),
    /// A file was not passed, or is used twice.
    #[error("the message names file {0}, which was not passed or is used already")]
    NoFile(usize),
    /// The message has more files than allowed.
    #[error("the VM needs {0} open files; a shard takes {FILES_MAX}")]
    TooManyFiles(usize),
}

/// The files of a message, each of which can be taken once.
#[derive(Debug, Default)]
pub struct Files(Vec<Option<File>>);

impl Files {
    /// Creates the files of a message, by their indices in it.
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

/// Sends `message` and `files`, whose indices the message uses: the counterpart of [`receive`].
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

/// Receives a message and its files. A sender waits for the answer before it sends again, so all bytes until
/// then are the line.
pub fn receive<M: DeserializeOwned>(socket: &mut UnixStream) -> Result<(M, Files), ReceiveError> {
    receive_until(socket, None)
}

/// Works as [`receive`] for a sender that a guest may control: the whole message must arrive before
/// `deadline`.
pub fn receive_by<M: DeserializeOwned>(
    socket: &mut UnixStream,
    deadline: Instant,
) -> Result<(M, Files), ReceiveError> {
    receive_until(socket, Some(deadline))
}

/// Limits the next read to the remaining time.
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
                // The kernel does not continue by itself if the socket has a time limit (`signal(7)`).
                Err(Errno::EINTR) => limit(socket, deadline)?,
                received => break received.map_err(io::Error::from)?,
            }
        };
        let mut files = Vec::new();
        for control in message.cmsgs().map_err(|_| ReceiveError::Incomplete)? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                // SAFETY: the kernel has just returned these descriptors, which have no other owner.
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
    fn message_that_arrives_byte_by_byte_times_out_at_the_deadline() {
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
    fn message_is_received_despite_a_signal() {
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
