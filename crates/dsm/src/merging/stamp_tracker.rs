//! Vector times of the engine's messages on one of the two streams between two nodes.
//!
//! Each causal message carries the number of the sender's own batches, in bytes that copysets of so few nodes
//! don't use. The entries of other nodes change less often. A frame announces one before the first message of
//! the stream that needs it, and it holds for all later messages:
//!
//! ```text
//! 0   node        u8   whose batches
//! 4   kind        u8   0xfc
//! 5   stream      u8   0: for messages without a page; 1: for those with one, which use the other stream
//! 8   batches     u64  little endian: their number, more than announced before
//! ```
//!
//! With two nodes there are no other entries and no announcements.

use coherence::NodeId;
use coherence::merged::VectorTime;

use crate::batches::{AHEAD_MAX, SHARERS_MAX};
use crate::frame::{DriverKind, FRAME_BYTES, Frame, driver_frame};

const STREAM_AT: usize = 5;
const BATCHES_AT: usize = 8;
const MALFORMED: &str = "it sent a malformed announcement of its vector time";

/// A message of the engine after all possible announcements.
pub type Frames = [u8; FRAME_BYTES * (SHARERS_MAX - 1)];

/// Announced entries of one direction between two nodes, for messages without and with a page.
#[derive(Clone, Copy, Debug)]
pub struct StampTracker {
    ends: [usize; 2],
    nodes: usize,
    told: [VectorTime; 2],
}

impl StampTracker {
    /// Creates the state of the direction between two of `nodes` nodes, without announcements.
    pub fn new(ends: [usize; 2], nodes: usize) -> Self {
        let told = [VectorTime::default(); 2];
        Self { ends, nodes, told }
    }

    /// Returns the announced entries.
    pub fn stamp(&self, with_page: bool) -> VectorTime {
        self.told[usize::from(with_page)]
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let Self { ends, nodes, .. } = *self;
        (0..nodes).filter(move |node| !ends.contains(node))
    }

    /// Writes a message with vector time `stamp` after the announcements that it needs. Returns the length,
    /// bytes.
    pub fn write(
        &mut self,
        frames: &mut Frames,
        message: &Frame,
        with_page: bool,
        stamp: &VectorTime,
    ) -> usize {
        let places = frames.as_chunks_mut::<FRAME_BYTES>().0;
        let mut written = 0;
        for node in self.others() {
            let told = &mut self.told[usize::from(with_page)];
            let id = NodeId(node as u16);
            if stamp.of(id) != told.of(id) {
                *told = told.with(id, stamp.of(id));
                places[written] = frame(node as u8, with_page, stamp.of(id));
                written += 1;
            }
        }
        places[written] = *message;
        (written + 1) * FRAME_BYTES
    }

    /// Records an announcement, when `applied` batches had been applied.
    ///
    /// # Errors
    /// If the node does not exist or is one of the two, the number is not larger than before, or it can't be
    /// that large.
    pub fn receive(&mut self, came: &Frame, applied: &VectorTime) -> Result<(), &'static str> {
        let node = usize::from(came[0]);
        let with_page = came[STREAM_AT] != 0;
        let count = came.last_chunk().map_or(0, |count| u64::from_le_bytes(*count));
        if *came != frame(came[0], with_page, count) || !self.others().any(|other| other == node) {
            return Err(MALFORMED);
        }
        let told = &mut self.told[usize::from(with_page)];
        let id = NodeId(node as u16);
        if count <= told.of(id) || is_too_far(count, applied.of(id)) {
            return Err(MALFORMED);
        }
        *told = told.with(id, count);
        Ok(())
    }
}

/// Returns whether no message can have `count` predecessors where `applied` batches have been applied.
pub fn is_too_far(count: u64, applied: u64) -> bool {
    count.saturating_sub(applied) > u64::from(AHEAD_MAX)
}

fn frame(node: u8, with_page: bool, count: u64) -> Frame {
    let mut frame = driver_frame(DriverKind::Stamp, node.into());
    frame[STREAM_AT] = u8::from(with_page);
    frame[BATCHES_AT..].copy_from_slice(&count.to_le_bytes());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: Frame = [7; FRAME_BYTES];

    fn stamp(counts: &[u64]) -> VectorTime {
        (0..)
            .zip(counts)
            .fold(VectorTime::default(), |stamp, (node, count)| {
                stamp.with(NodeId(node), *count)
            })
    }

    #[test]
    fn announcements_give_each_messages_vector_time_on_each_stream() {
        for nodes in 2..=SHARERS_MAX {
            let ends = [1, nodes - 1 - usize::from(nodes == 2)];
            let mut random = fastrand::Rng::with_seed(nodes as u64);
            let (mut near, mut far) = (StampTracker::new(ends, nodes), StampTracker::new(ends, nodes));
            let mut counts = vec![0; nodes];
            for _ in 0..200 {
                for count in &mut counts {
                    *count += u64::from(random.u8(0..3) / 2);
                }
                let at = stamp(&counts);
                let with_page = random.bool();
                let mut frames = [0; size_of::<Frames>()];
                let length = near.write(&mut frames, &MESSAGE, with_page, &at);
                let (payload, [message]) = frames[..length]
                    .as_chunks::<FRAME_BYTES>()
                    .0
                    .split_at(length / FRAME_BYTES - 1)
                else {
                    panic!("one message");
                };
                assert_eq!(*message, MESSAGE);
                assert!(payload.len() <= nodes - 2, "nothing of the two themselves");
                for frame in payload {
                    far.receive(frame, &VectorTime::default()).unwrap();
                }
                for node in (0..nodes).filter(|node| !ends.contains(node)) {
                    assert_eq!(far.stamp(with_page).of(NodeId(node as u16)), counts[node]);
                }
                let again = near.write(&mut frames, &MESSAGE, with_page, &at);
                assert_eq!(again, FRAME_BYTES, "no stamp is sent twice");
            }
        }
    }

    #[test]
    fn impossible_announcements_are_refused() {
        let applied = stamp(&[0, 0, 10]);
        let mut told = StampTracker::new([1, 0], 4);
        let far = 10 + u64::from(AHEAD_MAX);
        let mut with_rest = frame(2, true, 9);
        with_rest[6] = 1;
        for (came, why) in [
            (frame(0, false, 5), "the receiver's own"),
            (frame(1, false, 5), "the sender's own"),
            (frame(4, false, 5), "of nobody"),
            (frame(255, false, 5), "of nobody"),
            (frame(2, false, 0), "nothing new"),
            (frame(2, false, far + 1), "more than there can be"),
            (frame(3, true, u64::MAX), "more than there can be"),
            (with_rest, "written in another way"),
        ] {
            assert!(told.receive(&came, &applied).is_err(), "{why}");
        }
        told.receive(&frame(2, false, far), &applied).unwrap();
        assert!(
            told.receive(&frame(2, false, far - 1), &applied).is_err(),
            "less than before"
        );
        told.receive(&frame(2, true, 1), &applied).unwrap();
        assert_eq!([false, true].map(|page| told.stamp(page).of(NodeId(2))), [far, 1]);
    }
}
