//! The manager of a page: the fixed node that orders its requests (vNUMA, section 2.2; Ivy).
//!
//! The manager forwards each request to the last node that is to become the owner. Requests wait there until
//! the ownership arrives; the manager never blocks. The owner has the copyset, as in Ivy's improved protocol.

use crate::migratory::Migratory;
use crate::state::OptionalNode;
use crate::{NodeId, Want};

/// State of one page at its manager: 4 bytes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Managed {
    /// Owner, or last node in the order of future owners.
    owner: OptionalNode,
    /// Reads forwarded to that node since it became the last one, modulo 256.
    reads: u8,
    migratory: Migratory,
}

/// Destination of a request and the access that it requests.
pub(crate) struct ForwardedRequest {
    pub(crate) owner: NodeId,
    pub(crate) want: Want,
    pub(crate) reads: u8,
}

impl Managed {
    /// Creates the initial state: the manager owns the page.
    pub(crate) fn new(me: NodeId) -> Self {
        Self {
            owner: OptionalNode::some(me),
            reads: 0,
            migratory: Migratory::NEW,
        }
    }

    /// Returns where the next request goes, and the state after it. `None` if the requester owns the page and
    /// must not request it.
    pub(crate) fn order(
        mut self,
        me: NodeId,
        requester: NodeId,
        want: Want,
        is_policy_on: bool,
    ) -> Option<(ForwardedRequest, Self)> {
        let owner = self.owner.get().filter(|owner| *owner != requester)?;
        let want = if is_policy_on {
            self.migratory.record(requester, want)
        } else {
            want
        };
        let reads = self.reads;
        if takes_ownership(me, requester, want) {
            self.owner = OptionalNode::some(requester);
            self.reads = 0;
        } else {
            self.reads = reads.wrapping_add(1);
        }
        Some((ForwardedRequest { owner, want, reads }, self))
    }

    /// Returns where a prefetch goes, and the state after it. `Some(None)` refuses it for a migratory page,
    /// of which a copy would be invalidated at once. `None` if the requester owns the page and must not
    /// request it. A prefetch does not change the migratory state.
    pub(crate) fn order_prefetch(
        mut self,
        requester: NodeId,
        is_policy_on: bool,
    ) -> Option<Option<(NodeId, Self)>> {
        let owner = self.owner.get().filter(|owner| *owner != requester)?;
        self.reads = self.reads.wrapping_add(1);
        let is_migratory = is_policy_on && self.migratory.is_confirmed();
        Some((!is_migratory).then_some((owner, self)))
    }

    /// Records a write of the manager itself while it owns the page.
    pub(crate) fn record_write(&mut self, me: NodeId) {
        self.migratory.record(me, Want::Write);
    }

    /// Records a discard of the manager itself while it owns the page.
    pub(crate) fn record_discard(&mut self, me: NodeId) {
        self.migratory.record(me, Want::Discard);
    }
}

/// Returns whether a request transfers the ownership. A write does. A read of the manager does too, which
/// saves forwarding while it has the page (vNUMA, section 3.1).
pub(crate) fn takes_ownership(manager: NodeId, requester: NodeId, want: Want) -> bool {
    want != Want::Read || requester == manager
}
