//! Merged pages on a page server: their messages in order, and the work that follows for the engine.

use coherence::{Access, FaultOutcome, Malformed, Page};

use super::PageServer;
use crate::frame::{Frame, OrderedFrame, page_of};
use crate::merging::DeferredWork;
use crate::shutdown::End;

impl PageServer {
    /// Returns the engine's message that may be handled now. Handles frames about merged pages itself.
    pub(super) fn in_order(
        &mut self,
        node: usize,
        kind: OrderedFrame,
        frame: &Frame,
    ) -> Result<Option<Frame>, End> {
        let Some(mut merging) = self.driver.merging.take() else {
            return match kind {
                OrderedFrame::Message => Ok(Some(*frame)),
                OrderedFrame::Stamp | OrderedFrame::Fragment => Err(self.malformed(node, Malformed)),
            };
        };
        let received = merging.receive(&mut self.driver, node, kind, frame);
        let ready = merging.take_ready();
        self.driver.merging = Some(merging);
        let message =
            received.map_err(|why| End::ProtocolError(format!("{}: {why}", self.driver.peers.name(node))))?;
        self.check()?;
        for (node, frame) in ready {
            self.act(node, frame)?;
        }
        self.settle()?;
        Ok(message)
    }

    /// Does the deferred work on merged pages, and sends the messages that are due.
    pub(super) fn settle(&mut self) -> Result<(), End> {
        while let Some(todo) = self.driver.deferred.pop_front() {
            let Some(mut merging) = self.driver.merging.take() else {
                break;
            };
            match todo {
                DeferredWork::Suspect(page) => merging.suspect(page, &mut self.driver),
                DeferredWork::Taken(page) => merging.merger.taken(Page(page), &mut self.driver),
                DeferredWork::Take(page) => {
                    if !merging.taken.contains(&page) {
                        merging.taken.push(page);
                    }
                    self.driver.merging = Some(merging);
                    let had =
                        self.run_event(|engine, effects| engine.fault(Page(page), Access::Write, effects));
                    if had == FaultOutcome::Allowed {
                        self.driver.revoke(page);
                        self.driver.deferred.push_back(DeferredWork::Taken(page));
                    }
                    self.check()?;
                    continue;
                }
                DeferredWork::GiveBack(page) => {
                    merging.taken.retain(|taken| *taken != page);
                    let parked = std::mem::take(&mut merging.parked);
                    let (now, later): (Vec<_>, Vec<_>) =
                        parked.into_iter().partition(|(_, frame)| page_of(frame) == page);
                    merging.parked = later;
                    self.driver.merging = Some(merging);
                    self.driver.open_to_all(page);
                    self.run_event(|engine, effects| engine.used(Page(page), effects));
                    for (node, frame) in now {
                        self.act(node, frame)?;
                    }
                    self.check()?;
                    continue;
                }
            }
            self.driver.merging = Some(merging);
            self.check()?;
        }
        if let Some(mut merging) = self.driver.merging.take() {
            merging.flush(&mut self.driver);
            self.driver.merging = Some(merging);
        }
        self.check()
    }
}
