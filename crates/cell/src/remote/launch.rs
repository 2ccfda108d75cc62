//! The command that starts a part's monitor, for the home's monitor on another host: the request comes on its
//! standard input, the answer goes to its standard output. The monitor outlives it, in a session of its own.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use child_process::in_new_session;
use registry::lease::OWN_PROGRAM;

/// The command's name, by which the home requests it.
pub const COMMAND: &str = "part";
/// The monitor's name, by which the command starts it.
pub const MONITOR: &str = "part-monitor";
/// Maximum length of a request, in bytes: that of a VM's file, with some room.
const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Time limit for the monitor to have its place, or not; longer than a cell may take to answer.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Starts the monitor of the part that `input` requests, and writes its answer to `output`.
///
/// # Errors
/// If it can't be started, or ends without an answer.
pub fn launch(input: impl Read, mut output: impl Write) -> io::Result<()> {
    let mut request = Vec::new();
    input.take(REQUEST_BYTES_MAX).read_to_end(&mut request)?;
    let (mut socket, theirs) = UnixStream::pair()?;
    let mut command = Command::new(OWN_PROGRAM);
    command.arg0("mirrorball").arg(MONITOR);
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    // It is not waited for: it outlives this command.
    in_new_session(&mut command).spawn()?;
    drop(command);
    socket.write_all(&request)?;
    socket.shutdown(Shutdown::Write)?;
    socket.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut answer = String::new();
    BufReader::new(socket).read_line(&mut answer)?;
    output.write_all(answer.as_bytes())?;
    output.flush()
}
