//! The socket to a shard, after the launch: orders out, reports in, a line of JSON each.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use nix::sys::socket::{MsgFlags, send};
use serde_json::Value;
use shard_api::launch::{Order, Report};

use crate::text::make_printable;

/// Bytes of a report at most.
const REPORT_BYTES_MAX: u64 = 1 << 20;

/// Sends an order, and never waits: a shard reads its orders or leaves the socket full.
///
/// # Errors
/// `WouldBlock` if the socket has no room for the order.
pub fn send_order(socket: &UnixStream, order: &Order) -> io::Result<()> {
    let mut line = serde_json::to_vec(order)?;
    line.push(b'\n');
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    // Linux queues so few bytes as one message, whole or not at all, so that the orders of several threads do not mix.
    match send(socket.as_raw_fd(), &line, flags)? {
        sent if sent == line.len() => Ok(()),
        _ => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// Reads reports until the shard is gone. The shard may be in a guest's hands: lines are bounded, and text is made printable.
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
        let mut report: Value = serde_json::from_slice(&line).ok()?;
        make_printable(&mut report);
        serde_json::from_value(report).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::json;
    use shard_api::launch::Ending;

    use super::*;

    fn reported(line: &str) -> Option<Report> {
        let (monitor, mut shard) = UnixStream::pair().unwrap();
        shard.write_all(line.as_bytes()).unwrap();
        drop(shard);
        Reports::new(monitor).next_report()
    }

    #[test]
    fn a_report_carries_no_terminal_escapes() {
        let detail = "\u{1b}]52;c;aGk=\u{7}".to_owned();
        let ended = Report::Ended(Ending::ShardFailed { detail });
        let line = serde_json::to_string(&ended).unwrap();
        let detail = " ]52;c;aGk= ".to_owned();
        assert_eq!(
            reported(&line),
            Some(Report::Ended(Ending::ShardFailed { detail }))
        );
        let running = |missing: &str, note: &str| Report::Running {
            sandbox_missing: vec![missing.to_owned()],
            sandbox_notes: vec![note.to_owned()],
        };
        let line = serde_json::to_string(&running("user namespace\u{9b}2J", "Landlock\u{1b}")).unwrap();
        assert_eq!(reported(&line), Some(running("user namespace 2J", "Landlock ")));
    }

    #[test]
    fn a_status_comes_as_it_was_sent() {
        let status = json!({ "exits": [1, u64::MAX, -3, 0.5], "disks": { "disk0": null } });
        let line = serde_json::to_string(&Report::Status(status.clone())).unwrap();
        assert_eq!(reported(&line), Some(Report::Status(status)));
    }

    #[test]
    fn an_order_that_does_not_fit_is_refused_at_once() {
        let (monitor, shard) = UnixStream::pair().unwrap();
        let mut sent = 0;
        let refused = loop {
            match send_order(&monitor, &Order::Status) {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        // Bytes that were sent before are whole.
        drop(monitor);
        let lines = BufReader::new(shard).lines().map(Result::unwrap);
        let orders = lines.map(|line| serde_json::from_str::<Order>(&line).unwrap());
        assert_eq!(orders.filter(|order| *order == Order::Status).count(), sent);
    }
}
