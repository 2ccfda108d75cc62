//! Fragmentation of byte strings into messages.
//!
//! The parts of a string are consecutive in a channel. The kind of each message has the string's port and the
//! number of payload bytes in use:
//!
//! ```text
//! bits 0-15   port: purpose of the string; the same in all its parts
//! bits 16-23  bytes of the payload that count, 0 to 56; less than 56 only in the last part
//! bit 24      more parts follow
//! ```

use crate::message::{Message, PAYLOAD_BYTES};

const MORE: u32 = 1 << 24;

/// The parts of a byte string as messages, in the order of sending.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    port: u16,
    rest: Option<&'a [u8]>,
}

impl<'a> Parts<'a> {
    /// Divides `bytes` into parts for `port`. An empty string is one empty part.
    pub fn of(port: u16, bytes: &'a [u8]) -> Self {
        Self {
            port,
            rest: Some(bytes),
        }
    }

    /// Returns the number of messages left.
    pub fn count_left(&self) -> usize {
        self.rest
            .map_or(0, |rest| rest.len().div_ceil(PAYLOAD_BYTES).max(1))
    }
}

impl Iterator for Parts<'_> {
    type Item = Message;

    fn next(&mut self) -> Option<Message> {
        let rest = self.rest?;
        let (part, left) = rest.split_at(rest.len().min(PAYLOAD_BYTES));
        self.rest = (!left.is_empty()).then_some(left);
        let more = if left.is_empty() { 0 } else { MORE };
        Message::from_bytes(u32::from(self.port) | (part.len() as u32) << 16 | more, part)
    }
}

/// Error: an invalid part. The channel is unusable afterwards, since the start of the next string is unknown.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[cfg_attr(feature = "host", derive(thiserror::Error))]
pub enum FragmentError {
    /// The string exceeds this side's limit.
    #[cfg_attr(feature = "host", error("a message of more than {0} bytes"))]
    TooLong(usize),
    /// The part's kind is impossible for [`Parts`].
    #[cfg_attr(feature = "host", error("a part of kind {0:#x}"))]
    BadPart(u32),
}

/// Reassembles the parts in `B`'s memory, which bounds what the other side can send.
#[derive(Debug)]
pub struct Assembly<B> {
    buffer: B,
    used: usize,
    port: Option<u16>,
}

impl<B: AsMut<[u8]>> Assembly<B> {
    /// Creates an empty assembly.
    pub fn new(buffer: B) -> Self {
        Self {
            buffer,
            used: 0,
            port: None,
        }
    }

    /// Adds the next part; returns the port and the string once it is whole.
    ///
    /// # Errors
    /// Fails if the part does not fit the previous ones, or the string exceeds the limit.
    pub fn add(&mut self, part: &Message) -> Result<Option<(u16, &[u8])>, FragmentError> {
        let port = part.kind as u16;
        let bytes = (part.kind >> 16 & 0xff) as usize;
        let more = part.kind & MORE != 0;
        let is_sound = part.kind >> 25 == 0
            && bytes <= PAYLOAD_BYTES
            && (!more || bytes == PAYLOAD_BYTES)
            && self.port.is_none_or(|known| known == port);
        if !is_sound {
            return Err(FragmentError::BadPart(part.kind));
        }
        let buffer = self.buffer.as_mut();
        let limit = buffer.len();
        let end = self.used + bytes;
        let room = buffer.get_mut(self.used..end);
        let room = room.ok_or(FragmentError::TooLong(limit))?;
        room.copy_from_slice(&part.bytes()[..bytes]);
        if more {
            self.used = end;
            self.port = Some(port);
            return Ok(None);
        }
        self.used = 0;
        self.port = None;
        Ok(Some((port, &self.buffer.as_mut()[..end])))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn strings_survive_fragmentation(
            strings in prop::collection::vec(
                (any::<u16>(), prop::collection::vec(any::<u8>(), 0..500)),
                1..20
            )
        ) {
            let mut assembly = Assembly::new([0; 500]);
            for (port, bytes) in &strings {
                let parts = Parts::of(*port, bytes);
                let count = parts.count_left();
                for (index, part) in parts.enumerate() {
                    let whole = assembly.add(&part).expect("a sound part");
                    if index + 1 == count {
                        prop_assert_eq!(whole, Some((*port, &bytes[..])));
                    } else {
                        prop_assert_eq!(whole, None);
                    }
                }
            }
        }

        #[test]
        fn any_message_sequence_is_handled_without_panic(
            kinds in prop::collection::vec(any::<u32>(), 1..100)
        ) {
            let mut assembly = Assembly::new([0; 300]);
            for kind in kinds {
                // Most kinds are refused at once; these bits reach further code.
                let kind = kind & (MORE | 0x3f_0001);
                if let Ok(Some((_, bytes))) = assembly.add(&Message { words: [7; 7], kind }) {
                    prop_assert!(bytes.len() <= 300);
                }
            }
        }
    }

    #[test]
    fn string_beyond_the_limit_is_refused() {
        let mut assembly = Assembly::new([0; 100]);
        let long = [1; 101];
        let ends: Vec<_> = Parts::of(1, &long)
            .map(|part| assembly.add(&part).map(|_| ()))
            .collect();
        assert_eq!(ends, [Ok(()), Err(FragmentError::TooLong(100))]);
    }
}
