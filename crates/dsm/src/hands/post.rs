//! Messages on their way out: each at once, but for the requests of one fault, which go together.

use std::io;

use super::Hands;
use crate::PAGE_BYTES;
use crate::ahead::WINDOW_MAX;
use crate::frame::{FRAME_BYTES, Frame};

/// A request, and those ahead of it.
const GATHERED_BYTES: usize = (1 + WINDOW_MAX as usize) * FRAME_BYTES;

/// Requests of one fault: for its page, and for those after it.
#[derive(Debug)]
pub struct Gathered {
    /// Whether a fault is being handled.
    is_open: bool,
    to: usize,
    /// On the stream of answers.
    with_answers: bool,
    bytes: usize,
    frames: [u8; GATHERED_BYTES],
}

impl Default for Gathered {
    fn default() -> Self {
        Self {
            is_open: false,
            to: 0,
            with_answers: false,
            bytes: 0,
            frames: [0; GATHERED_BYTES],
        }
    }
}

impl Gathered {
    /// Whether requests go together now.
    pub fn is_open(&self) -> bool {
        self.is_open
    }
}

impl Hands {
    /// Sends a message of the engine, behind what it comes after if that is to be said, with its page if it has one; one without
    /// can go on the stream of pages, too.
    pub fn post(
        &mut self,
        to: usize,
        frames: &[u8],
        page: Option<*const [u8; PAGE_BYTES]>,
        with_answers: bool,
    ) {
        let Some(link) = self.links.get_mut(to).and_then(Option::as_mut) else {
            return self.refused(&format!(
                "the protocol has a message for node {to}, which does not exist"
            ));
        };
        let result = match page {
            Some(page) => {
                self.meter.bytes += (frames.len() + PAGE_BYTES) as u64;
                // SAFETY: a page of the region, which no thread may write since the engine has it sent.
                unsafe { link.send_page(frames, page) }
            }
            None => {
                self.meter.bytes += frames.len() as u64;
                link.send(frames, with_answers)
            }
        };
        self.posted(to, result);
    }

    /// Sends pieces of what is said about merged pages; nothing to this node itself.
    pub fn post_pieces(&mut self, to: usize, frames: &[u8]) {
        if let Some(link) = self.links.get_mut(to).and_then(Option::as_mut) {
            self.meter.bytes += frames.len() as u64;
            let result = link.send(frames, false);
            self.posted(to, result);
        }
    }

    /// Requests from now on go together, when [`Hands::send_gathered`] is called.
    pub fn gather(&mut self) {
        self.gathered.is_open = true;
    }

    /// Sends them, the first one first.
    pub fn send_gathered(&mut self) {
        self.gathered.is_open = false;
        self.flush_gathered();
    }

    fn flush_gathered(&mut self) {
        let Gathered {
            to,
            bytes,
            with_answers,
            ..
        } = self.gathered;
        self.gathered.bytes = 0;
        if bytes > 0
            && let Some(link) = self.links.get_mut(to).and_then(Option::as_mut)
        {
            self.meter.bytes += bytes as u64;
            let result = link.send(&self.gathered.frames[..bytes], with_answers);
            self.posted(to, result);
        }
    }

    /// One more.
    pub(super) fn gather_one(&mut self, to: usize, frame: &Frame, with_answers: bool) {
        let is_full = self.gathered.bytes == self.gathered.frames.len();
        if is_full || (self.gathered.to, self.gathered.with_answers) != (to, with_answers) {
            self.flush_gathered();
        }
        let gathered = &mut self.gathered;
        (gathered.to, gathered.with_answers) = (to, with_answers);
        gathered.frames[gathered.bytes..][..FRAME_BYTES].copy_from_slice(frame);
        gathered.bytes += FRAME_BYTES;
    }

    fn posted(&mut self, to: usize, result: io::Result<()>) {
        if let Err(error) = result {
            let end = self.lost(to, &error);
            self.failed.get_or_insert(end);
        }
    }
}
