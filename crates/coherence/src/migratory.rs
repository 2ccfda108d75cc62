//! Detection of migratory pages: one node reads and then writes a page, then the next node does the same.
//! Granting such a page for writing at the read saves the second request of each node (Cox and Fowler, ISCA
//! '93; Stenström, Brorsson and Sandberg, ISCA '93).
//!
//! The page's manager decides when it orders a request. A page becomes migratory after two successive readers
//! wrote it before another node's request. The manager then no longer sees whether readers write. So it
//! answers one read as a plain read after eight that it answered for writing. A page that nodes only read
//! becomes shared again soon, and so does one whose use alternates.

use crate::state::OptionalNode;
use crate::{NodeId, Want};

/// Successive readers that wrote, until the page is migratory.
const CONFIRMATIONS: u8 = 2;

/// Reads answered for writing before one is answered as a plain read.
const READS_UNSEEN: u8 = 8;

/// State of the detection for one page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Migratory {
    /// Last requester, if its read was answered as a plain read.
    reader: OptionalNode,
    /// Low four bits: successive readers that wrote. High four: reads left to answer for writing.
    counts: u8,
}

impl Migratory {
    pub(crate) const NEW: Self = Self {
        reader: OptionalNode::NONE,
        counts: 0,
    };

    fn set(&mut self, confirmed: u8, left: u8) {
        self.counts = confirmed | left << 4;
    }

    /// Returns whether the next read is answered for writing.
    pub(crate) fn is_confirmed(self) -> bool {
        self.reader.get().is_none() && self.counts >> 4 > 0
    }

    /// Records a request and returns what it is answered as.
    pub(crate) fn record(&mut self, by: NodeId, want: Want) -> Want {
        let (confirmed, left) = (self.counts & 0xf, self.counts >> 4);
        match (want, self.reader.get()) {
            (Want::Read, None) if left > 0 => {
                self.set(confirmed, left - 1);
                return Want::Write;
            }
            (Want::Read, before) => {
                if before.is_some() {
                    self.set(0, 0);
                }
                self.reader = OptionalNode::some(by);
            }
            (Want::Write, Some(reader)) => {
                let confirmed = if reader == by {
                    CONFIRMATIONS.min(confirmed + 1)
                } else {
                    0
                };
                self.set(
                    confirmed,
                    if confirmed == CONFIRMATIONS {
                        READS_UNSEEN
                    } else {
                        0
                    },
                );
                self.reader = OptionalNode::NONE;
            }
            // A write without a read shows nothing about reads.
            (Want::Write, None) => {}
            // The next use of a discarded page is unknown.
            (Want::Discard, _) => *self = Self::NEW,
        }
        want
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Want::{Discard, Read, Write};

    fn answers(requests: &[(u16, Want)]) -> Vec<Want> {
        let mut migratory = Migratory::NEW;
        let answer = |(node, want): &(u16, Want)| migratory.record(NodeId(*node), *want);
        requests.iter().map(answer).collect()
    }

    /// Requests of nodes that each read and then write.
    fn migrations(nodes: impl Iterator<Item = u16>) -> Vec<(u16, Want)> {
        nodes.flat_map(|node| [(node, Read), (node, Write)]).collect()
    }

    #[test]
    fn page_is_migratory_after_two_read_writes_and_every_ninth_read_is_plain() {
        let mut requests = migrations([0, 1].into_iter());
        requests.extend([(0, Read), (1, Read)].repeat(4));
        requests.extend(migrations([2].into_iter()));
        requests.push((0, Read));
        let answers = answers(&requests);
        assert_eq!(answers[..4], [Read, Write, Read, Write]);
        assert_eq!(answers[4..12], [Write; 8]);
        assert_eq!(answers[12..], [Read, Write, Write]);
    }

    #[test]
    fn page_that_is_only_read_stops_being_migratory_until_two_writes() {
        let mut requests = migrations([0, 1].into_iter());
        requests.extend([(0, Read), (1, Read)].repeat(4));
        // The plain read shows that nodes only read.
        requests.extend([(0, Read), (1, Read), (2, Read)]);
        requests.extend(migrations([0].into_iter()));
        requests.extend([(1, Read), (2, Read)]);
        let answers = answers(&requests);
        assert_eq!(answers[12..], [Read, Read, Read, Read, Write, Read, Read]);
    }

    #[test]
    fn discard_resets_the_migratory_state() {
        let mut requests = migrations([0, 1].into_iter());
        requests.extend([(0, Read), (2, Discard), (0, Read), (1, Read)]);
        assert_eq!(answers(&requests)[4..], [Write, Discard, Read, Read]);
    }

    #[test]
    fn producer_consumer_page_never_becomes_migratory() {
        let mut requests = migrations([1].into_iter());
        for _ in 0..10 {
            requests.extend([(0, Write), (1, Read), (2, Read)]);
        }
        let answers = answers(&requests);
        assert_eq!(
            answers,
            requests.iter().map(|(_, want)| *want).collect::<Vec<_>>()
        );
    }
}
