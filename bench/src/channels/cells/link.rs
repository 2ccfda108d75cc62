//! A link between cells as the product has it (`cell::cluster::link`): MessagePack, cut into messages of 64
//! bytes, a flush for each whole one.

use std::process::Stdio;
use std::time::{Duration, Instant};

use bench::Outcome;
use serde::Serialize;
use serde::de::DeserializeOwned;
use urpc::fragment::{Assembly, Parts};
use urpc::host::{Block, BlockingReceiver, BlockingSender, measure_block_ns};

use crate::messages::waiting::ends_of;
use crate::patience::soon;
use crate::pinned::one;
use crate::process::{Other, ring};

/// Lines of a ring, as in a link of the product.
const LINES: usize = 1024;
/// Longest message, more than any here has.
const BYTES_MAX: usize = 4096;
const PORT: u16 = 0;

/// Both directions of a link.
pub struct Link {
    outbox: BlockingSender,
    inbox: BlockingReceiver,
    assembly: Assembly<[u8; BYTES_MAX]>,
    /// One limit for all waits, since a look at the clock costs as much as a message. None in the other
    /// process, which waits as cells do, without a timer, and which the measuring one ends.
    end: Option<Instant>,
}

/// Behaviour of receivers at both ends.
#[derive(Clone, Copy)]
pub enum Waiting {
    /// Neither ever blocks.
    Polling,
    /// As in cells: both poll for a while.
    AsCells,
}

/// A pause longer than both sides poll: they are blocked then.
pub const PAUSE: Duration = Duration::from_millis(1);

impl Link {
    fn new(inbox: BlockingReceiver, outbox: BlockingSender) -> Self {
        Self {
            outbox,
            inbox,
            assembly: Assembly::new([0; BYTES_MAX]),
            end: None,
        }
    }

    /// The other end, by the words that [`with_other`] gave.
    pub fn of(words: &[String]) -> Outcome<Self> {
        ends_of(words).map(|(inbox, outbox)| Self::new(inbox, outbox))
    }

    /// Sends a message.
    pub fn send(&mut self, message: &impl Serialize) -> Outcome<()> {
        let bytes = rmp_serde::to_vec_named(message)?;
        for part in Parts::of(PORT, &bytes) {
            if self.outbox.post(&part).is_err() {
                self.outbox.send(&part, self.end)?;
            }
        }
        self.outbox.flush();
        Ok(())
    }

    /// The next message; none when the other side is gone.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Outcome<Option<T>> {
        while let Ok(part) = self.inbox.recv(self.end) {
            let part = part.ok_or("the other process does not answer")?;
            if let Some((_, bytes)) = self.assembly.add(&part)? {
                return Ok(Some(rmp_serde::from_slice(bytes)?));
            }
        }
        Ok(None)
    }

    /// The next message, which must come.
    pub fn expect<T: DeserializeOwned>(&mut self) -> Outcome<T> {
        self.receive()?.ok_or_else(|| "the other process is gone".into())
    }
}

/// Measures `here`, with a link to another process in `role`.
pub fn with_other(
    role: &str,
    waiting: Waiting,
    here: impl FnOnce(Link) -> Outcome<f64> + Send,
) -> Outcome<f64> {
    let block_ns = match waiting {
        // An hour.
        Waiting::Polling => 3_600_000_000_000,
        Waiting::AsCells => measure_block_ns(),
    };
    let (there, _file, there_word) = ring(LINES)?;
    let (back, _file_back, back_word) = ring(LINES)?;
    let other = Other::start(
        role,
        &[there_word, back_word, block_ns.to_string()],
        Stdio::null(),
    )?;
    let mut link = Link::new(
        BlockingReceiver::new(back, Block::Futex, block_ns),
        BlockingSender::new(there, Block::Futex, block_ns),
    );
    link.end = soon();
    let measured = one(|| here(link))?;
    other.finish()?;
    Ok(measured)
}
