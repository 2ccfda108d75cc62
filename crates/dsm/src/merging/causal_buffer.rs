//! Messages that arrived before their causal predecessors, in order of arrival. A link keeps the order of one
//! node's messages, but not their order with those of other nodes.

use std::collections::VecDeque;

use coherence::merged::VectorTime;

use super::fragments::MergePayload;
use crate::causal::AWAITED_MAX;
use crate::frame::Frame;

/// Largest size of the buffer, bytes: as much as a few streams hold. No correct node is farther ahead.
const BYTES_MAX: usize = 64 << 20;

/// A message that waits for its predecessors.
#[derive(Debug)]
pub enum BufferedMessage {
    /// A message of the engine, whose bytes are in place, and its vector time.
    Message(Frame, VectorTime),
    /// A batch, or a message about a merged page.
    MergePayload(MergePayload),
}

#[derive(Debug)]
struct BufferEntry {
    from: usize,
    message: BufferedMessage,
    since_ns: u64,
}

/// The buffer of a page server.
#[derive(Debug, Default)]
pub struct CausalBuffer {
    list: VecDeque<BufferEntry>,
    bytes: usize,
}

impl CausalBuffer {
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Adds a message that arrived before its predecessors.
    ///
    /// # Errors
    /// If the buffer is full.
    pub fn push(&mut self, from: usize, message: BufferedMessage, now_ns: u64) -> Result<(), &'static str> {
        self.bytes += bytes(&message);
        if self.bytes > BYTES_MAX {
            return Err("it is too far ahead of others in changes of merged pages");
        }
        self.list.push_back(BufferEntry {
            from,
            message,
            since_ns: now_ns,
        });
        Ok(())
    }

    /// Takes the first message that `is_ready` accepts.
    pub fn take(
        &mut self,
        mut is_ready: impl FnMut(usize, &BufferedMessage) -> bool,
    ) -> Option<(usize, BufferedMessage)> {
        let mut list = self.list.iter();
        let at = list.position(|waiting| is_ready(waiting.from, &waiting.message))?;
        let BufferEntry { from, message, .. } = self.list.remove(at)?;
        self.bytes -= bytes(&message);
        Some((from, message))
    }

    /// Returns the sender of a message that has waited so long that its predecessors will never arrive.
    pub fn overdue(&self, now_ns: u64) -> Option<usize> {
        let first = self.list.front()?;
        let waited_ns = u128::from(now_ns.saturating_sub(first.since_ns));
        (waited_ns > AWAITED_MAX.as_nanos()).then_some(first.from)
    }
}

/// Returns the approximate size of a message in memory, bytes.
fn bytes(message: &BufferedMessage) -> usize {
    let beside = match message {
        BufferedMessage::Message(..) => 0,
        BufferedMessage::MergePayload(MergePayload::Batch(_, diffs)) => size_of_val(&diffs[..]),
        BufferedMessage::MergePayload(MergePayload::Message(_, page)) => {
            page.as_ref().map_or(0, |page| size_of_val(&page[..]))
        }
    };
    size_of::<BufferEntry>() + beside
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FRAME_BYTES;

    fn message(number: u8) -> BufferedMessage {
        BufferedMessage::Message([number; FRAME_BYTES], VectorTime::default())
    }

    fn number(message: &BufferedMessage) -> u8 {
        match message {
            BufferedMessage::Message(frame, _) => frame[0],
            BufferedMessage::MergePayload(_) => panic!("{message:?}"),
        }
    }

    #[test]
    fn ready_messages_leave_in_order_and_the_rest_stays_in_order() {
        let mut buffer = CausalBuffer::default();
        for one in 0..6 {
            buffer.push(usize::from(one), message(one), 0).unwrap();
        }
        let mut odd = Vec::new();
        while let Some((from, message)) = buffer.take(|_, message| number(message) % 2 == 1) {
            assert_eq!(from, usize::from(number(&message)));
            odd.push(from);
        }
        assert_eq!(odd, [1, 3, 5]);
        let rest: Vec<_> = std::iter::from_fn(|| buffer.take(|_, _| true))
            .map(|(from, _)| from)
            .collect();
        assert_eq!(rest, [0, 2, 4]);
        assert!(buffer.is_empty() && buffer.bytes == 0);
    }

    #[test]
    fn flooding_is_refused_and_overdue_senders_are_named() {
        let mut buffer = CausalBuffer::default();
        buffer.push(3, message(0), 1_000).unwrap();
        let limit_ns = 1_000 + AWAITED_MAX.as_nanos() as u64;
        assert_eq!(buffer.overdue(limit_ns), None);
        assert_eq!(buffer.overdue(limit_ns + 1), Some(3));
        let page = || {
            BufferedMessage::MergePayload(MergePayload::Batch(VectorTime::default(), vec![diff(); 32_768]))
        };
        let came = (0..200).take_while(|_| buffer.push(1, page(), 0).is_ok()).count();
        assert_eq!(came, BYTES_MAX / bytes(&page()));
    }

    fn diff() -> coherence::merged::Diff {
        coherence::merged::Diff {
            page: coherence::Page(1),
            word: 2,
            old: 3,
            new: 4,
        }
    }
}
