//! Effects of an event, each performed completely before the next one ([`coherence::Effect`] states the
//! rules).
//!
//! An effect has no result. [`EngineDriver::failed`] keeps the first error until the page server checks it.
//! The node then ends, so later effects don't matter.

use coherence::{Body, Data, Effect, Message, NodeId, Page, Right, Want};

use super::EngineDriver;
use crate::merging::{DeferredWork, HOT};

/// How a message is sent, by its kind.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct SendClass {
    /// Whether it goes on the bulk stream, otherwise on the control stream.
    with_answers: bool,
    /// Whether this node requests a page by it. The requests of one fault are sent together.
    is_request: bool,
    /// Whether the reply brings the page's bytes to this node.
    brings_page: bool,
}

impl SendClass {
    /// Returns the class of a message that node `me` sends.
    fn of(body: &Body, me: u16) -> Self {
        let (with_answers, is_request, brings_page) = match *body {
            Body::Request { .. } | Body::Prefetch => (true, true, true),
            // This node is the page's manager and requests for itself. A discard brings no bytes.
            Body::Forward { requester, want, .. } if requester.0 == me => {
                (false, true, want != Want::Discard)
            }
            Body::ForwardPrefetch { requester } if requester.0 == me => (false, true, true),
            Body::Copy { .. } | Body::Ownership { .. } | Body::Nack => (true, false, false),
            Body::Forward { .. } | Body::ForwardPrefetch { .. } | Body::Invalidate | Body::Acknowledge => {
                (false, false, false)
            }
        };
        Self {
            with_answers,
            is_request,
            brings_page,
        }
    }
}

impl EngineDriver {
    /// Performs one effect completely.
    pub fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Send { to, message } => self.send_message(to, message),
            Effect::Restrict { page, to } => self.restrict(page, to),
            // The bytes were received in place.
            Effect::Store { .. } => {}
            Effect::Grant {
                page,
                right,
                contents,
            } => self.grant(page, right, contents),
            Effect::Forget { page } => self.forget(page),
            Effect::MapPrefetched { page } => self.map_prefetched(page),
        }
    }

    fn send_message(&mut self, to: NodeId, message: Message) {
        let node = usize::from(to.0);
        let page = self.region.unstriped(message.page.0);
        let frame = message.encode();
        let bytes = message
            .carries_page()
            .then(|| self.region.bytes(page).cast_const());
        let class = SendClass::of(&message.body, self.me);
        match self.merging.take_if(|_| message.is_causal()) {
            Some(mut merging) => {
                merging.send(self, node, frame, bytes);
                self.merging = Some(merging);
            }
            None if class.is_request && self.peers.is_gathering() => {
                let result = self.peers.gather_one(node, &frame, class.with_answers);
                self.note(result);
            }
            None => self.post(node, &frame, bytes, class.with_answers),
        }
        // The bytes of a merged page, or one about to be, are valid though it may be closed to all
        // processors.
        let is_nothing = self.region.mapped(page) == Right::None && self.is_plain(page);
        if class.brings_page && is_nothing {
            self.landing.expect(page);
        }
    }

    fn restrict(&mut self, page: Page, to: Right) {
        let page = self.region.unstriped(page.0);
        let result = self.region.restrict(page, to);
        self.kernel(page, "restrict", result);
    }

    fn grant(&mut self, page: Page, right: Right, contents: Data) {
        let page = self.region.unstriped(page.0);
        self.was_fresh = contents == Data::Zero;
        if self.was_fresh {
            self.region.clear(page);
        }
        self.landing.cancel(page);
        let was_prefetched = right == Right::Write && self.write_prefetcher.on_arrival(page, self.was_fresh);
        if self.is_taken(page) {
            // The page is not for processors. A grant to read also replies to a request to write.
            self.residencies.end_page(page);
            if self.region.mapped(page) != Right::None {
                self.revoke(page);
            }
            return self.deferred.push_back(match right {
                Right::Write => DeferredWork::Taken(page),
                Right::None | Right::Read => DeferredWork::Take(page),
            });
        }
        let result = self.region.open(page, right);
        self.kernel(page, "map", result);
        if contents != Data::Zero && self.heat.record(page).is_multiple_of(HOT) && self.merging.is_some() {
            self.deferred.push_back(DeferredWork::Suspect(page));
        }
        if was_prefetched && !self.waiters.has_page(page) {
            self.meter.filled += 1;
            self.mapped_prefetched = true;
            return self.unheld.push(page);
        }
        self.wake(page);
    }

    fn forget(&mut self, page: Page) {
        let page = self.region.unstriped(page.0);
        if !self.freed.contains(&page) {
            self.free(page..page + 1);
        }
        if self.waiters.remove(page, |_| {}) {
            let result = self.region.retry_fault(page);
            self.kernel(page, "wake who waits for", result);
            self.woke = true;
        }
        if self.is_taken(page) {
            self.deferred.push_back(DeferredWork::Take(page));
        }
        self.forgotten.push(page);
    }

    fn map_prefetched(&mut self, page: Page) {
        let page = self.region.unstriped(page.0);
        self.landing.cancel(page);
        let result = self.region.open(page, Right::Read);
        self.kernel(page, "map", result);
        self.heat.record(page);
        self.mapped_prefetched = true;
    }
}

#[cfg(test)]
mod tests {
    use coherence::{Access, Nodes, Payload};

    use super::*;

    #[test]
    fn requests_of_a_fault_are_gathered_and_only_their_bytes_expected() {
        let class = |body| {
            let class = SendClass::of(&body, 1);
            (class.with_answers, class.is_request, class.brings_page)
        };
        let forward = |requester, want| Body::Forward {
            requester: NodeId(requester),
            want,
            reads: 0,
        };
        let access = Access::Write;
        assert_eq!(class(Body::Request { access }), (true, true, true));
        assert_eq!(class(forward(1, Want::Read)), (false, true, true));
        assert_eq!(class(forward(1, Want::Discard)), (false, true, false));
        assert_eq!(class(forward(2, Want::Read)), (false, false, false));
        let (want, bytes, copyset) = (Want::Write, Payload::Attached, Nodes::NONE);
        assert_eq!(
            class(Body::Ownership { want, bytes, copyset }),
            (true, false, false)
        );
        assert_eq!(class(Body::Invalidate), (false, false, false));
    }
}
