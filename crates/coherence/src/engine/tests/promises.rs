//! Invariants of a page at any time, and at rest.

use super::world::{Packet, World, at};
use crate::state::{NextOwner, Stage};
use crate::{Body, NodeId, Nodes, Page, Right};

impl World {
    /// Returns a violated invariant of a page; `under_way` are the messages about it.
    pub fn wrong(&self, page: Page, under_way: impl Iterator<Item = Packet>) -> Option<&'static str> {
        if self.environment.broken.is_some() {
            return self.environment.broken;
        }
        let rights = self.environment.rights.iter().map(|rights| rights[at(page.0)]);
        let nodes = || (0_u16..).map(NodeId);
        let mut has = Nodes::NONE;
        let mut writers = 0;
        for (node, right) in nodes().zip(rights) {
            if right >= Right::Read {
                has = has.with(node);
                if self.environment.memory[at(node.0)][at(page.0)] != self.environment.latest[at(page.0)] {
                    return Some("a copy of something old");
                }
            }
            writers += usize::from(right == Right::Write);
        }
        if writers > 1 || writers == 1 && has.count() > 1 {
            return Some("a writer is not alone");
        }
        let mut owners = 0;
        let mut known = Nodes::NONE;
        for (node, engine) in nodes().zip(&self.engines) {
            let state = &engine.states[at(page.0)];
            if state.is_owner() {
                owners += 1;
                known = state.copyset.with(node);
            }
        }
        for packet in under_way {
            match packet.message().body {
                Body::Ownership { copyset, .. } => {
                    owners += 1;
                    known = copyset.with(NodeId(packet.to));
                }
                Body::Copy { .. } => has = has.with(NodeId(packet.to)),
                _ => {}
            }
        }
        if owners != 1 {
            return Some("not one owner");
        }
        if !has.is_within(known) {
            return Some("a copy that is not in the copyset");
        }
        None
    }

    /// Returns a violated invariant of a page when nothing is in flight.
    pub fn wrong_at_rest(&self, page: Page) -> Option<&'static str> {
        if !self.environment.queues[at(page.0)].is_empty() {
            return Some("a request without an answer");
        }
        for engine in &self.engines {
            let state = &engine.states[at(page.0)];
            let nobody = state.readers.is_empty() && state.next_owner == NextOwner::NONE;
            if !nobody || state.invalidator.get().is_some() {
                return Some("a processor waits");
            }
            if matches!(state.stage, Stage::Asked(_) | Stage::Collecting) {
                return Some("a node waits");
            }
        }
        None
    }
}
