//! Frames between two nodes, 16 bytes each, and the one list of their kinds.
//!
//! Most frames are messages of the engines, whose kinds [`coherence::Kind`] lists. The others are the
//! driver's own, with kinds from 0x80 on. [`classify`] refuses a byte that is no kind, and a kind without an
//! arm does not compile. The module that writes and reads a frame has its layout.
//!
//! ```text
//! END         page: the number of the lost node         `page_server::messages`
//! DISCARD     discard a block of pages                  `page_server::discarding`
//! DISCARDED   a block of pages is discarded             `page_server::discarding`
//! STAMP       predecessors of later messages            `merging::stamp_tracker`
//! FRAGMENT    a part of a merge payload                 `merging::fragments`
//! ```

use coherence::{Kind, Malformed, wire_kinds};

pub use coherence::KIND_AT;

/// Length of a frame, bytes: that of a message.
pub const FRAME_BYTES: usize = coherence::MESSAGE_BYTES;

/// An encoded frame.
pub type Frame = [u8; FRAME_BYTES];

wire_kinds! {
    /// Kinds of the driver's own frames.
    pub enum DriverKind {
        /// A block of pages is discarded.
        Discarded = 0xfa,
        /// Discard a block of pages.
        Discard = 0xfb,
        /// Predecessors of the sender's later messages.
        Stamp = 0xfc,
        /// A fragment of a merge payload.
        Fragment = 0xfd,
        /// The sender ends, because a node is lost.
        End = 0xff,
    }
}

const fn is_no_message(byte: u8) -> bool {
    byte >= 0x80 && Kind::from_byte(byte).is_none()
}

// A byte is a kind of the engines or of the driver, never both.
const _: () = {
    let mut byte = u8::MAX;
    while byte > 0 {
        assert!(DriverKind::from_byte(byte).is_none() || is_no_message(byte));
        assert!(Kind::from_byte(byte).is_none() || byte < 0x80);
        byte -= 1;
    }
};

/// Class of a frame, which selects its handler.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FrameClass {
    /// The sender ends.
    End,
    /// The frame is about discarded pages.
    Discards(DiscardFrame),
    /// The frame is ordered with others of its sender, where page tables are merged.
    Ordered(OrderedFrame),
}

/// Class of a frame about discarded pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DiscardFrame {
    /// To the pages' manager: discard them.
    Request,
    /// From the pages' manager: they are discarded.
    Done,
}

/// Class of a frame whose order matters where page tables are merged.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OrderedFrame {
    /// Predecessors of later messages.
    Stamp,
    /// A fragment of a merge payload.
    Fragment,
    /// A message of an engine.
    Message,
}

/// Returns the class of a frame, by its kind alone.
///
/// # Errors
/// [`Malformed`] if the byte is no kind.
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

/// Returns the page of a frame, or the number that a frame of the driver has there.
pub fn page_of(frame: &Frame) -> u32 {
    u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]])
}

/// Creates a frame of the driver with a number in place of the page.
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
