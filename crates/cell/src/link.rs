//! The monitor's end of the control socket to a shard: sends the launch and orders, receives reports.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use locks::IgnorePoison;
use serde_json::Value;
use shard_api::control::{Assembly, ControlSocket, PACKET_BYTES_MAX, Packet};
use shard_api::launch::{Answer, Launch, NumberedOrder, Order, OrderId, Report};
use shard_api::message::ReceiveError;
use shard_api::version::send_launch;

use crate::text::make_printable;

/// Error of an order to a VM that is between two boots, or ending.
pub(crate) fn not_running() -> io::Error {
    io::Error::other("the VM is not running just now; try again, or see `mirrorball ps`")
}

/// The incarnation of a monitor that has no predecessor.
const FIRST_INCARNATION: u64 = 1;

/// The monitor's side of a shard's control socket.
#[derive(Debug)]
pub struct ShardLink {
    socket: ControlSocket,
    /// The incarnation of this monitor. Each successor has a greater one, whose orders a shard prefers.
    incarnation: u64,
    /// Whether the launch has been sent. An order before it would be taken for it.
    is_launched: AtomicBool,
    /// The number of the last order. Locked during a send, so that orders arrive in the order of their
    /// numbers.
    last: Mutex<u64>,
}

impl ShardLink {
    /// Makes a link, and the shard's end.
    pub fn pair() -> io::Result<(Self, ControlSocket)> {
        let (socket, theirs) = ControlSocket::pair()?;
        let link = Self {
            socket,
            incarnation: FIRST_INCARNATION,
            is_launched: AtomicBool::new(false),
            last: Mutex::new(0),
        };
        Ok((link, theirs))
    }

    /// Takes over the link of a predecessor of this process to a shard that has its launch.
    pub fn adopt(socket: OwnedFd, incarnation: u64) -> Self {
        Self {
            socket: socket.into(),
            incarnation,
            is_launched: AtomicBool::new(true),
            last: Mutex::new(0),
        }
    }

    /// The incarnation of its orders.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The socket, for a successor of this process.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends the launch, which comes before all orders.
    pub fn launch(&self, launch: &Launch, files: &[BorrowedFd<'_>]) -> Result<(), ReceiveError> {
        send_launch(&self.socket, launch, files)?;
        self.is_launched.store(true, Ordering::Release);
        Ok(())
    }

    /// Sends an order, and never blocks: a shard reads its orders or leaves the socket full. Returns the
    /// order's number, which its answer has, too.
    ///
    /// # Errors
    /// `WouldBlock` if the socket has no room for the order.
    pub fn order(&self, order: &Order) -> io::Result<OrderId> {
        if !self.is_launched.load(Ordering::Acquire) {
            return Err(not_running());
        }
        // Each change is whole, whichever thread panicked.
        let mut last = self.last.lock().ignore_poison();
        let id = OrderId {
            incarnation: self.incarnation,
            request: *last + 1,
        };
        let order = order.clone();
        self.socket.try_send(&NumberedOrder { id, order })?;
        *last = id.request;
        Ok(id)
    }

    /// Reports of the shard, from now on.
    pub fn reports(&self) -> io::Result<Reports> {
        self.socket.try_clone().map(Reports::new)
    }

    /// Ends the connection, whichever process has the shard's end.
    pub fn shut_down(&self) {
        self.socket.shut_down();
    }
}

/// Reads reports until the shard is gone. The shard may be under a guest's control: messages are bounded,
/// files come with one kind of answer alone, and text is made printable.
pub struct Reports {
    socket: ControlSocket,
    assembly: Assembly,
    /// The files of the last report, which may be of any type.
    files: Vec<File>,
    /// Whether the last message was no report.
    is_broken: bool,
}

impl Reports {
    /// Reads from this socket.
    pub fn new(socket: ControlSocket) -> Self {
        Self {
            socket,
            assembly: Assembly::default(),
            files: Vec::new(),
            is_broken: false,
        }
    }

    /// Whether the reports ended because the shard sent a message that is no report.
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Takes the files that came with the last report: those of [`Answer::VcpuStatistics`], as many as the
    /// answer names, or none if this process has no descriptors left. They may be of any type.
    pub(crate) fn take_files(&mut self) -> Vec<File> {
        std::mem::take(&mut self.files)
    }

    /// The next report; `None` at the end, or after a message that is no report.
    pub fn next_report(&mut self) -> Option<Report> {
        self.next(None)
    }

    /// As [`Self::next_report`]; `None`, too, if the report has not arrived whole before `deadline`.
    pub fn next_report_by(&mut self, deadline: Instant) -> Option<Report> {
        self.next(Some(deadline))
    }

    fn next(&mut self, deadline: Option<Instant>) -> Option<Report> {
        let report = self.receive(deadline);
        self.is_broken = report
            .as_ref()
            .is_err_and(|error| !matches!(error, ReceiveError::Io(_)));
        report.ok().flatten()
    }

    /// Waits for something to read, or the end. False if neither has come before `deadline`.
    pub(crate) fn wait_until(&self, deadline: Instant) -> io::Result<bool> {
        self.socket.wait_until(deadline)
    }

    /// The next report; none at the end, or if it has not arrived before `deadline`.
    fn receive(&mut self, deadline: Option<Instant>) -> Result<Option<Report>, ReceiveError> {
        self.files = Vec::new();
        let (message, packet) = loop {
            if let Some(deadline) = deadline
                && !self.socket.wait_until(deadline)?
            {
                return Ok(None);
            }
            let next = self.socket.receive_packet_with_files(PACKET_BYTES_MAX)?;
            let Some(packet) = next else {
                return Ok(None);
            };
            let message = self.assembly.take(&packet.bytes)?;
            let has_files = packet.is_cut || !packet.files.is_empty();
            match message {
                Some(message) => break (message, packet),
                // The message with files is short: it is one packet.
                None if has_files => return Err(ReceiveError::Packet),
                None => {}
            }
        };
        let mut report: Value = serde_json::from_slice(&message)?;
        make_printable(&mut report);
        let report = serde_json::from_value(report)?;
        let named = match &report {
            Report::Answer {
                answer: Answer::VcpuStatistics { files },
                ..
            } => Some(usize::from(*files)),
            _ => None,
        };
        match (named, packet) {
            // This process has no descriptors left: the answer came without files.
            (Some(_), Packet { is_cut: true, .. }) => {}
            (
                named,
                Packet {
                    files, is_cut: false, ..
                },
            ) if files.len() == named.unwrap_or(0) => {
                self.files = files;
            }
            _ => return Err(ReceiveError::Packet),
        }
        Ok(Some(report))
    }
}

#[cfg(test)]
impl ShardLink {
    /// A link whose shard has its launch, and the shard's end.
    pub fn of_launched() -> io::Result<(Self, ControlSocket)> {
        let (link, theirs) = Self::pair()?;
        link.is_launched.store(true, Ordering::Release);
        Ok((link, theirs))
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::{AsFd, AsRawFd};
    use std::time::Duration;

    use nix::sys::socket::{ControlMessage, MsgFlags, send, sendmsg};
    use serde_json::json;
    use shard_api::launch::Ending;

    use super::*;

    /// The report that a monitor decodes from a shard's message.
    fn reported(message: &impl serde::Serialize) -> Option<Report> {
        let (monitor, shard) = ControlSocket::pair().unwrap();
        shard.send(message, &[]).unwrap();
        drop(shard);
        Reports::new(monitor).next_report()
    }

    #[test]
    fn a_report_carries_no_terminal_escapes() {
        let detail = "\u{1b}]52;c;aGk=\u{7}".to_owned();
        let ended = Report::Ended(Ending::ShardFailed { detail });
        let detail = " ]52;c;aGk= ".to_owned();
        assert_eq!(
            reported(&ended),
            Some(Report::Ended(Ending::ShardFailed { detail }))
        );
        let running = |missing: &str, note: &str| Report::Running {
            versions: urpc::version::Versions::FIRST,
            sandbox_missing: vec![missing.to_owned()],
            sandbox_notes: vec![note.to_owned()],
        };
        let sent = running("user namespace\u{9b}2J", "Landlock\u{1b}");
        assert_eq!(reported(&sent), Some(running("user namespace 2J", "Landlock ")));
    }

    #[test]
    fn a_status_comes_as_it_was_sent() {
        let exits = json!([1, u64::MAX, -3, 0.5]);
        let status = json!({ "exits": exits, "long": "x".repeat(2 * PACKET_BYTES_MAX) });
        let report = Report::Answer {
            to: OrderId::default(),
            answer: Answer::Status(status),
        };
        assert!(reported(&report) == Some(report));
    }

    #[test]
    fn a_message_that_is_no_report_ends_the_reports_of_a_shard() {
        for wrong in [json!("running"), json!({ "ended": { "how": "well" } }), json!(1)] {
            assert_eq!(reported(&wrong), None, "{wrong}");
        }
        let (monitor, shard) = ControlSocket::pair().unwrap();
        let mut reports = Reports::new(monitor);
        shard.send(&Report::Ended(Ending::PowerOff), &[]).unwrap();
        shard.send(&json!({ "huge": u64::MAX }), &[]).unwrap();
        assert!(reports.next_report().is_some() && !reports.is_broken());
        assert!(reports.next_report().is_none() && reports.is_broken());
        drop(shard);
        assert!(
            reports.next_report().is_none() && !reports.is_broken(),
            "an end is none"
        );
        // A whole report.
        let report = Report::Ended(Ending::PowerOff);
        let bytes = serde_json::to_vec(&report).unwrap();
        let whole = [&(bytes.len() as u32).to_le_bytes()[..], &[0; 4], &bytes].concat();
        assert_eq!(sent_as_packet(&whole, 0), Some(report));
        // The same with unexpected files, and packets that are no part of a message.
        assert_eq!(sent_as_packet(&whole, 1), None);
        assert_eq!(sent_as_packet(&whole, 253), None);
        for wrong in [
            &b""[..],
            b"x",
            b"{\"ended\":{\"how\":\"power-off\"}}\n",
            &[0; 70_000],
        ] {
            assert_eq!(sent_as_packet(wrong, 0), None, "{} bytes", wrong.len());
        }
    }

    #[test]
    fn files_come_with_an_answer_that_names_them_and_with_no_other_report() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let answered = |named: u8, sent: usize| {
            let (monitor, shard) = ControlSocket::pair().unwrap();
            let answer = Answer::VcpuStatistics { files: named };
            let to = OrderId::default();
            shard
                .send(&Report::Answer { to, answer }, &vec![file.as_fd(); sent])
                .unwrap();
            let mut reports = Reports::new(monitor);
            let is_report = reports.next_report().is_some();
            assert_ne!(is_report, reports.is_broken());
            is_report.then(|| reports.take_files().len())
        };
        for count in [0, 1, 64] {
            assert_eq!(answered(count, count.into()), Some(count.into()));
        }
        // Other numbers than it names.
        for (named, sent) in [(2, 1), (1, 2), (0, 1), (1, 0)] {
            assert_eq!(answered(named, sent), None, "{sent} files of {named}");
        }
        // More than there is room for: the kernel closes the rest.
        assert_eq!(answered(65, 65), Some(0));
    }

    /// The report that a monitor decodes from a shard's packet with so many files.
    fn sent_as_packet(packet: &[u8], files: usize) -> Option<Report> {
        let (monitor, shard) = ControlSocket::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let passed = vec![file.as_raw_fd(); files];
        let rights = [ControlMessage::ScmRights(&passed)];
        let rights = if files == 0 { &[] } else { &rights[..] };
        let (to, parts) = (shard.as_fd().as_raw_fd(), [IoSlice::new(packet)]);
        let sent = sendmsg::<()>(to, &parts, rights, MsgFlags::empty(), None);
        assert_eq!(sent, Ok(packet.len()));
        drop(shard);
        Reports::new(monitor).next_report()
    }

    #[test]
    fn a_shard_that_sends_the_rest_of_messages_forever_is_not_waited_for_beyond_the_deadline() {
        let (monitor, shard) = ControlSocket::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // A message of 100 bytes, of which only the last comes, again and again.
                let rest = [100, 0, 0, 0, 99, 0, 0, 0, b'x'];
                let flags = MsgFlags::MSG_NOSIGNAL;
                while send(shard.as_fd().as_raw_fd(), &rest, flags).is_ok() {}
            });
            let started = Instant::now();
            let mut reports = Reports::new(monitor);
            assert_eq!(reports.next_report_by(started + Duration::from_millis(100)), None);
            assert!(started.elapsed() < Duration::from_secs(5));
        });
    }

    #[test]
    fn an_order_that_does_not_fit_is_refused_at_once() {
        let (monitor, shard) = ShardLink::of_launched().unwrap();
        let mut sent = 0;
        let refused = loop {
            match monitor.order(&Order::Status) {
                Ok(id) => {
                    sent += 1;
                    assert_eq!((id.incarnation, id.request), (FIRST_INCARNATION, sent));
                }
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        drop(monitor);
        let mut orders = Vec::new();
        while let Ok((message, _)) = shard.receive_with_files() {
            orders.push(serde_json::from_slice::<NumberedOrder>(&message).unwrap());
        }
        assert!(orders.iter().all(|order| order.order == Order::Status));
        let requests: Vec<u64> = orders.iter().map(|order| order.id.request).collect();
        assert_eq!(requests, (1..=sent).collect::<Vec<_>>());
    }

    #[test]
    fn orders_of_a_successor_have_a_greater_number_than_those_before() {
        let (monitor, shard) = ShardLink::of_launched().unwrap();
        let before = monitor.order(&Order::Nmi).unwrap();
        let left = monitor.socket().try_clone_to_owned().unwrap();
        let successor = ShardLink::adopt(left, monitor.incarnation() + 1);
        drop(monitor);
        assert!(successor.order(&Order::Status).unwrap() > before);
        let orders = [(); 2].map(|()| {
            let (message, _) = shard.receive_with_files().unwrap();
            serde_json::from_slice::<NumberedOrder>(&message).unwrap().order
        });
        assert_eq!(orders, [Order::Nmi, Order::Status]);
    }

    #[test]
    fn an_order_before_the_launch_is_refused_and_not_sent() {
        let (monitor, shard) = ShardLink::pair().unwrap();
        let refused = monitor.order(&Order::Quit).unwrap_err();
        assert_eq!(refused.to_string(), not_running().to_string());
        drop(monitor);
        assert!(shard.receive_with_files().is_err());
    }
}
