//! A client's connection to a cell of this host.
//!
//! Commands, the API and monitors connect. A monitor keeps its connection as long as its VM has its place,
//! and detects the end of the cell's process by the end of the connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::files::{CellFiles, Files};
use super::interface::{CellRequest, CellResponse, OF_CLIENT, Status};
use crate::json_line::Protocol;

/// Time limit for a cell's response; longer than a cell waits for another one.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a response, in bytes.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// A connection to a cell.
#[derive(Debug)]
pub struct Connection {
    lines: BufReader<UnixStream>,
}

impl Connection {
    /// Connects to a cell.
    pub fn open(cell: &CellFiles) -> io::Result<Self> {
        let stream = UnixStream::connect(cell.socket())?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        Ok(Self {
            lines: BufReader::new(stream),
        })
    }

    /// Takes over the connection of another process.
    pub fn of(stream: UnixStream) -> Self {
        Self {
            lines: BufReader::new(stream),
        }
    }

    /// Sends a request and waits for the response.
    ///
    /// # Errors
    /// If the cell closes the connection, takes longer than 10 s, or shares no version of the protocol with
    /// this program.
    pub fn ask(&mut self, ask: &CellRequest) -> io::Result<CellResponse> {
        self.exchange(&OF_CLIENT, ask)
    }

    /// Sends a request of a given protocol and waits for the response.
    ///
    /// # Errors
    /// As [`Connection::ask`].
    pub fn exchange<T: DeserializeOwned>(
        &mut self,
        protocol: &Protocol,
        request: &impl Serialize,
    ) -> io::Result<T> {
        self.lines.get_mut().write_all(&protocol.write(request)?)?;
        let mut answer = String::new();
        if Read::take(&mut self.lines, ANSWER_BYTES_MAX).read_line(&mut answer)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        protocol.read(&answer).map_err(io::Error::other)
    }

    /// Returns the process id of the cell.
    ///
    /// # Errors
    /// Those of `SO_PEERCRED`.
    pub fn peer(&self) -> io::Result<i32> {
        Ok(getsockopt(self.lines.get_ref(), sockopt::PeerCredentials)?.pid())
    }

    /// Sets a time limit for each response.
    ///
    /// # Errors
    /// If the limit is zero.
    pub fn limit_wait(&self, limit: Duration) -> io::Result<()> {
        self.lines.get_ref().set_read_timeout(Some(limit))
    }

    /// Waits until the connection ends.
    pub fn wait_for_end(&mut self) {
        let stream = self.lines.get_mut();
        let mut byte = [0];
        let _ = stream
            .set_read_timeout(None)
            .and_then(|()| stream.read(&mut byte));
    }

    /// Returns a duplicate of the connection, by which another thread can close it.
    pub fn stream(&self) -> io::Result<UnixStream> {
        self.lines.get_ref().try_clone()
    }
}

/// Returns the state of the cluster from the first cell that replies; none without a cluster.
///
/// # Errors
/// If no cell replies: the error of the last one.
pub fn status(files: &Files) -> io::Result<Option<Status>> {
    let mut last = None;
    for cell in files.running()? {
        match Connection::open(&files.cell(cell.number)).and_then(|mut cell| cell.ask(&CellRequest::Status)) {
            Ok(CellResponse::Status(status)) => return Ok(Some(status)),
            Ok(_) => {}
            Err(error) => last = Some(error),
        }
    }
    last.map_or(Ok(None), Err)
}
