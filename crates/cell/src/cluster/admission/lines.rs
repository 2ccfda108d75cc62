//! Reads lines of a user's connection: each has a maximum length, and is received whole within a time limit.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use registry::cluster::admission::REQUEST_BYTES_MAX;

/// The lines of a connection.
pub(super) struct Lines<'a> {
    stream: &'a UnixStream,
    /// Received bytes that are not parsed yet.
    bytes: Vec<u8>,
}

impl<'a> Lines<'a> {
    /// Lines that are received from now on.
    pub(super) fn new(stream: &'a UnixStream) -> Self {
        Self {
            stream,
            bytes: Vec::new(),
        }
    }

    /// The next line, without its end; none at the end of the connection. With a `limit` the whole line must
    /// arrive within that time, in however many pieces.
    ///
    /// # Errors
    /// If it is too late or too long.
    pub(super) fn next(&mut self, limit: Option<Duration>) -> io::Result<Option<Vec<u8>>> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut looked_at = 0;
        loop {
            if let Some(end) = self.bytes[looked_at..].iter().position(|byte| *byte == b'\n') {
                let rest = self.bytes.split_off(looked_at + end + 1);
                let mut line = std::mem::replace(&mut self.bytes, rest);
                line.pop();
                return Ok(Some(line));
            }
            looked_at = self.bytes.len();
            if looked_at as u64 >= REQUEST_BYTES_MAX {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a request is too long",
                ));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(left)?;
            let mut chunk = [0; 512];
            let count = match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(None),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => return Err(error),
            };
            self.bytes.extend(&chunk[..count]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        theirs.write_all(b"one\n\ntw").unwrap();
        let mut lines = Lines::new(&ours);
        assert_eq!(lines.next(Some(LONG)).unwrap().unwrap(), b"one");
        assert_eq!(lines.next(Some(LONG)).unwrap().unwrap(), b"");
        theirs.write_all(b"o\nrest").unwrap();
        assert_eq!(lines.next(None).unwrap().unwrap(), b"two");
        drop(theirs);
        assert_eq!(lines.next(Some(LONG)).unwrap(), None);
    }

    #[test]
    fn line_without_end_is_refused() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            // The limit holds until the other end is closed.
            while theirs.write_all(&[b'x'; 512]).is_ok() {}
        });
        let error = Lines::new(&ours).next(Some(LONG)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(ours);
        writer.join().unwrap();
    }

    #[test]
    fn bytes_one_by_one_extend_no_limit() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            while theirs.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let begun = Instant::now();
        assert!(Lines::new(&ours).next(Some(Duration::from_millis(100))).is_err());
        assert!(begun.elapsed() < LONG / 2);
        drop(ours);
        writer.join().unwrap();
    }
}
