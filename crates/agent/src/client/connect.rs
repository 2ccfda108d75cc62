//! Connections to a guest's port through its VM's vsock socket.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use super::ClientError;

/// Longest time to wait.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// Time limit of one attempt: a guest whose driver is not up yet does not answer.
const ATTEMPT_MAX: Duration = Duration::from_secs(2);

/// Pause between attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Longest answer line: `OK 4294967295\n`.
const ANSWER_BYTES_MAX: usize = 32;

/// Connects to `port` of the guest through the vsock socket `path` (`CONNECT <port>\n`, `OK <port>\n`).
/// Retries until `limit` while the port has no listener.
pub fn connect_vsock(path: &Path, port: u32, limit: Duration) -> Result<UnixStream, ClientError> {
    connect_vsock_while(path, port, limit, || true)
}

/// Connects like [`connect_vsock`], and stops early when `goes_on` returns false.
pub fn connect_vsock_while(
    path: &Path,
    port: u32,
    limit: Duration,
    goes_on: impl Fn() -> bool,
) -> Result<UnixStream, ClientError> {
    let now = Instant::now();
    // A limit beyond the clock's range counts as a year.
    let deadline = now.checked_add(limit).unwrap_or(now + YEAR);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match attempt(path, port, left.clamp(Duration::from_millis(1), ATTEMPT_MAX)) {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error.into()),
            Err(_) if Instant::now() + PAUSE >= deadline || !goes_on() => return Err(ClientError::NoAgent),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

fn attempt(path: &Path, port: u32, limit: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + limit;
    let mut stream = UnixStream::connect(path)?;
    stream.set_write_timeout(Some(limit))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut line = Vec::new();
    // Byte by byte: the bytes after the line belong to the agent.
    while line.last() != Some(&b'\n') {
        if line.len() == ANSWER_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    if !line.starts_with(b"OK ") {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}
