//! Asking a cell.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::files::{CellFiles, Files};
use super::interface::{Answer, Ask, Status};

/// How long a cell may take to answer; longer than it waits for another one.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of an answer at most.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// A connection to a cell.
#[derive(Debug)]
pub struct Connection {
    lines: BufReader<UnixStream>,
}

impl Connection {
    /// To this cell.
    pub fn open(cell: &CellFiles) -> io::Result<Self> {
        let stream = UnixStream::connect(cell.socket())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            lines: BufReader::new(stream),
        })
    }

    /// Asks, and waits for the answer.
    pub fn ask(&mut self, ask: &Ask) -> io::Result<Answer> {
        let mut line = serde_json::to_vec(ask)?;
        line.push(b'\n');
        self.lines.get_mut().write_all(&line)?;
        let mut answer = String::new();
        if Read::take(&mut self.lines, ANSWER_BYTES_MAX).read_line(&mut answer)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&answer)?)
    }

    /// Waits until the connection ends.
    pub fn wait_for_end(&mut self) {
        let stream = self.lines.get_mut();
        let mut byte = [0];
        let _ = stream
            .set_read_timeout(None)
            .and_then(|()| stream.read(&mut byte));
    }

    /// The connection, for another thread to end it.
    pub fn stream(&self) -> io::Result<UnixStream> {
        self.lines.get_ref().try_clone()
    }
}

/// The cluster as its first cell that answers knows it; none without a cluster.
pub fn status(files: &Files) -> io::Result<Option<Status>> {
    let mut last = None;
    for cell in files.running()? {
        match Connection::open(&files.cell(cell.number)).and_then(|mut cell| cell.ask(&Ask::Status)) {
            Ok(Answer::Status(status)) => return Ok(Some(status)),
            Ok(_) => {}
            Err(error) => last = Some(error),
        }
    }
    last.map_or(Ok(None), Err)
}
