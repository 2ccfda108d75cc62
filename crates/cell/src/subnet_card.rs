//! A card of a subnet: its socket, and the connection by which it is on its network.
//!
//! The card's socket is a pair of packet sockets. The shard has one end. The gateway has the other, and this
//! process a copy of it: when the gateway dies, the shard notices nothing, and the next gateway gets the
//! copy. A thread for each card holds the connection, sends the gateway facts of the host, and joins the card
//! again when the connection ends. Connections through the gateway are lost then.

mod facts;
mod gateway;
mod named;

pub use self::gateway::COMMAND;
pub(crate) use self::named::configure;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locks::lock;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, recv, setsockopt, socketpair, sockopt::SndBuf,
};
use registry::runtime;
use registry::subnet::{Connection, Join, Request, Response};

use self::facts::Facts;
use crate::shard_log::ShardLog;
use crate::text::printable;

/// Time limit for the gateway's reply, and for each write. It replies at once, but may be out of CPU time.
const REPLY_LIMIT: Duration = Duration::from_secs(20);
/// Pauses between two attempts to join again: the first, and the greatest.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);
/// Time after an adoption within which the connection ends if it was not the last one of the predecessor.
const INHERITED_LIMIT: Duration = Duration::from_secs(1);
/// Number of attempts within which a refusal is not reported: the gateway may not have noticed yet that the
/// connection of this card's former process has ended.
const QUIET_REFUSALS: u32 = 3;
/// Greatest number of old frames that are removed before a guest boots again.
const DRAINED_MAX: usize = 4096;

/// Bytes of frames that each end of a card's socket may hold: several of 64 KiB. The kernel allows its own
/// limit (`net.core.wmem_max`) if that is less.
const SOCKET_BYTES: usize = 1 << 20;

/// Reason why a card is not on its network. One line, with help.
#[derive(Debug, thiserror::Error)]
pub enum SubnetCardError {
    /// The gateway does not run, or does not reply.
    #[error("the subnet's gateway does not start: {0}; see whether the host is out of processes or memory")]
    Gateway(#[source] io::Error),
    /// The gateway refused the card. The reason has its help.
    #[error("{0}")]
    Refused(String),
    /// The host has no descriptors or threads left.
    #[error("no card of a subnet: {0}; see whether the host is out of files")]
    Host(#[from] io::Error),
}

/// A card on its network. Dropping it makes the card leave, unless another process has the connection, too.
#[derive(Debug)]
pub(crate) struct SubnetCard {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Name for the log, as `net0`.
    id: String,
    /// The request, without the facts of the host.
    join: Join,
    /// Copy of the gateway's end of the card's socket.
    far: OwnedFd,
    /// The connection that joined the card, for a successor of this process.
    connection: Mutex<Option<OwnedFd>>,
    log: Arc<ShardLog>,
    facts: Facts,
    /// Readable once the thread is to end.
    end: EventFd,
}

/// Descriptors of a card, for a successor of this process.
#[derive(Debug)]
pub(crate) struct LeftSubnetCard {
    /// Copy of the gateway's end of the card's socket.
    pub far: OwnedFd,
    /// The connection that joined the card, if one did.
    pub connection: Option<OwnedFd>,
}

impl SubnetCard {
    /// Joins a card to its network, with offloads unless the gateway is of an older release. Returns the
    /// shard's end of its socket.
    ///
    /// # Errors
    /// If no gateway starts, or it refuses the card.
    pub(crate) fn join(
        id: String,
        mut join: Join,
        log: Arc<ShardLog>,
    ) -> Result<(OwnedFd, Self), SubnetCardError> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
        let (near, far) = pair.map_err(io::Error::from)?;
        for end in [&near, &far] {
            setsockopt(end, SndBuf, &SOCKET_BYTES).map_err(io::Error::from)?;
        }
        join.offloads = true;
        let mut shared = Shared::new(id, join, far, log)?;
        let (connection, offloads) = shared.try_join()?;
        shared.join.offloads = offloads;
        Ok((near, Self::serve(shared, Some(connection), false)?))
    }

    /// Whether the packets of the card's socket have headers before their frames.
    pub(crate) fn has_offloads(&self) -> bool {
        self.shared.join.offloads
    }

    /// Adopts a card that a predecessor of this process joined. `join` says whether it has offloads.
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(crate) fn adopt(
        id: String,
        join: Join,
        left: LeftSubnetCard,
        log: Arc<ShardLog>,
    ) -> Result<Self, SubnetCardError> {
        let shared = Shared::new(id, join, left.far, log)?;
        Self::serve(shared, left.connection.map(Connection::from), true)
    }

    fn serve(
        shared: Shared,
        connection: Option<Connection>,
        is_adopted: bool,
    ) -> Result<Self, SubnetCardError> {
        let shared = Arc::new(shared);
        shared.keep(connection.as_ref())?;
        let served = shared.clone();
        let thread = std::thread::Builder::new().name("subnet-card".into());
        let thread = thread.spawn(move || served.serve(connection, is_adopted))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Returns the request by which it joined.
    pub(crate) fn request(&self) -> &Join {
        &self.shared.join
    }

    /// Returns copies of the card's descriptors for a successor of this process.
    ///
    /// # Errors
    /// If this process has no descriptors left.
    pub(crate) fn left(&self) -> io::Result<LeftSubnetCard> {
        let connection = lock(&self.shared.connection);
        Ok(LeftSubnetCard {
            far: self.shared.far.try_clone()?,
            connection: connection.as_ref().map(OwnedFd::try_clone).transpose()?,
        })
    }
}

/// Removes the frames for a guest that is about to boot again from its end of the card's socket.
pub(crate) fn drain(near: &impl AsRawFd) {
    for _ in 0..DRAINED_MAX {
        // An empty buffer takes a whole packet.
        if recv(near.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT).is_err() {
            return;
        }
    }
}

impl Drop for SubnetCard {
    fn drop(&mut self) {
        // A counter that is full is readable, too.
        let _ = self.shared.end.write(1);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked does not serve any longer.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn new(id: String, join: Join, far: OwnedFd, log: Arc<ShardLog>) -> io::Result<Self> {
        Ok(Self {
            id,
            join,
            far,
            connection: Mutex::new(None),
            log,
            facts: Facts::open()?,
            end: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    /// Records the connection for a successor.
    fn keep(&self, connection: Option<&Connection>) -> io::Result<()> {
        let copy = connection.map(|connection| connection.as_fd().try_clone_to_owned());
        *lock(&self.connection) = copy.transpose()?;
        Ok(())
    }

    /// Joins the card in the form that its shard uses.
    fn try_join_again(&self) -> Result<Connection, SubnetCardError> {
        let (connection, offloads) = self.try_join()?;
        if offloads != self.join.offloads {
            // The card leaves with the connection.
            return Err(SubnetCardError::Refused(
                "the subnet's gateway is of an older release, which does not know this card's offloads; \
                 help: end the VMs that were started by that release"
                    .to_owned(),
            ));
        }
        Ok(connection)
    }

    /// Joins the card by the gateway, which is started if none runs. Returns the connection, and whether the
    /// gateway takes packets with headers.
    fn try_join(&self) -> Result<(Connection, bool), SubnetCardError> {
        let runtime = runtime::directory()?;
        let join = Join {
            facts: self.facts.read()?,
            ..self.join.clone()
        };
        let request = Request::Join(Box::new(join));
        let mut last = io::Error::from(io::ErrorKind::ConnectionRefused);
        // A gateway that ends since it has no card may have accepted the connection.
        for _ in 0..3 {
            let mut connection = gateway::connect(&runtime).map_err(SubnetCardError::Gateway)?;
            connection.set_limit(Some(REPLY_LIMIT))?;
            let sent = connection.send(&request, &[self.far.as_fd()]);
            match sent.and_then(|()| connection.receive()) {
                Ok(Some(Response::Joined { offloads, .. })) => return Ok((connection, offloads)),
                Ok(Some(Response::Refused { why })) => {
                    return Err(SubnetCardError::Refused(printable(&why)));
                }
                Ok(Some(_)) => return Err(SubnetCardError::Gateway(io::ErrorKind::InvalidData.into())),
                Ok(None) => {}
                Err(error) => last = error,
            }
        }
        Err(SubnetCardError::Gateway(last))
    }

    /// Serves the card until it is to end.
    fn serve(&self, mut connection: Option<Connection>, is_adopted: bool) {
        let begun = Instant::now();
        loop {
            let mut is_reported = false;
            if let Some(joined) = connection.take() {
                if self.serve_connection(joined) {
                    return;
                }
                // The predecessor may have left a connection that had ended.
                is_reported = !is_adopted || begun.elapsed() > INHERITED_LIMIT;
            }
            // The card stays recorded without a connection: a successor joins it.
            let _ = self.keep(None);
            let id = &self.id;
            if is_reported {
                self.log.note(&format!(
                    "{id}: the subnet's gateway has ended; connections through it are lost"
                ));
            }
            let Some(joined) = self.join_again() else {
                return;
            };
            let _ = self.keep(Some(&joined));
            if is_reported {
                self.log.note(&format!("{id}: the card is on its network again"));
            }
            connection = Some(joined);
        }
    }

    /// Answers the gateway until the connection ends. Returns whether the card is to end.
    fn serve_connection(&self, mut connection: Connection) -> bool {
        loop {
            let mut files = [
                PollFd::new(self.end.as_fd(), PollFlags::POLLIN),
                PollFd::new(connection.as_fd(), PollFlags::POLLIN),
            ];
            if poll(&mut files, PollTimeout::NONE).is_err() {
                // A signal.
                continue;
            }
            if files[0].any().unwrap_or(true) {
                return true;
            }
            let request = match connection.receive_now() {
                Ok(request) => request,
                Err(_) => return false,
            };
            if let Some(Response::NeedFacts) = request
                && let Ok(facts) = self.facts.read()
                && connection.send(&Request::Facts(facts), &[]).is_err()
            {
                return false;
            }
        }
    }

    /// Joins the card again, until that succeeds. Returns none if the card is to end.
    fn join_again(&self) -> Option<Connection> {
        let (mut pause, mut attempt) = (RETRY_PAUSE, 0);
        loop {
            match self.try_join_again() {
                Ok(connection) => return Some(connection),
                Err(error) => {
                    attempt += 1;
                    if attempt == QUIET_REFUSALS {
                        self.log.note(&format!(
                            "{}: {error}; the card is off its network until that succeeds",
                            self.id
                        ));
                    }
                }
            }
            let mut files = [PollFd::new(self.end.as_fd(), PollFlags::POLLIN)];
            let limit = PollTimeout::try_from(pause).unwrap_or(PollTimeout::MAX);
            if poll(&mut files, limit).is_ok_and(|ended| ended > 0) {
                return None;
            }
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }
}
