//! State of one page at one node: 24 bytes.

use crate::{Access, NodeId, Nodes, Right, Want};

/// A node or none, in one byte.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct OptionalNode(u8);

impl OptionalNode {
    pub(crate) const NONE: Self = Self(u8::MAX);

    pub(crate) fn some(node: NodeId) -> Self {
        Self(u8::try_from(node.0).expect("less than 64"))
    }

    pub(crate) fn get(self) -> Option<NodeId> {
        (self != Self::NONE).then(|| NodeId(u16::from(self.0)))
    }
}

/// The next owner and its request, or none, in one byte.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct NextOwner(u8);

impl NextOwner {
    const WRITES: u8 = 1 << 6;
    const DISCARDS: u8 = 1 << 7;

    pub(crate) const NONE: Self = Self(u8::MAX);

    pub(crate) fn some(node: NodeId, want: Want) -> Self {
        let node = u8::try_from(node.0).expect("less than 64");
        match want {
            Want::Read => Self(node),
            Want::Write => Self(node | Self::WRITES),
            Want::Discard => Self(node | Self::DISCARDS),
        }
    }

    pub(crate) fn get(self) -> Option<(NodeId, Want)> {
        // `NONE` has both bits.
        let want = match self.0 & (Self::WRITES | Self::DISCARDS) {
            0 => Want::Read,
            Self::DISCARDS => Want::Discard,
            _ => Want::Write,
        };
        let node = NodeId(u16::from(self.0 & !(Self::WRITES | Self::DISCARDS)));
        (self != Self::NONE).then_some((node, want))
    }
}

/// Role of this node for the page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Stage {
    /// Another node owns the page. This node may have a copy.
    NotOwner,
    /// As [`Stage::NotOwner`], with a pending request. This node may be the next owner and hold requests
    /// already.
    Asked(Want),
    /// This node owns the page.
    Owner,
    /// As [`Stage::Owner`]: it waits for the acknowledgements of the nodes in `copyset`, to write.
    Collecting,
    /// As [`Stage::Collecting`], to discard the page.
    Discarding,
    /// As [`Stage::NotOwner`] without a copy, with a pending prefetch.
    Prefetching,
    /// As [`Stage::Prefetching`]: a read fault has joined.
    PrefetchingRead,
    /// As [`Stage::Prefetching`]: a write fault has joined.
    PrefetchingWrite,
}

impl Stage {
    /// Returns whether a prefetch is pending.
    pub(crate) fn is_prefetching(self) -> bool {
        matches!(
            self,
            Self::Prefetching | Self::PrefetchingRead | Self::PrefetchingWrite
        )
    }

    /// Returns the access of the faults that joined a pending prefetch, if any did.
    pub(crate) fn joined(self) -> Option<Access> {
        match self {
            Self::PrefetchingRead => Some(Access::Read),
            Self::PrefetchingWrite => Some(Access::Write),
            _ => None,
        }
    }
}

/// State of a page at one node.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct State {
    /// At the owner: other nodes with a copy. While it collects: nodes that have not acknowledged yet.
    pub(crate) copyset: Nodes,
    /// Nodes that wait for a copy from this node.
    pub(crate) readers: Nodes,
    /// Right of this node's processors.
    pub(crate) right: Right,
    /// Role of this node.
    pub(crate) stage: Stage,
    /// Whether the page was granted and not used yet. Requests that would revoke the right are deferred.
    pub(crate) is_held: bool,
    /// At the owner: whether the page is zero, as no node has written it since the start or since it was
    /// discarded.
    pub(crate) is_fresh: bool,
    /// Node that waits for the ownership. Later requests are forwarded there, so there is one at most.
    pub(crate) next_owner: NextOwner,
    /// Value of `reads` at which the ownership may be transferred.
    pub(crate) reads_before_transfer: u8,
    /// Reads forwarded to this node as the owner or a future owner, modulo 256. Fewer than 64 are in flight.
    pub(crate) reads: u8,
    /// Node that waits for this node to give up its copy, which is held or in flight.
    pub(crate) invalidator: OptionalNode,
}

// A region of 1 GiB has 262,144 states.
const _: () = assert!(size_of::<State>() == 24);

impl State {
    /// Creates the initial state.
    pub(crate) fn new(is_manager: bool) -> Self {
        Self {
            copyset: Nodes::NONE,
            readers: Nodes::NONE,
            right: Right::None,
            stage: if is_manager { Stage::Owner } else { Stage::NotOwner },
            is_held: false,
            is_fresh: is_manager,
            next_owner: NextOwner::NONE,
            reads_before_transfer: 0,
            reads: 0,
            invalidator: OptionalNode::NONE,
        }
    }

    /// Returns whether this node owns the page.
    pub(crate) fn is_owner(&self) -> bool {
        matches!(self.stage, Stage::Owner | Stage::Collecting | Stage::Discarding)
    }
}
