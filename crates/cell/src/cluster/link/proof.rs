//! A page by which two hosts find out whether they see the same memory. The caller writes a random number
//! into the page and sends the number over another transport; the callee checks whether the page has it.

use std::fs::File;

use urpc::host::{MemoryError, SharedRing};
use urpc::{Message, Receiver, Ring, Sender};

/// A ring for one message.
const LINES: usize = 2;
/// Bytes of the page, which begins at a multiple of them.
pub const BYTES: u64 = 4096;
const _: () = assert!(Ring::bytes(LINES) as u64 <= BYTES);

/// The page, mapped.
#[derive(Debug)]
pub struct Proof(SharedRing);

impl Proof {
    /// The page at `offset` of the memory.
    ///
    /// # Errors
    /// As [`SharedRing::at`].
    pub fn at(memory: &File, offset: u64) -> Result<Self, MemoryError> {
        SharedRing::at(memory, offset, LINES).map(Self)
    }

    /// Writes a random number into the page. Only a process that sees the page can know it.
    pub fn leave(&mut self) -> u64 {
        self.0.clear();
        let number = fastrand::u64(..);
        // If the write fails, as another process writes here, the peer does not find the number.
        let _ = Sender::new(&*self.0).post(&message(number));
        number
    }

    /// Whether the page has that number.
    pub fn has(&self, number: u64) -> bool {
        Receiver::new(&*self.0).take() == Ok(Some(message(number)))
    }
}

fn message(number: u64) -> Message {
    Message {
        words: [number; 7],
        kind: 0,
    }
}
