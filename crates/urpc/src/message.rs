//! The unit of communication: 64 bytes, one cache line.

/// Bytes of payload in a message.
pub const PAYLOAD_BYTES: usize = 56;
/// Words of payload in a message.
pub const PAYLOAD_WORDS: usize = PAYLOAD_BYTES / 8;

/// Seven words of payload and a kind: with the ring's 32-bit sequence number, 64 bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Message {
    /// Payload of seven words.
    pub words: [u64; PAYLOAD_WORDS],
    /// Kind of the message, by agreement of sender and receiver. [`crate::fragment`] defines its own use.
    pub kind: u32,
}

impl Message {
    /// Returns a message of up to [`PAYLOAD_BYTES`] bytes; the rest is zero. `None` if there are more.
    pub fn from_bytes(kind: u32, bytes: &[u8]) -> Option<Self> {
        let mut whole = [0; PAYLOAD_BYTES];
        whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
        let mut words = [0; PAYLOAD_WORDS];
        for (word, bytes) in words.iter_mut().zip(whole.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Some(Self { words, kind })
    }

    /// Returns the payload as bytes, in the order of [`Message::from_bytes`].
    pub fn bytes(&self) -> [u8; PAYLOAD_BYTES] {
        let mut whole = [0; PAYLOAD_BYTES];
        for (bytes, word) in whole.as_chunks_mut::<8>().0.iter_mut().zip(self.words) {
            *bytes = word.to_le_bytes();
        }
        whole
    }
}
