//! Which pages migrate: a node reads one and then writes it, then the next node does. Given for writing at the read, such a page
//! saves the second request of each (Cox and Fowler, ISCA '93; Stenström, Brorsson and Sandberg, ISCA '93).
//!
//! The page's manager decides, as it sees each request. A page is taken for migratory after two readers in a row that wrote
//! before anybody else asked. While it is, nobody sees whether readers still write; so after eight reads one is answered as
//! any read, to see. A page that nodes only read is soon shared again, and one whose use changes back and forth is shared.

use crate::state::OptionalNode;
use crate::{NodeId, Want};

/// Readers in a row that wrote, until the page is taken for migratory.
const CONFIRMATIONS: u8 = 2;

/// Reads that are answered for writing before the next one shows whether it still is.
const READS_UNSEEN: u8 = 8;

/// What the requests for one page have shown.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Migratory {
    /// Who asked last, if for reading and answered so.
    reader: OptionalNode,
    /// Readers in a row that wrote: low four bits. Reads left to answer for writing: high four.
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

    /// Whether the next read is answered for writing.
    pub(crate) fn is_confirmed(self) -> bool {
        self.reader.get().is_none() && self.counts >> 4 > 0
    }

    /// A request comes: what it is to be answered as.
    pub(crate) fn asked(&mut self, by: NodeId, want: Want) -> Want {
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
            // It moves by writes, which says nothing of reads.
            (Want::Write, None) => {}
            // What it is used for next, nobody knows.
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
        let answer = |(node, want): &(u16, Want)| migratory.asked(NodeId(*node), *want);
        requests.iter().map(answer).collect()
    }

    /// Node `n` reads and writes, for each of them.
    fn migrations(nodes: impl Iterator<Item = u16>) -> Vec<(u16, Want)> {
        nodes.flat_map(|node| [(node, Read), (node, Write)]).collect()
    }

    #[test]
    fn after_two_that_read_and_wrote_reads_are_answered_for_writing_and_every_ninth_as_a_read() {
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
    fn a_page_that_is_only_read_then_is_shared_until_two_have_written_again() {
        let mut requests = migrations([0, 1].into_iter());
        requests.extend([(0, Read), (1, Read)].repeat(4));
        // Seen: it is read, and nobody writes.
        requests.extend([(0, Read), (1, Read), (2, Read)]);
        requests.extend(migrations([0].into_iter()));
        requests.extend([(1, Read), (2, Read)]);
        let answers = answers(&requests);
        assert_eq!(answers[12..], [Read, Read, Read, Read, Write, Read, Read]);
    }

    #[test]
    fn of_a_page_that_was_discarded_nothing_is_known() {
        let mut requests = migrations([0, 1].into_iter());
        requests.extend([(0, Read), (2, Discard), (0, Read), (1, Read)]);
        assert_eq!(answers(&requests)[4..], [Write, Discard, Read, Read]);
    }

    #[test]
    fn a_page_written_by_one_and_read_by_others_is_never_given_for_writing() {
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
