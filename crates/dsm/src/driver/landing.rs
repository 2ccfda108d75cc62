//! Where the bytes of pages are received: straight to their place in the region, where that can be guessed.

use std::collections::VecDeque;
use std::io;

use coherence::{Message, Right};

use crate::PAGE_BYTES;
use crate::frame::Frame;
use crate::merging::unnumbered;
use crate::region::Region;

/// Pages that are expected, at most.
const ROOM: usize = 256;

/// Pages that were asked for and of which nothing is here: what comes next is probably the first one's bytes.
#[derive(Debug)]
pub struct Landing {
    expected: VecDeque<u32>,
    /// Where bytes go of which nothing can be guessed.
    scratch: Box<[u8; PAGE_BYTES]>,
}

impl Default for Landing {
    fn default() -> Self {
        Self {
            expected: VecDeque::with_capacity(ROOM),
            scratch: Box::new([0; PAGE_BYTES]),
        }
    }
}

impl Landing {
    /// A page was asked for. Past the list's room it is not guessed, and its bytes are copied once.
    pub fn expect(&mut self, page: u32) {
        if self.expected.len() < ROOM {
            self.expected.push_back(page);
        }
    }

    /// What comes next is not received to this page before it is known whose it is.
    pub fn cancel(&mut self, page: u32) {
        self.expected.retain(|expected| *expected != page);
    }

    /// Where bytes are received before it is known whose they are.
    pub fn guess(&mut self, region: &Region) -> *mut u8 {
        match self.expected.front() {
            Some(page) => region.bytes(*page).cast(),
            None => self.scratch.as_mut_ptr(),
        }
    }

    /// The page to which the bytes beside a message go; none if it has none.
    ///
    /// # Errors
    /// If there is no such page, or this node did not ask for it.
    pub fn place(region: &Region, frame: &Frame, merges: bool) -> io::Result<Option<u32>> {
        let frame = if merges { unnumbered(frame).1 } else { *frame };
        // What is no message at all is refused where messages are taken.
        let Some(message) = Message::decode(&frame).ok().filter(Message::carries_page) else {
            return Ok(None);
        };
        if message.page.0 >= region.pages() {
            return Err(io::Error::other("it sent a page past the region's end"));
        }
        let page = region.unstriped(message.page.0);
        if region.mapped(page) != Right::None {
            return Err(io::Error::other("it sent a page that nobody asked for"));
        }
        Ok(Some(page))
    }
}
