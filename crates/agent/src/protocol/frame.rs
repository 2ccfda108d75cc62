//! Frames: a kind (1 byte), a length (4 bytes, little endian), and that many bytes of payload.
//!
//! A payload is at most [`FRAME_BYTES_MAX`] long, so neither side holds more than one frame of the other's.
//! The decoder receives bytes and returns whole frames; a refused frame ends the connection.

use serde::{Serialize, de::DeserializeOwned};

/// Greatest length of a payload, bytes.
pub const FRAME_BYTES_MAX: usize = 64 << 10;

/// Length of kind and length, bytes.
pub const HEADER_BYTES: usize = 5;

/// Kind of a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Client: a `Request` as JSON.
    Request = 1,
    /// Client: bytes for the program's standard input.
    Stdin = 2,
    /// Client: the end of standard input.
    StdinEnd = 3,
    /// Client: a `WindowSize` as JSON.
    WindowSize = 4,
    /// Client: a signal number (1 byte) for the program's process group.
    Signal = 5,
    /// Either: bytes of a file.
    Data = 6,
    /// Either: an `End` as JSON.
    End = 7,
    /// Server: a `Ready` as JSON.
    Ready = 16,
    /// Server: the reason, as text.
    Refused = 17,
    /// Server: bytes of the program's standard output (of its terminal, when it has one).
    Stdout = 18,
    /// Server: bytes of the program's standard error.
    Stderr = 19,
    /// Server: an `ExitStatus` as JSON.
    Exit = 20,
    /// Server: the file is in place.
    Done = 21,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Request,
            2 => Self::Stdin,
            3 => Self::StdinEnd,
            4 => Self::WindowSize,
            5 => Self::Signal,
            6 => Self::Data,
            7 => Self::End,
            16 => Self::Ready,
            17 => Self::Refused,
            18 => Self::Stdout,
            19 => Self::Stderr,
            20 => Self::Exit,
            21 => Self::Done,
            _ => return None,
        })
    }
}

/// Reason why received bytes are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A kind that this version does not have.
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    /// A payload above the limit.
    #[error("a frame of {0} bytes; {FRAME_BYTES_MAX} is the limit")]
    TooLong(u32),
    /// A payload that is invalid for its kind.
    #[error("a {kind:?} frame that can't be understood")]
    Payload {
        /// Kind of the frame.
        kind: Kind,
    },
}

/// A message of the agent's protocol: a header, then the payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Kind of the payload.
    pub kind: Kind,
    /// Bytes after the header.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Parses the payload as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        serde_json::from_slice(&self.payload).map_err(|_| FrameError::Payload { kind: self.kind })
    }

    /// Returns the payload as text for people: control characters are replaced, so that a guest can't control
    /// a terminal with it.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.payload)
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .take(1024)
            .collect()
    }
}

/// Appends a frame to `out`. `payload` is at most [`FRAME_BYTES_MAX`] long.
pub fn encode(kind: Kind, payload: &[u8], out: &mut Vec<u8>) {
    assert!(payload.len() <= FRAME_BYTES_MAX, "callers cut payloads to size");
    out.reserve(HEADER_BYTES + payload.len());
    out.push(kind as u8);
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(payload);
}

/// Appends a frame whose payload is `value` as JSON; returns false if that is longer than a frame may be.
pub fn encode_json<T: Serialize>(kind: Kind, value: &T, out: &mut Vec<u8>) -> bool {
    match serde_json::to_vec(value) {
        Ok(payload) if payload.len() <= FRAME_BYTES_MAX => {
            encode(kind, &payload, out);
            true
        }
        _ => false,
    }
}

/// Converts received bytes into frames; holds at most one frame and one read of bytes.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    start: usize,
}

impl Decoder {
    /// Adds received bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next frame, if all its bytes have arrived.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let unread = &self.bytes[self.start..];
        let Some((header, rest)) = unread.split_at_checked(HEADER_BYTES) else {
            return Ok(None);
        };
        let kind = Kind::from_byte(header[0]).ok_or(FrameError::UnknownKind(header[0]))?;
        let length = u32::from_le_bytes([header[1], header[2], header[3], header[4]]);
        if length as usize > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let Some(payload) = rest.get(..length as usize) else {
            return Ok(None);
        };
        let frame = Frame {
            kind,
            payload: payload.to_vec(),
        };
        self.start += HEADER_BYTES + length as usize;
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        any::<u8>().prop_filter_map("a known kind", Kind::from_byte)
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut_of_the_byte_stream(
            frames in prop::collection::vec((kinds(), prop::collection::vec(any::<u8>(), 0..300)), 0..20),
            cut in 1usize..50,
        ) {
            let mut bytes = Vec::new();
            for (kind, payload) in &frames {
                encode(*kind, payload, &mut bytes);
            }
            let mut decoder = Decoder::default();
            let mut decoded = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.feed(piece);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    decoded.push((frame.kind, frame.payload));
                }
            }
            prop_assert_eq!(decoded, frames);
        }

        #[test]
        fn any_bytes_are_refused_or_decoded_without_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..2000)
        ) {
            let mut decoder = Decoder::default();
            decoder.feed(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
        }
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_its_bytes_arrive() {
        let mut decoder = Decoder::default();
        decoder.feed(&[Kind::Stdout as u8, 1, 0, 1, 0]);
        assert_eq!(decoder.next_frame(), Err(FrameError::TooLong(65537)));
    }

    #[test]
    fn a_refusal_cannot_carry_terminal_escapes() {
        let frame = Frame {
            kind: Kind::Refused,
            payload: b"\x1b]0;owned\x07no".to_vec(),
        };
        assert!(!frame.text().contains('\x1b') && !frame.text().contains('\x07'));
    }
}
