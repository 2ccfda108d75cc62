//! Frames: what goes between two nodes, 16 bytes each, and the one list of their kinds.
//!
//! Most frames are messages of the engines, whose kinds [`coherence::Kind`] lists. The others are the driver's own, with kinds
//! from 0x80 on. [`classify`] says what a frame is; a byte that is no kind is refused there, and a kind without an arm does not
//! compile. The layout of each of the driver's own frames is in the module that writes and reads it.
//!
//! ```text
//! END         page: the number of the lost node         `end`
//! DISCARD     a block is to be forgotten                `lane::discarding`
//! DISCARDED   a block has been                          `lane::discarding`
//! STAMP       what later messages come after            `merging::stamp_tracker`
//! PIECE       a piece of what is said of merged pages   `merging::fragments`
//! ```

use coherence::{Kind, Malformed, wire_kinds};

pub use coherence::KIND_AT;

/// A frame's bytes: those of a message.
pub const FRAME_BYTES: usize = coherence::MESSAGE_BYTES;

/// A frame as it travels.
pub type Frame = [u8; FRAME_BYTES];

wire_kinds! {
    /// Kinds of the driver's own frames.
    pub enum DriverKind {
        /// A block of pages is forgotten.
        Discarded = 0xfa,
        /// A block of pages is to be forgotten.
        Discard = 0xfb,
        /// What later messages of the same node come after.
        Stamp = 0xfc,
        /// A piece of a message about merged pages.
        Fragment = 0xfd,
        /// Its sender ends, because of a node that is lost.
        End = 0xff,
    }
}

const fn is_no_message(byte: u8) -> bool {
    byte >= 0x80 && Kind::from_byte(byte).is_none()
}

// A byte is a kind of the engines' or of the driver's, never both.
const _: () = {
    let mut byte = u8::MAX;
    while byte > 0 {
        assert!(DriverKind::from_byte(byte).is_none() || is_no_message(byte));
        assert!(Kind::from_byte(byte).is_none() || byte < 0x80);
        byte -= 1;
    }
};

/// What a frame is, for the part of a lane that handles it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FrameClass {
    /// The sender ends.
    End,
    /// About pages that are forgotten.
    Discards(DiscardFrame),
    /// One that other frames of the same node come before or after, where page tables are merged.
    Ordered(OrderedFrame),
}

/// A frame about pages that are forgotten.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DiscardFrame {
    /// To their manager: forget them.
    Request,
    /// From their manager: they are forgotten.
    Done,
}

/// A frame whose order counts where page tables are merged.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OrderedFrame {
    /// What later messages come after.
    Stamp,
    /// A piece of a message about merged pages.
    Fragment,
    /// A message of an engine.
    Message,
}

/// What a frame is, by its kind alone.
///
/// # Errors
/// If its kind is none.
pub fn classify(frame: &Frame) -> Result<FrameClass, Malformed> {
    let byte = frame[KIND_AT];
    Ok(match DriverKind::from_byte(byte) {
        Some(DriverKind::End) => FrameClass::End,
        Some(DriverKind::Discard) => FrameClass::Discards(DiscardFrame::Request),
        Some(DriverKind::Discarded) => FrameClass::Discards(DiscardFrame::Done),
        Some(DriverKind::Stamp) => FrameClass::Ordered(OrderedFrame::Stamp),
        Some(DriverKind::Fragment) => FrameClass::Ordered(OrderedFrame::Fragment),
        None => {
            Kind::from_byte(byte).ok_or(Malformed)?;
            FrameClass::Ordered(OrderedFrame::Message)
        }
    })
}

/// The page that a frame is about, or what a frame of the driver's has in its place.
pub fn page_of(frame: &Frame) -> u32 {
    u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]])
}

/// A frame of the driver's, of that kind and with that number in the page's place.
pub fn driver_frame(kind: DriverKind, number: u32) -> Frame {
    let mut frame = [0; FRAME_BYTES];
    frame[..KIND_AT].copy_from_slice(&number.to_le_bytes());
    frame[KIND_AT] = kind.byte();
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_one_class_or_refused() {
        let class = |byte| {
            let mut frame = [0; FRAME_BYTES];
            frame[KIND_AT] = byte;
            classify(&frame)
        };
        let classes: Vec<u8> = (0..=u8::MAX).filter(|byte| class(*byte).is_ok()).collect();
        assert_eq!(
            classes,
            [1, 2, 3, 4, 5, 6, 0x11, 0x12, 0x13, 0xfa, 0xfb, 0xfc, 0xfd, 0xff]
        );
        let message = Ok(FrameClass::Ordered(OrderedFrame::Message));
        assert!(classes[..9].iter().all(|byte| class(*byte) == message));
        assert_eq!(class(DriverKind::End.byte()), Ok(FrameClass::End));
    }
}
