//! The process of a card's frame filter, from the starter's side, and the messages to it.
//!
//! The process runs a [`Relay`] between a card and its passt. Its standard input is a socket of packets. The
//! first packet has the descriptors of both sides and of the [`Count`]; the next ones are lists of barred
//! addresses. The process requests a list when it has frames to judge and its list is old; without a reply
//! its list stays unchanged.
//!
//! It ends when the card's socket or passt's closes; before it has received them, when its standard input
//! ends. No signal ties it to its starter: a VM that outlives its monitor keeps its cards, and the monitor's
//! successor adopts the filter. A guest may have compromised the process. The monitor reads the count, which
//! is a number, and the last line that the process wrote before it failed or ended, as text for people. It
//! does not read the contents of packets.

mod arguments;
mod count;
pub mod message;

use std::collections::HashSet;
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use child_process::sealed::{SealedProgram, describe_end, last_line, packet_sockets};
use child_process::{BoundedLog, LeftProcess, Seal, ServiceProcess};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, recv, recvmsg, send, sendmsg, shutdown,
};

pub use self::arguments::Arguments;
pub use self::count::Count;
use self::message::{MESSAGE_BYTES_MAX, Message};
use crate::filter::Barred;
use crate::host;
use crate::relay::{End, Relay, Sockets};

/// Argument that makes the program of shards run as a filter's process. No VM has such a name, which is a
/// shard's argument.
pub const FLAG: &str = "--frame-filter";
/// Greatest size of a file that a filter's process may write, bytes: its log of a failure or end.
pub const FILE_BYTES_MAX: u64 = 4096;
/// Least interval of two replies, shorter than the greatest age of a relay's list: a compromised process
/// sends requests without limit.
const ANSWER_INTERVAL: Duration = Duration::from_millis(500);
/// Contents of the first packet, which is sent for its descriptors.
const SOCKETS: [u8; 1] = [b's'];
const TOO_MANY: &str = "this host and its cluster have more addresses than a frame filter can have; \
                        help: set `host = true` for the card, or use TAP";

/// Egress policy of one card: it reaches neither the host nor the cluster.
#[derive(Clone)]
pub struct Egress {
    /// Returns the current addresses of the cluster. Called about once a second while the guest sends.
    pub cluster: Arc<dyn Fn() -> HashSet<IpAddr> + Send + Sync>,
    /// Number of dropped frames.
    pub count: Arc<Count>,
    /// Program of the filter.
    pub program: SealedProgram,
    /// How strictly the filter's process seals itself.
    pub seal: Seal,
    /// Receives a line if the card is cut off before its end.
    pub cut_off: Arc<dyn Fn(&str) + Send + Sync>,
}

impl fmt::Debug for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Egress");
        shown
            .field("words", &self.program.words)
            .field("seal", &self.seal);
        shown.field("count", &self.count).finish_non_exhaustive()
    }
}

impl Egress {
    fn barred(&self) -> io::Result<Barred> {
        Ok(Barred {
            own: host::addresses()?,
            cluster: (self.cluster)(),
        })
    }
}

/// A filter's process that a predecessor of this monitor started.
#[derive(Debug)]
pub struct LeftFilter {
    /// The process, which is no child of this one.
    pub process: LeftProcess,
    /// Socket by which it receives its lists.
    pub lists: OwnedFd,
    /// File in memory into which it writes when it fails or ends.
    pub log: OwnedFd,
}

/// A running filter's process. Dropping it ends the process, and with it the card's connection and passt's.
#[derive(Debug)]
pub struct FilterProcess {
    shared: Arc<Shared>,
    /// Thread that serves the process.
    server: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    process: ServiceProcess,
    lists: OwnedFd,
    /// Output of the process.
    log: BoundedLog,
    /// Whether the card is to end.
    is_ending: AtomicBool,
}

impl FilterProcess {
    /// Starts the process between the card's socket and passt's.
    ///
    /// # Errors
    /// Fails if the host has no processes, threads or files left, or does not list its addresses.
    pub fn start(egress: &Egress, arguments: &Arguments, card: OwnedFd, passt: OwnedFd) -> io::Result<Self> {
        let barred = egress.barred()?;
        let shared = Shared::start(egress, arguments, [card, passt], &barred)?;
        Self::serve(shared, egress, Some(barred))
    }

    /// Adopts a process that a predecessor started. The process receives a whole list at once: the
    /// predecessor may have ended between a request and its reply, and a process sends one request only.
    ///
    /// # Errors
    /// Fails if the host has no threads left. The process is ended then.
    pub fn adopt(left: LeftFilter, egress: &Egress) -> io::Result<Self> {
        let LeftFilter { process, lists, log } = left;
        let shared = Shared {
            process: ServiceProcess::adopt(process),
            lists,
            log: BoundedLog::adopt(log),
            is_ending: AtomicBool::new(false),
        };
        Self::serve(shared, egress, None)
    }

    /// Starts the thread that serves the process. `sent` is the process's list, if it is known.
    fn serve(shared: Shared, egress: &Egress, sent: Option<Barred>) -> io::Result<Self> {
        let shared = Arc::new(shared);
        let mut process = Self {
            shared: shared.clone(),
            server: None,
        };
        let egress = egress.clone();
        let server = std::thread::Builder::new().name("card-lists".into());
        process.server = Some(server.spawn(move || {
            let answered = serve(&shared, &egress, sent);
            let ended = shared.process.end();
            if shared.is_ending.load(Ordering::Acquire) {
                return;
            }
            let why = match answered {
                Err(why) => Some(why.to_owned()),
                Ok(()) => ended.ok().and_then(|status| describe(status, &shared.log.text())),
            };
            if let Some(why) = why {
                (egress.cut_off)(&why);
            }
        })?);
        Ok(process)
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.shared.process.id()
    }

    /// Returns the process itself.
    pub fn process(&self) -> &ServiceProcess {
        &self.shared.process
    }

    /// Returns the socket by which the process receives its lists.
    pub fn lists(&self) -> BorrowedFd<'_> {
        self.shared.lists.as_fd()
    }

    /// Returns the file in memory into which the process writes when it fails or ends.
    pub fn log(&self) -> BorrowedFd<'_> {
        self.shared.log.as_fd()
    }

    /// Ends the process, whose card was not served. Returns the reason of its failure if it has failed by
    /// itself; the reason is unknown for an adopted process.
    pub fn failure(&self) -> Option<String> {
        self.shared.is_ending.store(true, Ordering::Release);
        let status = self.shared.process.end().ok()??;
        let was_fine = status.signal() == Some(libc::SIGKILL) || end_of(status).is_some();
        if was_fine {
            None
        } else {
            describe(Some(status), &self.shared.log.text())
        }
    }
}

impl Drop for FilterProcess {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        // It may have ended by itself.
        let _ = self.shared.process.end();
        // Another holder may keep the process's end open for a moment.
        let _ = shutdown(self.shared.lists.as_raw_fd(), Shutdown::Both);
        if let Some(server) = self.server.take() {
            // A thread that panicked does not serve any longer.
            let _ = server.join();
        }
    }
}

impl Shared {
    /// Starts a process with the list `barred` between `sockets`: the card's and passt's.
    fn start(
        egress: &Egress,
        arguments: &Arguments,
        sockets: [OwnedFd; 2],
        barred: &Barred,
    ) -> io::Result<Self> {
        let (lists, theirs) = packet_sockets()?;
        let [card, passt] = sockets;
        begin(&lists, &card, &passt, &egress.count, barred)?;
        // Only the process holds them from now on.
        drop((card, passt));
        let (process, log) = egress.program.start(arguments.words(), theirs, Stdio::null())?;
        Ok(Self {
            process,
            lists,
            log,
            is_ending: AtomicBool::new(false),
        })
    }
}

/// Serves a filter's process, which has the list `sent`, until it has ended. A process whose list is unknown
/// receives one without a request.
fn serve(shared: &Shared, egress: &Egress, mut sent: Option<Barred>) -> Result<(), &'static str> {
    let lists = &shared.lists;
    if sent.is_none() && !answer(lists, egress, &mut sent)? {
        return Ok(());
    }
    loop {
        if is_gone(lists, ANSWER_INTERVAL) || !wait_for_question(lists) {
            return Ok(());
        }
        match recv(lists.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT) {
            Ok(1..) => {}
            // Its next owner may have received it.
            Err(Errno::EINTR | Errno::EAGAIN) => continue,
            Ok(0) | Err(_) => return Ok(()),
        }
        if !answer(lists, egress, &mut sent)? {
            return Ok(());
        }
    }
}

/// Sends the current list to a filter's process, or that the list is still `sent`. Returns whether the
/// process receives messages.
fn answer(lists: &OwnedFd, egress: &Egress, sent: &mut Option<Barred>) -> Result<bool, &'static str> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let message = match egress.barred() {
        Ok(barred) if sent.as_ref() != Some(&barred) => {
            let list = Message::list(&barred).ok_or(TOO_MANY)?;
            *sent = Some(barred);
            list
        }
        // If the host is out of files for a moment, the last list stays valid, so that the guest keeps its
        // network.
        _ => Message::SAME.to_vec(),
    };
    match send(lists.as_raw_fd(), &message, flags) {
        Ok(_) => Ok(true),
        Err(Errno::EMSGSIZE) => Err(TOO_MANY),
        // A process that does not read replies needs no others.
        Err(_) => Ok(false),
    }
}

/// Returns whether the other end of a socket closes within `limit`.
fn is_gone(socket: &OwnedFd, limit: Duration) -> bool {
    // The end of the other side is always reported.
    let mut files = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let limit = u16::try_from(limit.as_millis()).map_or(PollTimeout::MAX, PollTimeout::from);
    // A signal shortens the wait.
    poll(&mut files, limit).is_ok_and(|gone| gone > 0)
}

/// Waits until a socket has a packet, or its end. Returns false if the host does not let it wait.
fn wait_for_question(socket: &OwnedFd) -> bool {
    let mut files = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    loop {
        match poll(&mut files, PollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            Err(_) => return false,
            Ok(_) => return true,
        }
    }
}

/// Sends the first packets of a filter's process by a new socket: its sockets, and a list.
///
/// # Errors
/// Fails if the list is too long, or the socket has no room.
pub fn begin(
    lists: &OwnedFd,
    card: &impl AsRawFd,
    passt: &impl AsRawFd,
    count: &Count,
    barred: &Barred,
) -> io::Result<()> {
    let list = Message::list(barred).ok_or_else(|| io::Error::other(TOO_MANY))?;
    let files = [card.as_raw_fd(), passt.as_raw_fd(), count.as_fd().as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&files)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(lists.as_raw_fd(), &[IoSlice::new(&SOCKETS)], &rights, flags, None)?;
    send(lists.as_raw_fd(), &list, flags)?;
    Ok(())
}

/// Creates the relay of a filter's process from the packets of [`begin`].
///
/// # Errors
/// Fails if this is no such socket, or its sender is gone.
pub fn receive(lists: OwnedFd, arguments: &Arguments) -> io::Result<Relay> {
    let [card, passt, count] = receive_sockets(&lists)?;
    let sockets = Sockets {
        card,
        passt,
        count: count.into(),
        lists,
    };
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let bytes = recv(sockets.lists.as_raw_fd(), &mut message, MsgFlags::empty())?;
    let Some(Message::List(barred)) = Message::read(&message[..bytes]) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let Arguments {
        resolvers, udp_ports, ..
    } = arguments.clone();
    Ok(Relay::new(sockets, barred, resolvers, udp_ports))
}

fn receive_sockets(lists: &OwnedFd) -> io::Result<[OwnedFd; 3]> {
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut rights = cmsg_space!([RawFd; 3]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(lists.as_raw_fd(), &mut parts, Some(&mut rights), flags)?;
    let mut files = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control {
            // SAFETY: the kernel has just given us these descriptors; nothing else owns them.
            files.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    files.try_into().map_err(|_| io::ErrorKind::InvalidData.into())
}

fn end_of(status: ExitStatus) -> Option<End> {
    status.code().and_then(End::of_status)
}

/// Returns why a process with this status (unknown for an adopted one) has cut off its card; none if its card
/// has ended.
fn describe(status: Option<ExitStatus>, said: &str) -> Option<String> {
    let end = match status {
        Some(status) => end_of(status),
        None => last_line(said).and_then(End::of_words),
    };
    if let Some(end) = end {
        return (end != End::Card).then(|| end.words().to_owned());
    }
    Some(describe_end("the frame filter", status, said))
}

#[cfg(test)]
pub(crate) mod tests;
