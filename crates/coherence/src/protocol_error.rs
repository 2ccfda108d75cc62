//! Messages that make no sense.

use thiserror::Error;

use crate::{Body, NodeId, Page};

/// A peer is broken or hostile: the memory can't be relied on any more. The engine is as it was before the message.
#[derive(Clone, Copy, Debug, Eq, Error, Hash, PartialEq)]
pub enum ProtocolError {
    /// The sender is not one of the nodes, or is this one.
    #[error("a message came from node {0}, which is not another node of this memory; end the VM")]
    UnknownSender(NodeId),
    /// It is about a page of another stripe, or past the end.
    #[error("node {from} sent a message about page {page}, which is not in this stripe; end the VM")]
    WrongStripe {
        /// Who sent it.
        from: NodeId,
        /// As it said.
        page: Page,
    },
    /// It does not follow from what was said before.
    #[error("node {from} sent {body:?} about page {page} out of turn; end the VM")]
    Unexpected {
        /// Who sent it.
        from: NodeId,
        /// The page.
        page: Page,
        /// What it said.
        body: Body,
    },
}
