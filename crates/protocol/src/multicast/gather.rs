//! Replies that a relay gathers, so that its source gets one packet for all cells below it.
//!
//! A relay that forwards a message which requests replies waits for the reply of each cell below it and for
//! its own. When it has them all, it sends them up as one packet. Equal replies are one body with a list of
//! cells. A reply that must not wait goes up at once, alone.
//!
//! A relay never answers for another cell: it only forwards what that cell has sent. It keeps a gathering for
//! [`GATHER_TICKS`] ticks, and for the last [`super::WINDOW`] messages of a source. Then it sends up what has
//! come, and forwards what comes later at once. So a cell that hangs delays the replies of its neighbours by
//! that time at most, and the memory of a relay is bounded.

use std::collections::BTreeMap;

use super::WINDOW;
use super::packet::{Gathered, Packet};
use crate::CellId;

/// Ticks for which a relay waits for replies. Less than the ticks after which a source repeats its request.
const GATHER_TICKS: u8 = 2;

/// The way of a reply: by the relay that brought the message.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ReplyPath {
    /// The cell that gathers the reply; the replying cell itself if it is a relay.
    pub(super) relay: CellId,
    /// Sequence number of the message for the replying cell.
    pub(super) number: u64,
}

/// A packet of replies to send, with its receiver.
pub(super) type Upward<M> = (CellId, Packet<M>);

/// Replies of a cell and of the cells below it, as a relay takes them.
pub(super) struct Batch<M> {
    pub(super) replies: Vec<Gathered<M>>,
    /// Whether the replies must not wait.
    pub(super) at_once: bool,
    /// Whether these are the last replies of that cell.
    pub(super) last: bool,
}

impl<M> Batch<M> {
    /// The packet that brings them on; `number` as in [`Packet::Replies`].
    pub(super) fn packet(self, source: CellId, number: u64) -> Packet<M> {
        Packet::Replies {
            source,
            number,
            replies: self.replies,
            at_once: self.at_once,
            last: self.last,
        }
    }
}

/// The replies to one message.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Gathering<M> {
    parent: CellId,
    /// This cell has not replied yet.
    awaits_own: bool,
    /// The cells from which replies are pending, and the number of the message for each.
    children: BTreeMap<CellId, u64>,
    come: Vec<Gathered<M>>,
    ticks: u8,
}

/// The gatherings of a relay, by the source of the message and its number for this cell.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Gatherings<M>(BTreeMap<(CellId, u64), Gathering<M>>);

impl<M: PartialEq> Gatherings<M> {
    pub(super) fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Begins a gathering. Returns what the oldest one of the source has, if that has to make room.
    pub(super) fn begin(
        &mut self,
        source: CellId,
        number: u64,
        parent: CellId,
        awaits_own: bool,
        children: BTreeMap<CellId, u64>,
    ) -> Option<Upward<M>> {
        let of_source = self.0.range((source, 0)..=(source, u64::MAX));
        let of_source: Vec<(CellId, u64)> = of_source.map(|(key, _)| *key).collect();
        let room = match of_source.first() {
            Some(oldest) if of_source.len() as u64 >= WINDOW => self.finish(*oldest),
            _ => None,
        };
        let gathering = Gathering {
            parent,
            awaits_own,
            children,
            come: Vec::new(),
            ticks: 0,
        };
        self.0.insert((source, number), gathering);
        room
    }

    /// Takes this cell's own reply to the message of that number.
    ///
    /// # Errors
    /// Gives the replies back if there is no such gathering any more.
    pub(super) fn own(
        &mut self,
        source: CellId,
        number: u64,
        batch: Batch<M>,
    ) -> Result<Option<Upward<M>>, Batch<M>> {
        match self.0.get_mut(&(source, number)) {
            Some(gathering) => {
                gathering.awaits_own = false;
                Ok(self.add((source, number), batch))
            }
            None => Err(batch),
        }
    }

    /// Takes replies from a cell below; `number` is that of the message for that cell.
    ///
    /// # Errors
    /// As [`Self::own`].
    pub(super) fn of_child(
        &mut self,
        source: CellId,
        child: CellId,
        number: u64,
        batch: Batch<M>,
    ) -> Result<Option<Upward<M>>, Batch<M>> {
        let mut of_source = self.0.range_mut((source, 0)..=(source, u64::MAX));
        let found = of_source.find(|(_, gathering)| gathering.children.get(&child) == Some(&number));
        let Some((key, gathering)) = found else {
            return Err(batch);
        };
        if batch.last {
            gathering.children.remove(&child);
        }
        let key = *key;
        Ok(self.add(key, batch))
    }

    fn add(&mut self, key: (CellId, u64), batch: Batch<M>) -> Option<Upward<M>> {
        let gathering = self.0.get_mut(&key)?;
        if batch.at_once && !gathering.is_complete() {
            let batch = Batch { last: false, ..batch };
            return Some((gathering.parent, batch.packet(key.0, key.1)));
        }
        for reply in batch.replies {
            let same = gathering.come.iter_mut().find(|come| come.body == reply.body);
            match same {
                Some(come) => come.cells.extend(reply.cells),
                None => gathering.come.push(reply),
            }
        }
        let is_complete = gathering.is_complete();
        if is_complete { self.finish(key) } else { None }
    }

    /// Ends a gathering with the replies so far.
    fn finish(&mut self, key: (CellId, u64)) -> Option<Upward<M>> {
        let gathering = self.0.remove(&key)?;
        let parent = gathering.parent;
        // A relay above waits for this one even if there is nothing to report; the source does not.
        let is_needed = !gathering.come.is_empty() || parent != key.0;
        let batch = Batch {
            replies: gathering.come,
            at_once: false,
            last: true,
        };
        is_needed.then(|| (parent, batch.packet(key.0, key.1)))
    }

    /// A cell is dead: nothing more comes from it, and nothing goes by it.
    pub(super) fn dead(&mut self, cell: CellId) -> Vec<Upward<M>> {
        self.0.retain(|(source, _), _| *source != cell);
        for ((source, _), gathering) in &mut self.0 {
            if gathering.parent == cell {
                gathering.parent = *source;
            }
            gathering.children.remove(&cell);
        }
        self.finish_all(Gathering::is_complete)
    }

    /// A tick has passed.
    pub(super) fn tick(&mut self) -> Vec<Upward<M>> {
        for gathering in self.0.values_mut() {
            gathering.ticks += 1;
        }
        self.finish_all(|gathering| gathering.ticks >= GATHER_TICKS)
    }

    fn finish_all(&mut self, is_over: impl Fn(&Gathering<M>) -> bool) -> Vec<Upward<M>> {
        let over = self.0.iter().filter(|(_, gathering)| is_over(gathering));
        let over: Vec<(CellId, u64)> = over.map(|(key, _)| *key).collect();
        over.into_iter().filter_map(|key| self.finish(key)).collect()
    }
}

impl<M> Gathering<M> {
    fn is_complete(&self) -> bool {
        !self.awaits_own && self.children.is_empty()
    }
}
