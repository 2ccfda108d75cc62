//! Page tables of a guest as merged pages, where a memory of two nodes and one lane has them: the driver of [`coherence::merged`].
//!
//! All of it is on the lane. Batches and what nodes say about merged pages go on the control stream, in pieces of a frame; the
//! messages of the engine that come after them have the number of the last batch in bytes that they don't use with so few
//! nodes, since those with a page go on another stream.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use coherence::merged::{
    Accessed, Batch, CHANGE_BYTES, Change, Hooks, Level, Merger, Merges, SAYING_BYTES, Saying, Stamp, Ticket,
    Words,
};
use coherence::{Layout, Message, NodeId, Page, Right};

use crate::PAGE_BYTES;
use crate::causal::{Causal, has_come};
use crate::hands::Hands;
use crate::link::{FRAME_BYTES, Frame};

/// Of a frame that is a piece of what is said about merged pages.
pub const KIND_PIECE: u8 = 0xfd;
const KIND_AT: usize = 4;
/// What of such a frame is not its kind.
const PIECE_BYTES: usize = FRAME_BYTES - 1;
/// Where the number of the last batch is in a message of the engine; copysets of two nodes don't reach there.
const NUMBER_AT: usize = 12;
/// Bytes before what is said: its length.
const LENGTH_BYTES: usize = 4;
const BATCH: u8 = 1;
const SAYING: u8 = 2;
/// The nodes that there are.
const NODES: u16 = 2;
const STAMP_BYTES: usize = 8 * NODES as usize;
/// Tables that are merged at once, at most.
const LIMIT: usize = 64;
/// Longer than anything that is said: all words of all pages.
const LONGEST: usize = LIMIT * 512 * CHANGE_BYTES + 4 * PAGE_BYTES;
/// Times that a page comes before it is looked at, and between looks.
pub const HOT: u32 = 4;

/// What has to be done once the merger, or the engine, has returned.
#[derive(Clone, Copy, Debug)]
pub enum Todo {
    /// Get a page for this node alone.
    Take(u32),
    /// It is.
    Taken(u32),
    /// It is an ordinary page again.
    GiveBack(u32),
    /// It comes too often.
    Suspect(u32),
}

/// A message that goes when what is loose has left.
#[derive(Debug)]
pub struct Held {
    pub to: usize,
    pub frame: Frame,
    pub page: Option<Box<[u8; PAGE_BYTES]>>,
    ticket: Ticket,
}

/// The lane's.
#[derive(Debug)]
pub struct Merging {
    pub merger: Merger,
    pub causal: Arc<Causal>,
    /// Pages that are not the engine's to give: merged, or about to be. Only their manager's.
    pub taken: Vec<u32>,
    /// What the engine is to hear of them then.
    pub parked: Vec<(usize, Frame)>,
    /// Messages of the engine that came before what they come after.
    pub early: VecDeque<(usize, Frame)>,
    held: VecDeque<Held>,
    asks: VecDeque<(u64, Ticket)>,
    taken_asks: u64,
    pieces: Vec<u8>,
}

/// What came of a piece.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// More is needed.
    Part,
    /// Something was said.
    Whole,
    /// A batch was applied.
    Applied,
}

impl Merging {
    /// Of a node of two.
    pub fn new(layout: Layout, causal: Arc<Causal>, processors: usize) -> Self {
        let standing = causal.standing();
        const TOP: Level = Level(4);
        Self {
            merger: Merger::new(layout, TOP, LIMIT, processors, Accessed::Sent, standing),
            causal,
            taken: Vec::with_capacity(LIMIT),
            parked: Vec::new(),
            early: VecDeque::new(),
            held: VecDeque::new(),
            asks: VecDeque::new(),
            taken_asks: 0,
            pieces: Vec::with_capacity(PAGE_BYTES),
        }
    }

    /// What has happened.
    pub fn merges(&self) -> Merges {
        self.merger.merges()
    }

    /// Looks at what processors have loaded.
    fn look(&mut self, hands: &mut Hands) {
        for (processor, cr3) in self.causal.clone().roots() {
            self.merger.loaded(processor, cr3, hands);
        }
        self.merger.stood(self.causal.stood());
    }

    fn collect(&mut self, hands: &mut Hands) -> Ticket {
        self.look(hands);
        self.merger.collect(hands)
    }

    /// A page comes too often: it may be a table.
    pub fn suspect(&mut self, page: u32, hands: &mut Hands) {
        self.look(hands);
        if let Some(proposal) = self.merger.suspect(Page(page)) {
            self.merger.propose(proposal, hands);
        }
    }

    /// Batches that this node has sent.
    fn sent(&self, me: u16) -> u32 {
        self.merger.stamp().of(NodeId(me)) as u32
    }

    /// Sends a message of the engine by which the other node may learn what this one did, or keeps it until it may go.
    pub fn send(
        &mut self,
        hands: &mut Hands,
        to: usize,
        frame: Frame,
        page: Option<*const [u8; PAGE_BYTES]>,
    ) {
        let ticket = self.collect(hands);
        if self.held.is_empty() && self.merger.may_send(ticket) {
            let frame = self.numbered(hands.me, frame);
            return hands.post(to, &frame, page, false);
        }
        // SAFETY: the bytes of a page that nobody can write any more.
        let page = page.map(|page| Box::new(unsafe { page.read() }));
        self.held.push_back(Held {
            to,
            frame,
            page,
            ticket,
        });
    }

    fn numbered(&self, me: u16, mut frame: Frame) -> Frame {
        frame[NUMBER_AT..].copy_from_slice(&self.sent(me).to_le_bytes());
        frame
    }

    /// Whether somebody asks who has not been heard. Call it before sleep: who asks later wakes the lane.
    pub fn is_asked(&self) -> bool {
        let _ = self.causal.event().read();
        self.causal.asked() != self.taken_asks
    }

    /// Sends what may go by now, and answers who asked.
    pub fn flush(&mut self, hands: &mut Hands) {
        let asked = self.causal.asked();
        if asked != self.taken_asks {
            self.taken_asks = asked;
            let ticket = self.collect(hands);
            self.asks.push_back((asked, ticket));
        }
        while let Some(held) = self.held.pop_front_if(|held| self.merger.may_send(held.ticket)) {
            let frame = self.numbered(hands.me, held.frame);
            let page = held.page.as_deref().map(std::ptr::from_ref);
            hands.post(held.to, &frame, page, false);
        }
        while let Some((number, _)) = self
            .asks
            .pop_front_if(|(_, ticket)| self.merger.may_send(*ticket))
        {
            self.causal.answer(number, self.sent(hands.me));
        }
    }

    /// Whether a message of the engine, from a node, may be acted on.
    pub fn is_ready(&self, from: usize, number: u32) -> bool {
        has_come(self.merger.stamp().of(NodeId(from as u16)) as u32, number)
    }

    /// A piece has come.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn hear(&mut self, hands: &mut Hands, from: usize, frame: &Frame) -> Result<Heard, &'static str> {
        self.pieces.extend_from_slice(&frame[..KIND_AT]);
        self.pieces.extend_from_slice(&frame[KIND_AT + 1..]);
        let length = match self.pieces.first_chunk::<LENGTH_BYTES>() {
            Some(length) => u32::from_le_bytes(*length) as usize,
            None => return Ok(Heard::Part),
        };
        if length > LONGEST {
            return Err("it says more of merged pages than there can be");
        }
        if self.pieces.len() < LENGTH_BYTES + length {
            return Ok(Heard::Part);
        }
        let pieces = std::mem::take(&mut self.pieces);
        let said = &pieces[LENGTH_BYTES..LENGTH_BYTES + length];
        let heard = self.said(hands, from, said);
        self.pieces = pieces;
        self.pieces.clear();
        heard
    }

    fn said(&mut self, hands: &mut Hands, from: usize, said: &[u8]) -> Result<Heard, &'static str> {
        const NONSENSE: &str = "it says nonsense of merged pages";
        let (&kind, rest) = said.split_first().ok_or(NONSENSE)?;
        let (stamp, rest) = rest.split_at_checked(STAMP_BYTES).ok_or(NONSENSE)?;
        let stamp = Stamp::decode(stamp).map_err(|_| NONSENSE)?;
        let node = NodeId(from as u16);
        match kind {
            BATCH => {
                let (changes, []) = rest.as_chunks::<CHANGE_BYTES>() else {
                    return Err(NONSENSE);
                };
                let changes: Result<Vec<_>, _> = changes.iter().map(Change::decode).collect();
                let changes = changes.map_err(|_| NONSENSE)?;
                if !self.merger.awaits(node, &stamp) {
                    return Err("it sends changes of merged pages out of their order");
                }
                let changes = &changes[..];
                self.merger.apply(
                    Batch {
                        from: node,
                        stamp,
                        changes,
                    },
                    hands,
                );
                let applied = self.merger.stamp().of(node) as u32;
                self.causal.applied(applied);
                Ok(Heard::Applied)
            }
            SAYING => {
                let (saying, page) = rest.split_first_chunk::<SAYING_BYTES>().ok_or(NONSENSE)?;
                let saying = Saying::decode(saying, stamp).map_err(|_| NONSENSE)?;
                let room = if saying.say.carries_page() { PAGE_BYTES } else { 0 };
                if page.len() != room
                    || saying.page.0 >= hands.region.pages()
                    || !self.merger.is_ready(&saying.stamp)
                {
                    return Err(NONSENSE);
                }
                if let Ok(page) = <&[u8; PAGE_BYTES]>::try_from(page) {
                    *hands.offered = *page;
                }
                self.merger.receive(node, saying, hands);
                Ok(Heard::Whole)
            }
            _ => Err(NONSENSE),
        }
    }
}

/// The number of the last batch, in a message of the engine that comes after batches, and the message without it.
pub fn unnumbered(frame: &Frame) -> (Option<u32>, Frame) {
    let mut without = *frame;
    without[NUMBER_AT..].fill(0);
    match Message::decode(&without) {
        Ok(message) if message.is_causal() => {
            let number = u32::from_le_bytes([frame[12], frame[13], frame[14], frame[15]]);
            (Some(number), without)
        }
        _ => (None, *frame),
    }
}

/// In pieces.
fn pieces(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let length = 1 + parts.iter().map(|part| part.len()).sum::<usize>();
    let mut whole = Vec::with_capacity(LENGTH_BYTES + length);
    whole.extend_from_slice(&(length as u32).to_le_bytes());
    whole.push(kind);
    for part in parts {
        whole.extend_from_slice(part);
    }
    let mut frames = Vec::with_capacity(whole.len().div_ceil(PIECE_BYTES) * FRAME_BYTES);
    for piece in whole.chunks(PIECE_BYTES) {
        let mut frame = [0; FRAME_BYTES];
        let (before, after) = piece.split_at(piece.len().min(KIND_AT));
        frame[..before.len()].copy_from_slice(before);
        frame[KIND_AT] = KIND_PIECE;
        frame[KIND_AT + 1..][..after.len()].copy_from_slice(after);
        frames.extend_from_slice(&frame);
    }
    frames
}

fn stamp_bytes(stamp: &Stamp) -> [u8; STAMP_BYTES] {
    let mut bytes = [0; STAMP_BYTES];
    stamp.encode(NODES, &mut bytes);
    bytes
}

impl Hands {
    fn word(&self, page: Page, word: usize) -> &AtomicU64 {
        assert!(word < PAGE_BYTES / 8);
        // SAFETY: a word of the page's bytes, which are mapped as long as the region; others write it at the same time, which
        // is what atomics are for.
        unsafe { AtomicU64::from_ptr(self.region.bytes(page.0).cast::<u64>().add(word)) }
    }
}

impl Words for Hands {
    fn is_ram(&self, page: Page) -> bool {
        page.0 < self.region.pages()
    }

    fn load(&self, page: Page, word: usize) -> u64 {
        self.word(page, word).load(Ordering::Acquire)
    }

    fn has(&self, page: Page, words: &[u64]) -> bool {
        assert!(words.len() <= PAGE_BYTES / 8);
        let bytes = self.region.bytes(page.0).cast();
        // SAFETY: a page of the region, and a list that is no longer. Others write the page meanwhile: no compiler sees into this
        // function of C's, which reads each aligned word at once on this processor, and in order with all later reads.
        unsafe { libc::memcmp(bytes, words.as_ptr().cast(), size_of_val(words)) == 0 }
    }

    fn compare_exchange(&mut self, page: Page, word: usize, current: u64, new: u64) -> Result<(), u64> {
        let word = self.word(page, word);
        word.compare_exchange(current, new, Ordering::SeqCst, Ordering::Acquire)
            .map(|_| ())
    }
}

impl Hooks for Hands {
    fn send(&mut self, to: NodeId, saying: Saying) {
        let stamp = stamp_bytes(&saying.stamp);
        let said = saying.encode();
        let mut parts: Vec<&[u8]> = vec![&stamp, &said];
        let bytes;
        if saying.say.carries_page() {
            // SAFETY: the page is closed to all processors while it is offered.
            bytes = unsafe { self.region.bytes(saying.page.0).read() };
            parts.push(&bytes);
        }
        self.post_pieces(usize::from(to.0), &pieces(SAYING, &parts));
    }

    fn broadcast(&mut self, batch: Batch<'_>) {
        let changes: Vec<u8> = batch.changes.iter().flat_map(Change::encode).collect();
        let frames = pieces(BATCH, &[&stamp_bytes(&batch.stamp), &changes]);
        for node in 0..self.links.len() {
            self.post_pieces(node, &frames);
        }
    }

    fn take(&mut self, page: Page) {
        self.todo.push_back(Todo::Take(page.0));
    }

    fn give_back(&mut self, page: Page) {
        self.todo.push_back(Todo::GiveBack(page.0));
    }

    fn store(&mut self, page: Page) {
        self.lands_no_more(page.0);
        if self.region.mapped(page.0) != Right::None {
            return self.refused("an offered page is in use here");
        }
        // SAFETY: a page that no processor here can use; the lane is its only writer.
        unsafe { self.region.bytes(page.0).write(*self.offered) };
    }

    fn open(&mut self, page: Page) {
        self.lands_no_more(page.0);
        self.let_in(page.0);
    }

    fn close(&mut self, page: Page) {
        self.shut(page.0);
    }
}

#[cfg(test)]
mod tests;
