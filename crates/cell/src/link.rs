//! The socket to a shard, after the launch: orders out, reports in, a line of JSON each.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;

use shard::launch::{Order, Report};

/// Bytes of a report at most.
const REPORT_BYTES_MAX: u64 = 1 << 20;

/// Sends an order.
pub fn send_order(mut socket: &UnixStream, order: &Order) -> io::Result<()> {
    let mut line = serde_json::to_vec(order)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Reads reports until the shard is gone. The shard may be in a guest's hands: lines are bounded.
pub struct Reports(BufReader<UnixStream>);

impl Reports {
    /// Reads from this socket.
    pub fn new(socket: UnixStream) -> Self {
        Self(BufReader::new(socket))
    }

    /// The next report; `None` at the end, or when what comes is not a report.
    pub fn next_report(&mut self) -> Option<Report> {
        let mut line = Vec::new();
        let mut bounded = Read::take(&mut self.0, REPORT_BYTES_MAX);
        bounded.read_until(b'\n', &mut line).ok()?;
        serde_json::from_slice(&line).ok()
    }
}
