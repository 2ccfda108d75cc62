//! Channels between two cells, one in each direction. Sender and receiver are the same over each of three
//! transports: rings ([`ring`]) in memory of a host ([`local`]) or in memory that hosts share ([`shared`]),
//! or a stream between hosts ([`stream`]).
//!
//! A cell that starts calls all that run. Two that start at once call each other; the lower-numbered one's
//! call goes through, unless it fails: for some seconds each calls again as long as they have no link.

pub mod encoding;
pub mod local;
pub(crate) mod proof;
mod ring;
pub mod shared;
pub mod stream;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt::{self, Debug};
use std::io;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use locks::IgnorePoison;
use protocol::CellId;
use serde::{Deserialize, Serialize};

use urpc::version::{VersionMismatch, Versions};

use super::state::CellMessage;

/// Maximum length of a message between cells, in bytes: a table of some ten thousand VMs.
pub const MESSAGE_BYTES_MAX: usize = 2 << 20;
/// Time limit for another cell to answer a call, or to receive a message.
pub const MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The versions of the cells' protocol that this program speaks: [`CellMessage`], and the calls by which a
/// link begins.
///
/// From version [`GATHERS_REPLIES`] on, relays of multicast trees gather replies.
pub const VERSIONS: Versions = Versions::up_to(2);
/// The first version with [`protocol::multicast::Packet::Replies`] and
/// [`protocol::agreement::Message::Again`]. While a cell has a link of an older version, its trees gather no
/// replies.
pub const GATHERS_REPLIES: u16 = 2;

/// Compares the versions of the cell `peer` with those of this one.
///
/// # Errors
/// If they have none in common.
pub fn agree(theirs: Versions, peer: CellId) -> Result<u16, VersionMismatch> {
    VERSIONS.agree(theirs, "the cells' protocol", format_args!("cell {peer}"))
}

/// Whether no link was made because the two cells have no version in common.
pub fn is_version_mismatch(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<VersionMismatch>())
}

/// Answer of the called cell, before a link begins.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum CallAnswer {
    /// The link is made.
    Welcome {
        /// The cell that answers.
        cell: CellId,
        /// The versions that it speaks.
        versions: Versions,
    },
    /// The cell that answers is calling the caller.
    Crossed,
    /// The cell that answers has no version in common with the caller.
    Unlike {
        /// The cell that answers.
        cell: CellId,
        /// The versions that it speaks.
        versions: Versions,
    },
}

impl CallAnswer {
    /// The cell at the other end of the link, and the version that the two speak; none if the cell calls this
    /// one.
    ///
    /// # Errors
    /// [`VersionMismatch`] if the two cells have no version in common.
    pub fn peer(self) -> Result<Option<(CellId, u16)>, VersionMismatch> {
        match self {
            Self::Crossed => Ok(None),
            Self::Welcome { cell, versions } | Self::Unlike { cell, versions } => {
                agree(versions, cell).map(|version| Some((cell, version)))
            }
        }
    }
}

/// The sending end of a channel. Dropped, it ends both channels of its link.
pub trait SendBytes: Debug + Send {
    /// Sends bytes as one message.
    ///
    /// # Errors
    /// `BrokenPipe` if the other cell has ended the link, `TimedOut` if it has received nothing for two
    /// seconds.
    fn send(&mut self, bytes: &[u8]) -> io::Result<()>;
}

/// The receiving end of a channel.
pub trait ReceiveBytes: Debug + Send {
    /// Passes every message's bytes to `heard`, until that fails or the other cell is dead.
    fn run(self: Box<Self>, heard: &mut dyn FnMut(&[u8]) -> io::Result<()>);
}

/// The transport of a link. In docs and rules: `ring`, `shared`, `tls`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transport {
    /// Memory of this host.
    Ring,
    /// Memory that hosts share.
    Shared,
    /// A TLS stream.
    Stream,
}

impl fmt::Display for Transport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Ring => "ring",
            Self::Shared => "shared",
            Self::Stream => "tls",
        })
    }
}

/// Both channels to another cell.
#[derive(Debug)]
pub struct Link {
    /// The cell at the other end.
    pub peer: CellId,
    /// The version of the cells' protocol that both speak.
    pub version: u16,
    /// Transport of its messages.
    pub transport: Transport,
    /// Channel to the other cell.
    pub sending: Sending,
    /// Channel from the other cell.
    pub receiving: Receiving,
}

/// The half that sends.
#[derive(Debug)]
pub struct Sending(Box<dyn SendBytes>);

/// The half that receives.
#[derive(Debug)]
pub struct Receiving(Box<dyn ReceiveBytes>);

impl Link {
    fn new(
        peer: CellId,
        transport: Transport,
        sending: impl SendBytes + 'static,
        receiving: impl ReceiveBytes + 'static,
    ) -> Self {
        Self {
            peer,
            version: VERSIONS.oldest,
            transport,
            sending: Sending(Box::new(sending)),
            receiving: Receiving(Box::new(receiving)),
        }
    }

    /// The same link, with this version of the protocol.
    #[must_use]
    pub fn speaking(self, version: u16) -> Self {
        Self { version, ..self }
    }
}

impl Sending {
    /// Sends a message.
    ///
    /// # Errors
    /// As [`SendBytes::send`].
    pub fn send(&mut self, message: &CellMessage) -> io::Result<()> {
        let bytes = encoding::encode(message)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::other("the table is too large for a message"));
        }
        self.0.send(&bytes)
    }
}

impl Receiving {
    /// Passes every message to `heard`, with its length in bytes. Returns when the other cell is dead or
    /// sends an invalid message.
    pub fn run(self, mut heard: impl FnMut(CellMessage, usize)) {
        self.0.run(&mut |bytes| {
            heard(encoding::decode(bytes)?, bytes.len());
            Ok(())
        });
    }
}

/// The calls that this cell makes and has received, so that two cells have one link, whichever of their calls
/// comes first.
///
/// A cell calls when it starts, and again for some seconds in the same incarnation. A call can fail while it
/// keeps the other cell's from going through: the other's earlier process has ended, and its next one calls
/// before this cell has noticed.
#[derive(Debug)]
pub struct CallTable {
    me: CellId,
    met: Mutex<CallsSoFar>,
}

#[derive(Debug, Default)]
struct CallsSoFar {
    under_way: BTreeSet<u16>,
    /// One call has gone through.
    linked: BTreeSet<CellId>,
}

impl CallTable {
    /// A record without calls.
    pub fn new(me: CellId) -> Self {
        Self {
            me,
            met: Mutex::default(),
        }
    }

    /// Calls a cell by `call`, unless that cell has called this one already. Returns none then, as for a call
    /// that crosses another.
    ///
    /// # Errors
    /// Those of `call`.
    pub fn during(
        &self,
        number: u16,
        call: impl FnOnce() -> io::Result<Option<Link>>,
    ) -> io::Result<Option<Link>> {
        let mut met = self.met();
        if met.linked.iter().any(|linked| linked.number == number) {
            return Ok(None);
        }
        met.under_way.insert(number);
        drop(met);
        let link = call();
        let mut met = self.met();
        met.under_way.remove(&number);
        if let Ok(Some(link)) = &link {
            met.linked.insert(link.peer);
        }
        link
    }

    /// The answer to a cell that calls, and speaks these versions. After a welcome the two have a link.
    pub fn answer(&self, caller: CellId, theirs: Versions) -> CallAnswer {
        let (cell, versions) = (self.me, VERSIONS);
        if let Err(unlike) = agree(theirs, caller) {
            tracing::warn!("no link: {unlike}");
            return CallAnswer::Unlike { cell, versions };
        }
        let mut met = self.met();
        let mine_goes_through = self.me.number < caller.number && met.under_way.contains(&caller.number);
        if mine_goes_through || !met.linked.insert(caller) {
            CallAnswer::Crossed
        } else {
            CallAnswer::Welcome { cell, versions }
        }
    }

    /// The link of a caller that was welcomed was not made: its next call may go through.
    pub fn forget(&self, caller: CellId) {
        self.met().linked.remove(&caller);
    }

    fn met(&self) -> MutexGuard<'_, CallsSoFar> {
        self.met.lock().ignore_poison()
    }
}
