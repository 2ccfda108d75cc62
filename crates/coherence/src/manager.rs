//! What a page's *manager* knows and does (the word and the role are those of vNUMA, section 2.2, and of Ivy: fixed for each page, whoever
//! owns that): it puts requests into an order by sending each to the last node that was told to become the owner. So they wait where the
//! page will come by, and the manager waits for nobody. The copyset is with the owner, as in Ivy's "improved" protocol.

use crate::migratory::Migratory;
use crate::state::OptionalNode;
use crate::{NodeId, Want};

/// What a manager knows of one page: 4 bytes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Managed {
    /// Who owns it, or will when all before have had it.
    owner: OptionalNode,
    /// Reads forwarded to that node since; modulo 256.
    reads: u8,
    migratory: Migratory,
}

/// Where a request goes.
pub(crate) struct Order {
    pub(crate) owner: NodeId,
    pub(crate) want: Want,
    pub(crate) reads: u8,
}

impl Managed {
    /// At the start its manager has it.
    pub(crate) fn new(me: NodeId) -> Self {
        Self {
            owner: OptionalNode::some(me),
            reads: 0,
            migratory: Migratory::NEW,
        }
    }

    /// The next request, and what comes after it. Nothing if that node owns it, and so should not ask.
    pub(crate) fn order(
        mut self,
        me: NodeId,
        requester: NodeId,
        want: Want,
        is_policy_on: bool,
    ) -> Option<(Order, Self)> {
        let owner = self.owner.get().filter(|owner| *owner != requester)?;
        let want = if is_policy_on {
            self.migratory.asked(requester, want)
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
        Some((Order { owner, want, reads }, self))
    }

    /// A copy is asked for ahead: who owns the page, and what comes after; none if it is taken for migratory, as a copy would
    /// help nobody then. Nothing at all if that node owns it, and so should not ask. It says nothing of how the page is used.
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

    /// The manager, which owns it, writes without asking anybody.
    pub(crate) fn wrote(&mut self, me: NodeId) {
        self.migratory.asked(me, Want::Write);
    }

    /// The manager, which owns it, discards it without asking anybody.
    pub(crate) fn discarded(&mut self, me: NodeId) {
        self.migratory.asked(me, Want::Discard);
    }
}

/// Writers do; and so does a manager that joins the copyset, which saves forwarding while it has the page (vNUMA, section 3.1).
pub(crate) fn takes_ownership(manager: NodeId, requester: NodeId, want: Want) -> bool {
    want != Want::Read || requester == manager
}
