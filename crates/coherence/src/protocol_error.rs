//! Violations of the protocol by a peer.

use thiserror::Error;

use crate::{Body, NodeId, Page};

/// Error: a message violates the protocol, so its sender is broken or hostile. The memory is no longer
/// reliable. The engine's state is unchanged.
#[derive(Clone, Copy, Debug, Eq, Error, Hash, PartialEq)]
pub enum ProtocolError {
    /// The sender is this node, or no node of the memory.
    #[error("a message came from node {0}, which is not another node of this memory; end the VM")]
    UnknownSender(NodeId),
    /// The page is of another stripe, or past the region's end.
    #[error("node {from} sent a message about page {page}, which is not in this stripe; end the VM")]
    WrongStripe {
        /// Sender of the message.
        from: NodeId,
        /// Page number in the message.
        page: Page,
    },
    /// The message does not follow from the state of the page.
    #[error("node {from} sent {body:?} about page {page} out of order; end the VM")]
    Unexpected {
        /// Sender of the message.
        from: NodeId,
        /// Page number in the message.
        page: Page,
        /// Contents of the message.
        body: Body,
    },
}
