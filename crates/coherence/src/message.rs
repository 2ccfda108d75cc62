//! Messages between engines and their encoding.
//!
//! ```text
//! 0   page        u32, little endian, as all
//! 4   kind        u8
//! 5   node        u8   the requester (Forward, ForwardPrefetch)
//! 6   details     u8   bit 0: for writing; bits 1-2: payload (0 none, 1 attached, 2 zero); bit 3: discard
//! 7   reads       u8   (Forward)
//! 8   copyset     u64  (Ownership)
//! ```
//!
//! Fields that a kind does not use are 0.

use thiserror::Error;

use crate::{Access, NodeId, Nodes, Page, Want, wire_kinds};

wire_kinds! {
    /// Kind of a message: the byte at [`KIND_AT`]. A driver may use the bytes from 0x80 on for frames of its
    /// own.
    pub enum Kind {
        /// Kind of [`Body::Request`].
        Request = 0x01,
        /// Kind of [`Body::Forward`].
        Forward = 0x02,
        /// Kind of [`Body::Copy`].
        Copy = 0x03,
        /// Kind of [`Body::Ownership`].
        Ownership = 0x04,
        /// Kind of [`Body::Invalidate`].
        Invalidate = 0x05,
        /// Kind of [`Body::Acknowledge`].
        Acknowledge = 0x06,
        /// Kind of [`Body::Prefetch`].
        Prefetch = 0x11,
        /// Kind of [`Body::ForwardPrefetch`].
        ForwardPrefetch = 0x12,
        /// Kind of [`Body::Nack`].
        Nack = 0x13,
    }
}

/// Offset of the kind in a message.
pub const KIND_AT: usize = 4;

/// Length of every message, bytes.
pub const MESSAGE_BYTES: usize = 16;

/// A message. It must be delivered once. Two messages between the same nodes may arrive in any order.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Message {
    /// Page that the message is about.
    pub page: Page,
    /// Kind and contents.
    pub body: Body,
}

/// Where the receiver finds the bytes of a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Payload {
    /// The receiver holds a valid copy.
    None,
    /// The bytes are attached to the message.
    Attached,
    /// The page is zero: no node has written it, or it is discarded.
    Zero,
}

/// Kind and contents of a message.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Body {
    /// To the page's manager: the sender requests the page.
    Request {
        /// Access that faulted.
        access: Access,
    },
    /// From the manager to the owner or a future owner: serve this request.
    Forward {
        /// Node to serve.
        requester: NodeId,
        /// Access or discard to serve. A migratory page that was requested for reading is forwarded for
        /// writing. Only the manager itself wants a discard.
        want: Want,
        /// Number of reads that the manager forwarded to this owner before, modulo 256. The owner serves them
        /// first, in any order the messages arrive.
        reads: u8,
    },
    /// From the owner to a reader: a copy of the page.
    Copy {
        /// Source of the bytes. Never [`Payload::None`]: a reader with a copy does not send a request.
        bytes: Payload,
    },
    /// From the owner to the next owner: the ownership.
    Ownership {
        /// For [`Want::Read`] copies stay valid. Otherwise the new owner invalidates them first.
        want: Want,
        /// Source of the bytes. Never [`Payload::Attached`] for a discard.
        bytes: Payload,
        /// Other nodes with a copy.
        copyset: Nodes,
    },
    /// From the owner to a node in the copyset: invalidate the copy.
    Invalidate,
    /// To the owner: the copy is invalid.
    Acknowledge,
    /// To the page's manager: the sender prefetches a copy; no thread waits for it. The reply is a Copy or a
    /// Nack.
    Prefetch,
    /// From the manager to the owner or a future owner: serve this prefetch. It counts as a read.
    ForwardPrefetch {
        /// Node to serve.
        requester: NodeId,
    },
    /// Reply to a prefetch that is not served.
    Nack,
}

impl Body {
    /// Returns the kind.
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
    /// Returns whether the page's bytes are attached.
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

    /// Returns whether processors of the receiver may learn by the message what processors of the sender did.
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

    /// Encodes the message.
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

    /// Decodes a message.
    ///
    /// # Errors
    /// [`Malformed`] if no message has this encoding.
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
        // Each message has one encoding. Comparing the bytes also checks the unused fields.
        if u16::from(node) >= crate::MAX_NODES || message.encode() != *bytes {
            return Err(Malformed);
        }
        Ok(message)
    }
}

/// Error: the bytes encode no message.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("a peer sent bytes that are no message of this protocol; end the VM")]
pub struct Malformed;
