//! The exchange of one node, step by step.

use std::ops::Range;

use super::guest::{WORDS, maps, table};
use crate::merged::{
    Accessed, AtomicPageWords, Batch, Hooks, Level, MergeMessage, MergeOp, Merger, VectorTime,
};
use crate::{Layout, NodeId, Page};

#[derive(Clone, Copy, Debug, PartialEq)]
enum DriverCall {
    Sent(u16, u32, MergeOp),
    Broadcast,
    Take(u32),
    GiveBack(u32),
    Open(u32),
    Close(u32),
}
use DriverCall::*;

/// A driver that records its calls. Of three nodes, node 0 manages pages 0 and 1, node 1 pages 2 and 3, node
/// 2 pages 4 and 5.
struct RecordingDriver {
    memory: [[u64; WORDS]; 6],
    calls: Vec<DriverCall>,
}

const ROOT: u32 = 4;
const MIDDLE: u32 = 5;
const LEAF: u32 = 2;
const CR3: Option<u64> = Some(0x4000);

impl AtomicPageWords for RecordingDriver {
    fn is_ram(&self, page: Page) -> bool {
        page.0 < 6
    }
    fn load(&self, page: Page, word: usize) -> u64 {
        self.memory[page.0 as usize][word]
    }
    fn compare_exchange(&mut self, page: Page, word: usize, _: u64, new: u64) -> Result<(), u64> {
        self.memory[page.0 as usize][word] = new;
        Ok(())
    }
}

impl Hooks for RecordingDriver {
    fn send(&mut self, to: NodeId, message: MergeMessage) {
        self.calls.push(Sent(to.0, message.page.0, message.op));
    }
    fn broadcast(&mut self, _: Batch<'_>) {
        self.calls.push(Broadcast);
    }
    fn take(&mut self, page: Page) {
        self.calls.push(Take(page.0));
    }
    fn give_back(&mut self, page: Page) {
        self.calls.push(GiveBack(page.0));
    }
    fn store(&mut self, _: Page) {}
    fn open(&mut self, page: Page) {
        self.calls.push(Open(page.0));
    }
    fn close(&mut self, page: Page) {
        self.calls.push(Close(page.0));
    }
}

struct Node {
    merger: Merger<WORDS>,
    driver: RecordingDriver,
}

impl Node {
    fn new(me: u16) -> Self {
        Self::with_pinned(me, 0..0)
    }

    fn with_pinned(me: u16, pinned: Range<u32>) -> Self {
        let mut memory = [[0; WORDS]; 6];
        memory[ROOT as usize][0] = table(MIDDLE);
        memory[MIDDLE as usize][0] = table(LEAF);
        let layout = Layout::even(NodeId(me), 3, 6);
        let mut node = Self {
            merger: Merger::new(layout, Level(3), 4, 1, Accessed::Preset, pinned),
            driver: RecordingDriver {
                memory,
                calls: Vec::new(),
            },
        };
        node.merger.loaded(0, CR3, &mut node.driver);
        node
    }

    /// Node 0, with root, middle and leaf merged.
    fn with_tree() -> Self {
        Self::new(0).joined()
    }

    fn joined(self) -> Self {
        let mut node = self;
        for (page, level, manager) in [(ROOT, 3, 2), (MIDDLE, 2, 2), (LEAF, 1, 1)] {
            node.receive(manager, page, 1, MergeOp::Offer(Level(level)));
            node.receive(manager, page, 1, MergeOp::Begin);
            assert!(node.merger.is_merged(Page(page)));
        }
        node.driver.calls.clear();
        node
    }

    /// Node 2, manager of a merged root.
    fn managing(loaded: [bool; 2]) -> Self {
        let mut node = Self::new(2);
        let proposal = node.merger.suspect(Page(ROOT)).expect("a vCPU has it");
        node.merger.propose(proposal, &mut node.driver);
        assert_eq!(node.take_calls(), [Take(ROOT)]);
        node.merger.taken(Page(ROOT), &mut node.driver);
        let offer = MergeOp::Offer(Level(3));
        assert_eq!(node.take_calls(), [Sent(0, ROOT, offer), Sent(1, ROOT, offer)]);
        for (from, is_loaded) in (0..).zip(loaded) {
            assert_eq!(node.take_calls(), [], "all have to accept");
            node.receive(
                from,
                ROOT,
                1,
                MergeOp::Accept {
                    is_loaded,
                    sequence: 1,
                },
            );
        }
        assert_eq!(
            node.take_calls(),
            [
                Sent(0, ROOT, MergeOp::Begin),
                Sent(1, ROOT, MergeOp::Begin),
                Open(ROOT)
            ]
        );
        node
    }

    fn receive(&mut self, from: u16, page: u32, round: u64, op: MergeOp) {
        let (stamp, page) = (VectorTime::default(), Page(page));
        let message = MergeMessage {
            stamp,
            page,
            round,
            op,
        };
        self.merger.receive(NodeId(from), message, &mut self.driver);
    }

    fn take_calls(&mut self) -> Vec<DriverCall> {
        std::mem::take(&mut self.driver.calls)
    }
}

fn loaded(is_loaded: bool, sequence: u64) -> MergeOp {
    MergeOp::Loaded { is_loaded, sequence }
}

#[test]
fn unloaded_root_delays_messages_until_its_manager_replies() {
    let mut node = Node::with_tree();
    node.merger.loaded(0, None, &mut node.driver);
    let ticket = node.merger.collect(&mut node.driver);
    assert!(!node.merger.may_send(ticket));
    assert!(matches!(
        node.take_calls()[..],
        [Sent(2, ROOT, MergeOp::Loaded { is_loaded: false, .. })]
    ));
    node.receive(2, ROOT, 1, MergeOp::Kept);
    assert!(node.merger.may_send(ticket));
}

#[test]
fn root_that_leaves_for_another_reason_is_not_kept() {
    let mut node = Node::with_tree();
    node.driver.memory[ROOT as usize][0] = 0;
    let ticket = node.merger.collect(&mut node.driver);
    node.merger.loaded(0, None, &mut node.driver);
    node.receive(2, ROOT, 1, MergeOp::Kept);
    node.receive(2, MIDDLE, 1, MergeOp::Left);
    node.receive(1, LEAF, 1, MergeOp::Left);
    assert!(!node.merger.may_send(ticket));
    node.receive(2, ROOT, 1, MergeOp::Left);
    assert!(node.merger.may_send(ticket));
}

#[test]
fn tables_below_a_leaving_root_delay_the_same_messages() {
    let mut node = Node::with_tree();
    node.merger.loaded(0, None, &mut node.driver);
    let ticket = node.merger.collect(&mut node.driver);
    node.take_calls();
    node.receive(2, ROOT, 1, MergeOp::Drop);
    let leave = |to, page| Sent(to, page, MergeOp::Leave);
    assert_eq!(
        node.take_calls(),
        [
            Close(ROOT),
            leave(2, MIDDLE),
            leave(1, LEAF),
            Sent(2, ROOT, MergeOp::Dropped)
        ]
    );
    node.receive(2, ROOT, 1, MergeOp::Left);
    assert!(!node.merger.may_send(ticket));
    node.receive(1, LEAF, 1, MergeOp::Left);
    assert!(!node.merger.may_send(ticket));
    assert_eq!(node.take_calls(), [], "not settled");
    node.receive(2, MIDDLE, 1, MergeOp::Left);
    assert!(node.merger.may_send(ticket));
    assert_eq!(node.take_calls(), [Sent(2, ROOT, MergeOp::Settled)]);
}

#[test]
fn page_is_closed_before_its_last_diffs_are_collected() {
    let mut node = Node::with_tree();
    node.driver.memory[LEAF as usize][1] = 0x1000;
    node.receive(1, LEAF, 1, MergeOp::Drop);
    assert_eq!(
        node.take_calls(),
        [
            Close(LEAF),
            Broadcast,
            Sent(1, LEAF, MergeOp::Dropped),
            Sent(1, LEAF, MergeOp::Settled)
        ]
    );
}

#[test]
fn message_of_an_old_round_opens_nothing() {
    let mut node = Node::new(0);
    node.receive(2, ROOT, 2, MergeOp::Offer(Level(3)));
    node.receive(2, ROOT, 1, MergeOp::Begin);
    node.receive(2, ROOT, 1, MergeOp::Drop);
    assert!(!node.merger.is_merged(Page(ROOT)));
    node.receive(2, ROOT, 2, MergeOp::Begin);
    assert!(node.merger.is_merged(Page(ROOT)));
}

#[test]
fn page_without_a_merged_parent_is_refused() {
    let mut node = Node::new(0);
    node.receive(2, MIDDLE, 1, MergeOp::Offer(Level(2)));
    assert_eq!(node.take_calls(), [Sent(2, MIDDLE, MergeOp::Refuse)]);
}

#[test]
fn page_that_is_not_open_yields_no_diffs() {
    let mut node = Node::new(0);
    node.receive(2, ROOT, 1, MergeOp::Offer(Level(3)));
    node.take_calls();
    // The manager has withdrawn the page, which holds data before Withdraw is received.
    node.driver.memory[ROOT as usize][1] = maps(7);
    node.merger.collect(&mut node.driver);
    assert_eq!(node.take_calls(), []);
    assert_eq!(node.driver.memory[ROOT as usize][1], maps(7));
    node.receive(2, ROOT, 1, MergeOp::Withdraw);
    assert_eq!(node.take_calls(), []);
}

#[test]
fn page_below_a_leaving_table_is_refused() {
    let mut node = Node::with_tree();
    node.receive(1, LEAF, 1, MergeOp::Drop);
    node.receive(1, LEAF, 1, MergeOp::Left);
    node.driver.memory[ROOT as usize][0] = table(1);
    node.merger.collect(&mut node.driver);
    assert!(
        node.take_calls()
            .ends_with(&[Broadcast, Sent(2, MIDDLE, MergeOp::Leave)])
    );
    assert_eq!(node.merger.suspect(Page(LEAF)), None);
    node.receive(1, LEAF, 2, MergeOp::Offer(Level(1)));
    assert_eq!(node.take_calls(), [Sent(1, LEAF, MergeOp::Refuse)]);
}

#[test]
fn manager_closes_its_copy_and_returns_it_when_all_have_settled() {
    let mut node = Node::managing([true, false]);
    node.receive(0, ROOT, 1, MergeOp::Leave);
    assert_eq!(
        node.take_calls(),
        [
            Sent(0, ROOT, MergeOp::Drop),
            Sent(1, ROOT, MergeOp::Drop),
            Close(ROOT)
        ]
    );
    node.receive(0, ROOT, 1, MergeOp::Dropped);
    node.receive(0, ROOT, 1, MergeOp::Settled);
    assert_eq!(node.take_calls(), []);
    node.receive(1, ROOT, 1, MergeOp::Dropped);
    assert_eq!(
        node.take_calls(),
        [Sent(0, ROOT, MergeOp::Left), Sent(1, ROOT, MergeOp::Left)]
    );
    node.receive(1, ROOT, 1, MergeOp::Settled);
    assert_eq!(node.take_calls(), [GiveBack(ROOT)]);
    // A node that asked meanwhile receives Left.
    node.receive(1, ROOT, 1, MergeOp::Leave);
    assert_eq!(node.take_calls(), [Sent(1, ROOT, MergeOp::Left)]);
}

#[test]
fn root_leaves_when_the_last_cpu_unloads_it() {
    let mut node = Node::managing([true, false]);
    node.receive(0, ROOT, 1, loaded(false, 5));
    assert_eq!(
        node.take_calls(),
        [Sent(0, ROOT, MergeOp::Kept)],
        "the manager has it"
    );
    node.receive(0, ROOT, 1, loaded(true, 4));
    node.merger.loaded(0, None, &mut node.driver);
    assert_eq!(
        node.take_calls()[..2],
        [Sent(0, ROOT, MergeOp::Drop), Sent(1, ROOT, MergeOp::Drop)]
    );
}

#[test]
fn root_that_all_cpus_unload_before_it_begins_is_withdrawn() {
    let mut node = Node::new(2);
    let proposal = node.merger.suspect(Page(ROOT)).expect("a vCPU has it");
    node.merger.propose(proposal, &mut node.driver);
    node.merger.taken(Page(ROOT), &mut node.driver);
    node.merger.loaded(0, None, &mut node.driver);
    node.receive(
        0,
        ROOT,
        1,
        MergeOp::Accept {
            is_loaded: true,
            sequence: 1,
        },
    );
    node.take_calls();
    node.receive(0, ROOT, 1, loaded(false, 2));
    assert_eq!(
        node.take_calls(),
        [Sent(0, ROOT, MergeOp::Kept)],
        "it need not wait for the votes"
    );
    node.receive(
        1,
        ROOT,
        1,
        MergeOp::Accept {
            is_loaded: false,
            sequence: 1,
        },
    );
    let withdrawn = [
        Sent(0, ROOT, MergeOp::Withdraw),
        Sent(1, ROOT, MergeOp::Withdraw),
        GiveBack(ROOT),
    ];
    assert_eq!(node.take_calls(), withdrawn);
    assert!(!node.merger.is_merged(Page(ROOT)));
}

#[test]
fn pinned_root_stays_unloaded_and_leaves_when_it_loses_an_entry() {
    let mut node = Node::with_pinned(0, ROOT..ROOT + 1).joined();
    node.merger.loaded(0, None, &mut node.driver);
    let ticket = node.merger.collect(&mut node.driver);
    assert!(node.merger.may_send(ticket));
    assert_eq!(node.take_calls(), []);
    node.driver.memory[ROOT as usize][0] = 0;
    let ticket = node.merger.collect(&mut node.driver);
    assert!(!node.merger.may_send(ticket));
    assert_eq!(node.take_calls()[..2], [Broadcast, Sent(2, ROOT, MergeOp::Leave)]);
}

#[test]
fn last_pinned_root_is_proposed_for_any_hot_page() {
    const CHILD: Page = Page(LEAF);
    let mut node = Node::with_pinned(0, ROOT..ROOT + 1);
    node.merger.last_pinned(CR3.unwrap_or_default());
    node.merger.last_pinned(5 << 12);
    // Another root, which points to the same tables and is never hot.
    node.merger.loaded(0, Some(4 << 12), &mut node.driver);
    let (page, level) = (Page(ROOT), Level(3));
    assert_eq!(
        node.merger.suspect(CHILD),
        Some(super::super::Proposal { page, level })
    );
    let mut joined = node.joined();
    assert_eq!(joined.merger.suspect(Page(5)), None);
    assert!(joined.merger.is_merged(CHILD));
    joined.driver.calls.clear();
    assert_eq!(Node::new(0).merger.suspect(CHILD), None);
}

#[test]
fn pinned_root_that_all_cpus_unload_before_it_begins_still_begins() {
    let mut node = Node::with_pinned(2, ROOT..ROOT + 1);
    let proposal = node.merger.suspect(Page(ROOT)).expect("a vCPU has it");
    node.merger.propose(proposal, &mut node.driver);
    node.merger.loaded(0, None, &mut node.driver);
    node.merger.taken(Page(ROOT), &mut node.driver);
    for from in 0..2 {
        let (is_loaded, sequence) = (false, 1);
        node.receive(from, ROOT, 1, MergeOp::Accept { is_loaded, sequence });
    }
    let begun = [
        Sent(0, ROOT, MergeOp::Begin),
        Sent(1, ROOT, MergeOp::Begin),
        Open(ROOT),
    ];
    assert!(node.take_calls().ends_with(&begun));
}

#[test]
fn diffs_of_the_manager_precede_its_offer() {
    let mut node = Node::managing([true, true]);
    node.merger.propose(
        node.merger.suspect(Page(MIDDLE)).expect("below the root"),
        &mut node.driver,
    );
    node.driver.memory[ROOT as usize][1] = table(LEAF);
    node.merger.taken(Page(MIDDLE), &mut node.driver);
    let offer = MergeOp::Offer(Level(2));
    let expected = [
        Take(MIDDLE),
        Broadcast,
        Sent(0, MIDDLE, offer),
        Sent(1, MIDDLE, offer),
    ];
    assert_eq!(node.take_calls(), expected);
}

#[test]
fn batches_are_applied_in_causal_order() {
    let stamp = |counts: [u64; 3]| VectorTime::decode(&counts.map(u64::to_le_bytes).concat()).expect("three");
    let here = stamp([4, 2, 0]);
    let awaits = |from, batch| here.awaits(NodeId(from), &stamp(batch));
    assert!(awaits(1, [4, 3, 0]) && awaits(1, [1, 3, 0]));
    assert!(!awaits(1, [4, 4, 0]), "one before it is to come");
    assert!(!awaits(1, [4, 2, 0]), "it has been");
    assert!(
        !awaits(1, [5, 3, 0]),
        "what its source had from node 0 is to come"
    );
    assert!(here.covers(&stamp([4, 0, 0])) && !here.covers(&stamp([4, 0, 1])));
}
