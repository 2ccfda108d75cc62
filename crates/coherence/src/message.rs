//! What engines say to one another, and how it is written down.
//!
//! ```text
//! 0   page        u32, little endian, as all
//! 4   kind        u8
//! 5   node        u8   who asks (Forward, ForwardPrefetch)
//! 6   details     u8   bit 0: for writing; bits 1-2: the payload (0 none, 1 attached, 2 zero); bit 3: to discard it
//! 7   reads       u8   (Forward)
//! 8   copyset     u64  (Ownership)
//! ```
//!
//! What a kind has no use for is 0.

use thiserror::Error;

use crate::{Access, NodeId, Nodes, Page, Want, wire_kinds};

wire_kinds! {
    /// The kind of a message: the byte at [`KIND_AT`]. A driver may have frames of its own with the bytes from 0x80 on.
    pub enum Kind {
        /// [`Body::Request`].
        Request = 0x01,
        /// [`Body::Forward`].
        Forward = 0x02,
        /// [`Body::Copy`].
        Copy = 0x03,
        /// [`Body::Ownership`].
        Ownership = 0x04,
        /// [`Body::Invalidate`].
        Invalidate = 0x05,
        /// [`Body::Acknowledge`].
        Acknowledge = 0x06,
        /// [`Body::Prefetch`]: beside `Request`, as those that follow, of a page that nobody waits for yet.
        Prefetch = 0x11,
        /// [`Body::ForwardPrefetch`].
        ForwardPrefetch = 0x12,
        /// [`Body::Nack`].
        Nack = 0x13,
    }
}

/// Where a message has its kind.
pub const KIND_AT: usize = 4;

/// The length of every message, bytes.
pub const MESSAGE_BYTES: usize = 16;

/// One message, to be delivered once. The order of two messages between the same nodes does not matter.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Message {
    /// What it is about.
    pub page: Page,
    /// What it says.
    pub body: Body,
}

/// Where the receiver has the bytes of a page that it is given.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Payload {
    /// It holds a valid copy.
    None,
    /// They come beside the message.
    Attached,
    /// There are none: nobody has written the page, or it is to be discarded.
    Zero,
}

/// What a message says.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Body {
    /// To the page's manager: the sender asks for it.
    Request {
        /// What for.
        access: Access,
    },
    /// From the manager to who owns the page, or will: answer that node.
    Forward {
        /// Who asks.
        requester: NodeId,
        /// What for. For writing also if a migratory page was asked for reading. To discard it if the manager itself wants that.
        want: Want,
        /// How many reads the manager forwarded to this owner before, modulo 256. They come first, whatever their messages' order.
        reads: u8,
    },
    /// From the owner to a reader: a copy.
    Copy {
        /// Never kept: a reader that has a copy does not ask.
        bytes: Payload,
    },
    /// From the owner to the next one.
    Ownership {
        /// For reading, copies stay valid; for writing or to discard, the new owner takes them away first.
        want: Want,
        /// Of the page. Never beside it if that is to discard it: kept if the receiver has a copy, else fresh.
        bytes: Payload,
        /// Who else has a copy.
        copyset: Nodes,
    },
    /// From the owner to one with a copy: give it up.
    Invalidate,
    /// The answer: it is given up.
    Acknowledge,
    /// To the page's manager: the sender would read it, and nobody there waits for it yet. A Copy answers, or Nack.
    Prefetch,
    /// From the manager to who owns the page, or will: that node would read it. Counts as a read.
    ForwardPrefetch {
        /// Who asks.
        requester: NodeId,
    },
    /// To who asked ahead: no copy now.
    Nack,
}

impl Body {
    /// Its kind on the wire.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Request { .. } => Kind::Request,
            Self::Forward { .. } => Kind::Forward,
            Self::Copy { .. } => Kind::Copy,
            Self::Ownership { .. } => Kind::Ownership,
            Self::Invalidate => Kind::Invalidate,
            Self::Acknowledge => Kind::Acknowledge,
            Self::Prefetch => Kind::Prefetch,
            Self::ForwardPrefetch { .. } => Kind::ForwardPrefetch,
            Self::Nack => Kind::Nack,
        }
    }
}

impl Message {
    /// Whether the page's bytes go beside it.
    pub fn carries_page(&self) -> bool {
        match self.body {
            Body::Copy { bytes } | Body::Ownership { bytes, .. } => bytes == Payload::Attached,
            Body::Request { .. }
            | Body::Forward { .. }
            | Body::Invalidate
            | Body::Acknowledge
            | Body::Prefetch
            | Body::ForwardPrefetch { .. }
            | Body::Nack => false,
        }
    }

    /// Whether processors of the receiver may learn by it what those of the sender did.
    pub fn is_causal(&self) -> bool {
        match self.body {
            Body::Copy { .. } | Body::Ownership { .. } | Body::Acknowledge => true,
            Body::Request { .. }
            | Body::Forward { .. }
            | Body::Invalidate
            | Body::Prefetch
            | Body::ForwardPrefetch { .. }
            | Body::Nack => false,
        }
    }

    /// As bytes.
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut out = [0; MESSAGE_BYTES];
        out[0..4].copy_from_slice(&self.page.0.to_le_bytes());
        let details = |want| match want {
            Want::Read => 0,
            Want::Write => 1,
            Want::Discard => 1 << 3,
        };
        let place = |bytes| match bytes {
            Payload::None => 0,
            Payload::Attached => 1 << 1,
            Payload::Zero => 2 << 1,
        };
        out[KIND_AT] = self.body.kind().byte();
        match self.body {
            Body::Request { access } => out[6] = details(access.into()),
            Body::Forward {
                requester,
                want,
                reads,
            } => {
                out[5] = u8::try_from(requester.0).expect("less than 64");
                out[6] = details(want);
                out[7] = reads;
            }
            Body::Copy { bytes } => out[6] = place(bytes),
            Body::Ownership { want, bytes, copyset } => {
                out[6] = details(want) | place(bytes);
                out[8..16].copy_from_slice(&copyset.0.to_le_bytes());
            }
            Body::ForwardPrefetch { requester } => {
                out[5] = u8::try_from(requester.0).expect("less than 64");
            }
            Body::Invalidate | Body::Acknowledge | Body::Prefetch | Body::Nack => {}
        }
        out
    }

    /// From bytes.
    ///
    /// # Errors
    /// If no message is written like this.
    pub fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Result<Self, Malformed> {
        let [a, b, c, d, kind, node, details, reads, copyset @ ..] = *bytes;
        let (want, access) = match details & 0b1001 {
            0 => (Want::Read, Access::Read),
            0b1000 => (Want::Discard, Access::Read),
            _ => (Want::Write, Access::Write),
        };
        let place = match details >> 1 & 0b11 {
            0 => Payload::None,
            1 => Payload::Attached,
            2 => Payload::Zero,
            _ => return Err(Malformed),
        };
        let body = match Kind::from_byte(kind).ok_or(Malformed)? {
            Kind::Request => Body::Request { access },
            Kind::Forward => Body::Forward {
                requester: NodeId(u16::from(node)),
                want,
                reads,
            },
            Kind::Copy => Body::Copy { bytes: place },
            Kind::Ownership => Body::Ownership {
                want,
                bytes: place,
                copyset: Nodes(u64::from_le_bytes(copyset)),
            },
            Kind::Invalidate => Body::Invalidate,
            Kind::Acknowledge => Body::Acknowledge,
            Kind::Prefetch => Body::Prefetch,
            Kind::ForwardPrefetch => Body::ForwardPrefetch {
                requester: NodeId(u16::from(node)),
            },
            Kind::Nack => Body::Nack,
        };
        let page = Page(u32::from_le_bytes([a, b, c, d]));
        let message = Self { page, body };
        // One way to write each: also what has no meaning is checked.
        if u16::from(node) >= crate::MAX_NODES || message.encode() != *bytes {
            return Err(Malformed);
        }
        Ok(message)
    }
}

/// These bytes are no message.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("a peer sent bytes that are no message of this protocol; end the VM")]
pub struct Malformed;
