//! One deadline for a whole exchange of any number of reads and writes.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The moment by which an exchange must be complete.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

/// A socket whose reads and writes fail with `TimedOut` once the deadline has passed. A peer that sends a
/// byte at a time cannot extend it.
#[derive(Debug)]
pub struct Timed<'a, S> {
    socket: &'a S,
    deadline: Deadline,
}

/// A socket that can limit a single read or write.
pub trait Timeouts {
    /// Limits the next read.
    ///
    /// # Errors
    /// Fails with the error of the kernel.
    fn limit_read(&self, limit: Duration) -> io::Result<()>;

    /// Limits the next write.
    ///
    /// # Errors
    /// Fails with the error of the kernel.
    fn limit_write(&self, limit: Duration) -> io::Result<()>;
}

impl Deadline {
    /// Returns the deadline `limit` from now.
    pub fn after(limit: Duration) -> Self {
        Self(Instant::now() + limit)
    }

    /// Returns the remaining time.
    ///
    /// # Errors
    /// Fails with `TimedOut` if there is none.
    pub fn left(self) -> io::Result<Duration> {
        match self.0.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }

    /// Returns the socket under this deadline. The timeouts of the last read and write remain on it.
    pub fn over<S: Timeouts>(self, socket: &S) -> Timed<'_, S> {
        Timed {
            socket,
            deadline: self,
        }
    }
}

impl<'a, S: Timeouts> Read for Timed<'a, S>
where
    &'a S: Read,
{
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.socket.limit_read(self.deadline.left()?)?;
        let mut socket = self.socket;
        socket.read(bytes).map_err(timed_out)
    }
}

impl<'a, S: Timeouts> Write for Timed<'a, S>
where
    &'a S: Write,
{
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.limit_write(self.deadline.left()?)?;
        let mut socket = self.socket;
        socket.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut socket = self.socket;
        socket.flush()
    }
}

/// Converts a socket's timeout, which the kernel reports as `WouldBlock`.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
        _ => error,
    }
}

impl Timeouts for TcpStream {
    fn limit_read(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))
    }

    fn limit_write(&self, limit: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(limit))
    }
}

impl Timeouts for UnixStream {
    fn limit_read(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))
    }

    fn limit_write(&self, limit: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(limit))
    }
}
