//! Guess of where a page's bytes will be received, so that they arrive in place.

use std::collections::VecDeque;
use std::io;

use coherence::{Message, Right};

use crate::PAGE_LEN;
use crate::frame::Frame;
use crate::merging::unnumbered;
use crate::region::Region;

/// Largest number of expected pages.
const ROOM: usize = 256;

/// Requested pages without bytes here. The next bytes are probably those of the first one.
#[derive(Debug)]
pub struct Landing {
    expected: VecDeque<u32>,
    /// Buffer for bytes without a guess.
    scratch: Box<[u8; PAGE_LEN]>,
}

impl Default for Landing {
    fn default() -> Self {
        Self {
            expected: VecDeque::with_capacity(ROOM),
            scratch: Box::new([0; PAGE_LEN]),
        }
    }
}

impl Landing {
    /// Records a request. A page past the list's room is not guessed, and its bytes are copied once.
    pub fn expect(&mut self, page: u32) {
        if self.expected.len() < ROOM {
            self.expected.push_back(page);
        }
    }

    /// Removes a page from the guesses.
    pub fn cancel(&mut self, page: u32) {
        self.expected.retain(|expected| *expected != page);
    }

    /// Returns where bytes are received before their page is known.
    pub fn guess(&mut self, region: &Region) -> *mut u8 {
        match self.expected.front() {
            Some(page) => region.bytes(*page).cast(),
            None => self.scratch.as_mut_ptr(),
        }
    }

    /// Returns the page whose bytes are attached to a message, if there are any.
    ///
    /// # Errors
    /// If there is no such page, or this node did not request it.
    pub fn place(region: &Region, frame: &Frame, merges: bool) -> io::Result<Option<u32>> {
        let frame = if merges { unnumbered(frame).1 } else { *frame };
        // The handler of messages refuses bytes that are no message.
        let Some(message) = Message::decode(&frame).ok().filter(Message::carries_page) else {
            return Ok(None);
        };
        if message.page.0 >= region.pages() {
            return Err(io::Error::other("it sent a page past the region's end"));
        }
        let page = region.unstriped(message.page.0);
        if region.mapped(page) != Right::None {
            return Err(io::Error::other("it sent a page without a request"));
        }
        Ok(Some(page))
    }
}
