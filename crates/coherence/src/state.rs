//! What a node knows of one page, whoever manages it: 24 bytes.

use crate::{Access, NodeId, Nodes, Right, Want};

/// A node or none, in a byte.
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

/// Who takes the ownership next, and for what; or nobody. In a byte.
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

/// What this node is to the page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Stage {
    /// Somebody else owns it. This node may have a copy.
    NotOwner,
    /// As before, and this node has asked for it and has no answer yet. It may be the next owner, and hold requests already.
    Asked(Want),
    /// This node owns it.
    Owner,
    /// As before, and it waits until those in `copyset` have given up their copies, to write.
    Collecting,
    /// As `Collecting`, to forget what is in it.
    Discarding,
    /// As `NotOwner` without a copy, and this node has asked ahead for one and has no answer yet.
    Prefetching,
    /// As before, and somebody here waits to read the page by now.
    PrefetchingRead,
    /// As before, to write.
    PrefetchingWrite,
}

impl Stage {
    /// Whether this node has asked ahead and has no answer yet.
    pub(crate) fn is_prefetching(self) -> bool {
        matches!(self, Self::Prefetching | Self::PrefetchingRead | Self::PrefetchingWrite)
    }

    /// Of a node that has asked ahead: what those wait for who want the page by now, if anybody does.
    pub(crate) fn joined(self) -> Option<Access> {
        match self {
            Self::PrefetchingRead => Some(Access::Read),
            Self::PrefetchingWrite => Some(Access::Write),
            _ => None,
        }
    }
}

/// A page as one node sees it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct State {
    /// If this node owns it: who else has a copy. While collecting: who has not given it up yet.
    pub(crate) copyset: Nodes,
    /// Who waits for a copy of this node's.
    pub(crate) readers: Nodes,
    /// What this node's processors have.
    pub(crate) right: Right,
    /// What this node is to it.
    pub(crate) stage: Stage,
    /// Granted and not used yet: what would take it away waits.
    pub(crate) is_held: bool,
    /// If this node owns it: nobody has written it, or not since it was discarded.
    pub(crate) is_fresh: bool,
    /// Who waits for the ownership. Whoever asks later is sent there, so there is one at most.
    pub(crate) next_owner: NextOwner,
    /// How many reads come before the next owner, counted as `reads`.
    pub(crate) reads_before_transfer: u8,
    /// Reads that were forwarded to this node as the owner that it is, or will be; modulo 256. Fewer than 64 are under way.
    pub(crate) reads: u8,
    /// Who waits for this node to give up its copy, which is held or has not come yet.
    pub(crate) invalidator: OptionalNode,
}

// A region of 1 GiB has 262,144 of them.
const _: () = assert!(size_of::<State>() == 24);

impl State {
    /// As it is at the start.
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

    /// Whether this node owns it.
    pub(crate) fn is_owner(&self) -> bool {
        matches!(self.stage, Stage::Owner | Stage::Collecting | Stage::Discarding)
    }
}
