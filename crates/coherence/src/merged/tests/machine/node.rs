//! A node: a copy of memory, its merger, and the merger's driver.

use super::super::guest::WORDS;
use super::{Packet, Payload, Task};
use crate::merged::{AtomicPageWords, Batch, Diff, Hooks, MergeMessage, Merger, VectorTime};
use crate::{NodeId, Page, Right};

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Node {
    pub merger: Merger<WORDS>,
    pub driver: NodeDriver,
    pub task: Option<Task>,
    /// A batch that is being applied: its sender, and the rest.
    pub applying: Option<(usize, Vec<Diff>)>,
}

/// Driver of a merger: it records what the merger asks for.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct NodeDriver {
    pub me: usize,
    pub nodes: usize,
    pub copy: Vec<[u64; WORDS]>,
    pub rights: Vec<Right>,
    pub open: Vec<bool>,
    pub arrived: [u64; WORDS],
    pub sent: Vec<Packet>,
    pub takes: Vec<u32>,
    pub given_back: Vec<u32>,
    pub is_upwards: bool,
    pub is_early: bool,
}

impl AtomicPageWords for NodeDriver {
    fn is_ram(&self, page: Page) -> bool {
        (page.0 as usize) < self.copy.len()
    }
    fn load(&self, page: Page, word: usize) -> u64 {
        self.copy[page.0 as usize][word]
    }
    fn compare_exchange(&mut self, page: Page, word: usize, current: u64, new: u64) -> Result<(), u64> {
        let place = &mut self.copy[page.0 as usize][word];
        if *place != current {
            return Err(*place);
        }
        *place = new;
        Ok(())
    }
}

impl Hooks for NodeDriver {
    fn send(&mut self, to: NodeId, message: MergeMessage) {
        let bytes = if message.op.carries_page() {
            self.copy[message.page.0 as usize]
        } else {
            [0; WORDS]
        };
        if self.is_early && message.op.carries_page() {
            self.open[message.page.0 as usize] = true;
        }
        self.post(
            usize::from(to.0),
            message.stamp,
            Payload::MergeMessage(message, bytes),
        );
    }
    fn broadcast(&mut self, batch: Batch<'_>) {
        let mut diffs = batch.diffs.to_vec();
        if self.is_upwards {
            diffs.reverse();
        }
        let me = self.me;
        for to in (0..self.nodes).filter(|to| *to != me) {
            self.post(to, batch.stamp, Payload::Batch(diffs.clone()));
        }
    }
    fn take(&mut self, page: Page) {
        self.takes.push(page.0);
    }
    fn give_back(&mut self, page: Page) {
        self.rights[page.0 as usize] = Right::Write;
        self.open[page.0 as usize] = false;
        self.given_back.push(page.0);
    }
    fn store(&mut self, page: Page) {
        self.copy[page.0 as usize] = self.arrived;
    }
    fn open(&mut self, page: Page) {
        self.open[page.0 as usize] = true;
    }
    fn close(&mut self, page: Page) {
        self.open[page.0 as usize] = false;
    }
}

impl NodeDriver {
    pub fn post(&mut self, to: usize, stamp: VectorTime, payload: Payload) {
        let from = self.me;
        self.sent.push(Packet {
            from,
            to,
            stamp,
            payload,
        });
    }

    pub fn allows(&self, page: u32, right: Right) -> bool {
        self.open[page as usize] || self.rights[page as usize] >= right
    }
}
