//! The monitor's orders as they come, and reports to it.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use crate::launch::{Ending, Order, Report};
use crate::span::router::Router;

/// Longest order, bytes.
const ORDER_BYTES_MAX: usize = 4096;

/// Writes a report as one line.
pub fn report(socket: &mut UnixStream, report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Has the vCPUs of this shard add more to their host's counter. What makes no sense is left out, and logged.
pub fn step(router: &Router, offset: u64) {
    if let Err(error) = router.step(offset) {
        eprintln!("{error}");
    }
}

/// The socket they come over.
pub struct Orders {
    socket: UnixStream,
    /// Bytes of orders not complete yet.
    bytes: Vec<u8>,
}

impl AsFd for Orders {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Orders {
    /// Nothing has come yet.
    pub fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            bytes: Vec::new(),
        }
    }

    /// Answers. A monitor that is gone shows at the next read.
    pub fn answer(&mut self, answer: &Report) {
        let _ = report(&mut self.socket, answer);
    }

    /// Reads what has come and obeys it; an ending when one asks for it. A monitor that has died ends this process at once.
    pub fn receive(&mut self, mut obey: impl FnMut(&mut Self, Order) -> Option<Ending>) -> Option<Ending> {
        let mut buffer = [0; ORDER_BYTES_MAX];
        match self.socket.read(&mut buffer) {
            Ok(0) => std::process::exit(1),
            Ok(bytes) => self.bytes.extend_from_slice(&buffer[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return None,
            Err(_) => std::process::exit(1),
        }
        while let Some(end) = self.bytes.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.bytes.drain(..=end).collect();
            match serde_json::from_slice(&line) {
                Ok(order) => {
                    if let Some(ending) = obey(self, order) {
                        return Some(ending);
                    }
                }
                Err(error) => {
                    let detail = format!("the monitor's order is not understood: {error}");
                    return Some(Ending::ShardFailed { detail });
                }
            }
        }
        (self.bytes.len() > ORDER_BYTES_MAX).then(|| Ending::ShardFailed {
            detail: "the monitor's order never ends".to_owned(),
        })
    }
}
