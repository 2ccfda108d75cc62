//! A page by which two hosts find out whether they see the same memory: who calls leaves a random number
//! there and says it over another way; who is called looks whether it is there.

use std::fs::File;

use urpc::host::{MemoryError, SharedRing};
use urpc::{Message, Receiver, Ring, Sender};

/// A ring for one message.
const LINES: usize = 2;
/// What it takes, from where a page begins.
pub const BYTES: u64 = 4096;
const _: () = assert!(Ring::bytes(LINES) as u64 <= BYTES);

/// The page, mapped.
#[derive(Debug)]
pub struct Proof(SharedRing);

impl Proof {
    /// That at `offset`, where a page begins.
    ///
    /// # Errors
    /// As [`SharedRing::at`].
    pub fn at(memory: &File, offset: u64) -> Result<Self, MemoryError> {
        SharedRing::at(memory, offset, LINES).map(Self)
    }

    /// Leaves a number that only who sees it knows.
    pub fn leave(&mut self) -> u64 {
        self.0.clear();
        let number = fastrand::u64(..);
        // If it can't be left, as somebody else writes here, nobody finds it.
        let _ = Sender::new(&*self.0).post(&message(number));
        number
    }

    /// Whether that number is there.
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
