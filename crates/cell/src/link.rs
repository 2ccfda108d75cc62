//! The socket between a monitor and a shard: one message with the open files, then JSON lines.

use std::io::{self, BufRead, BufReader, IoSlice, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use shard::launch::{LaunchSpec, Order, Report};

/// Files in one message at most (SCM_MAX_FD of Linux).
const FILES_MAX: usize = 253;

/// Sends the spec as one JSON line, the files with its first byte.
pub fn send_launch(socket: &UnixStream, spec: &LaunchSpec, files: &[OwnedFd]) -> io::Result<()> {
    if files.len() > FILES_MAX {
        return Err(io::Error::other(format!(
            "{} files for one VM, {FILES_MAX} are possible",
            files.len()
        )));
    }
    let mut line = serde_json::to_vec(spec)?;
    line.push(b'\n');
    let raw: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let sent = sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(&line)],
        &rights,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    let mut rest = socket;
    rest.write_all(&line[sent..])
}

/// Sends an order.
pub fn send_order(mut socket: &UnixStream, order: &Order) -> io::Result<()> {
    let mut line = serde_json::to_vec(order)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Reads reports until the shard is gone. The shard may be in a guest's hands: lines are bounded.
pub struct Reports(BufReader<UnixStream>);

/// Bytes of a report at most.
const REPORT_BYTES_MAX: u64 = 1 << 20;

impl Reports {
    /// Reads from this socket.
    pub fn new(socket: UnixStream) -> Self {
        Self(BufReader::new(socket))
    }

    /// The next report; `None` at the end, or when what comes is not a report.
    pub fn next_report(&mut self) -> Option<Report> {
        let mut line = Vec::new();
        let mut bounded = io::Read::take(&mut self.0, REPORT_BYTES_MAX);
        bounded.read_until(b'\n', &mut line).ok()?;
        serde_json::from_slice(&line).ok()
    }
}
