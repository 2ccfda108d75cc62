//! Frames of the other nodes, and this node's report of its end.

use coherence::{Access, Body, Malformed, Message, NodeId, Page, Want};

use super::PageServer;
use crate::clock::now_ns;
use crate::driver::landing::Landing;
use crate::frame::{DriverKind, Frame, FrameClass, classify, driver_frame, page_of};
use crate::shutdown::End;

impl PageServer {
    /// Handles received messages until one wakes a thread that may need this CPU. Returns whether there were
    /// any.
    pub(super) fn take_messages(&mut self) -> Result<bool, End> {
        let mut busy = false;
        for node in 0..self.driver.peers.links.len() {
            while let Some(frame) = self.next_message(node)? {
                busy = true;
                self.message(node, &frame)?;
                if self.threads().need_the_cpu() {
                    return Ok(true);
                }
            }
        }
        Ok(busy)
    }

    /// Returns the next message of a node.
    fn next_message(&mut self, node: usize) -> Result<Option<Frame>, End> {
        let guess = self.driver.guess();
        let Some(link) = &mut self.driver.peers.links[node] else {
            return Ok(None);
        };
        let region = &self.driver.region;
        // Both places are pages that no thread can use, or this page server's own scratch.
        let merges = self.driver.merging.is_some();
        let mut landing = None;
        let place = |frame: &Frame| {
            landing = Landing::place(region, frame, merges)?;
            Ok(landing.map(|page| region.bytes(page).cast()))
        };
        // SAFETY: as above.
        let came = unsafe { link.next_bulk(guess, place) }.transpose();
        let frame = match came {
            Some(Ok(frame)) => Ok(Some(frame)),
            None => link.next_control(),
            // A node that ends has reported the reason before.
            Some(Err(error)) => {
                link.fill([true; 2]);
                match link.next_control() {
                    Ok(Some(frame)) => Ok(Some(frame)),
                    _ => Err(error),
                }
            }
        };
        if let Some(page) = landing {
            self.driver.record_landing(page, guess);
        }
        frame.map_err(|error| self.driver.peers.lost(node, &error))
    }

    fn message(&mut self, node: usize, frame: &Frame) -> Result<(), End> {
        match classify(frame).map_err(|error| self.malformed(node, error))? {
            FrameClass::End => Err(End::Reported {
                by: self.driver.peers.name(node),
                lost: self.driver.peers.name(page_of(frame) as usize),
            }),
            FrameClass::Discards(kind) => self.receive_discard(node, kind, frame),
            FrameClass::Ordered(kind) => match self.in_order(node, kind, frame)? {
                Some(frame) => self.act(node, frame),
                None => Ok(()),
            },
        }
    }

    /// Returns the reason of the end for malformed bytes of a node.
    pub(super) fn malformed(&self, node: usize, error: Malformed) -> End {
        End::ProtocolError(format!("{}: {error}", self.driver.peers.name(node)))
    }

    /// Handles a message of the engine.
    pub(super) fn act(&mut self, node: usize, frame: Frame) -> Result<(), End> {
        let message = Message::decode(&frame).map_err(|error| self.malformed(node, error))?;
        if message.page.0 < self.driver.region.pages() {
            let page = self.driver.region.unstriped(message.page.0);
            // Nothing more arrives for the request.
            self.driver.landing.cancel(page);
            if self.driver.is_taken(page)
                && matches!(message.body, Body::Request { .. } | Body::Prefetch)
                && let Some(merging) = &mut self.driver.merging
            {
                merging.parked.push((node, frame));
                return Ok(());
            }
            // A page in flight is marked too: it is wanted as soon as it arrives.
            if matches!(
                message.body,
                Body::Request { .. } | Body::Forward { .. } | Body::Invalidate
            ) && let Some(index) = self.driver.want(page)
            {
                self.release_or_keep(index, now_ns());
            }
            self.update_prefetchers(page, message.body);
        }
        let from = NodeId(node as u16);
        self.run_event(|engine, effects| engine.receive(from, message, effects))
            .map_err(|refusal| End::ProtocolError(format!("{}: {refusal}", self.driver.peers.name(node))))?;
        while let Some(page) = self.driver.unheld.pop() {
            let page = Page(self.driver.region.striped(page));
            self.run_event(|engine, effects| engine.used(page, effects));
        }
        self.check()
    }

    /// Updates the prefetchers by a message.
    fn update_prefetchers(&mut self, page: u32, body: Body) {
        match body {
            Body::Nack => self.read_prefetcher.on_nack(page),
            Body::Invalidate
            | Body::Request {
                access: Access::Write,
            }
            | Body::Forward {
                want: Want::Write | Want::Discard,
                ..
            } => {
                self.read_prefetcher.on_invalidation(page);
                self.driver.write_prefetcher.on_invalidation(page);
            }
            // The page may have been used long ago without a check. If not, it stays, as no thread waits for
            // it.
            Body::Prefetch | Body::ForwardPrefetch { .. } => {
                if let Some(index) = self.driver.residencies.index_of(page) {
                    self.release_or_keep(index, now_ns());
                }
            }
            Body::Request { access: Access::Read }
            | Body::Forward { want: Want::Read, .. }
            | Body::Copy { .. }
            | Body::Ownership { .. }
            | Body::Acknowledge => {}
        }
    }

    /// Reports the lost node to the other nodes. Each page server of each node does so, also for a reported
    /// end: a node without a report on a stream takes the other end of it for the lost node.
    pub(super) fn report_end(&mut self, end: &End) {
        let number_of = |name: &str| self.driver.peers.number_of(name);
        let lost = match end {
            End::Lost { node: lost, .. } | End::Reported { lost, .. } => number_of(lost),
            End::ProtocolError(_) | End::Kernel(_) => Some(usize::from(self.driver.me)),
            End::Closed => None,
        };
        let Some(lost) = lost else { return };
        let frame = driver_frame(DriverKind::End, lost as u32);
        for (node, link) in self.driver.peers.links.iter_mut().enumerate() {
            let Some(link) = link.as_mut().filter(|_| node != lost) else {
                continue;
            };
            // A node that is gone needs no report.
            let _ = link.send(&frame, false);
        }
    }
}
