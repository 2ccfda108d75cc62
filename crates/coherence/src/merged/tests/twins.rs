//! Twins of one node, with memory that changes at the worst moment.

use std::cell::Cell;

use proptest::prelude::*;

use super::guest::{maps, table};
use crate::Page;
use crate::merged::twins::Twins;
use crate::merged::{Accessed, AtomicPageWords, Diff, Entry, Level};

const TOP: Level = Level(4);

/// Four pages of four words. `stroke`: after that many more reads the guest writes this word.
#[derive(Default)]
struct Small {
    words: Cell<[[u64; 4]; 4]>,
    stroke: Cell<Option<(u32, usize, usize, u64)>>,
}

impl Small {
    fn set(&self, page: usize, word: usize, value: u64) {
        let mut words = self.words.get();
        words[page][word] = value;
        self.words.set(words);
    }
    fn get(&self, page: usize, word: usize) -> u64 {
        self.words.get()[page][word]
    }
}

impl AtomicPageWords for Small {
    fn is_ram(&self, page: Page) -> bool {
        page.0 < 4
    }
    fn load(&self, page: Page, word: usize) -> u64 {
        let found = self.get(page.0 as usize, word);
        match self.stroke.take() {
            Some((0, page, word, value)) => self.set(page, word, value),
            Some((reads, page, word, value)) => self.stroke.set(Some((reads - 1, page, word, value))),
            None => {}
        }
        found
    }
    fn compare_exchange(&mut self, page: Page, word: usize, current: u64, new: u64) -> Result<(), u64> {
        let found = self.get(page.0 as usize, word);
        if found != current {
            return Err(found);
        }
        self.set(page.0 as usize, word, new);
        Ok(())
    }
}

/// Joins and begins a page.
fn open(twins: &mut Twins<4>, page: Page, level: Level, round: u64, memory: &mut Small) {
    twins.insert(page, level, round, memory);
    twins.set_open(page);
}

fn collect(twins: &mut Twins<4>, memory: &mut Small) -> Vec<Diff> {
    let mut diffs = Vec::new();
    for at in 0..twins.len() {
        twins.collect(at, memory, &mut diffs);
    }
    diffs
}

fn leaf_table(memory: &mut Small) -> Twins<4> {
    let mut twins = Twins::new(4, TOP, Accessed::Preset);
    open(&mut twins, Page(1), Level(1), 1, memory);
    twins
}

#[test]
fn entry_cleared_while_it_is_preset_stays_clear() {
    let mut memory = Small::default();
    let mut twins = leaf_table(&mut memory);
    memory.set(1, 0, maps(7));
    // The guest swaps the page out between the monitor's read, from which the mark is made, and the
    // compare-and-exchange.
    let swapped = 0x1234_0000;
    memory.stroke.set(Some((1, 1, 0, swapped)));
    let mut diffs = Vec::new();
    twins.collect(0, &mut memory, &mut diffs);
    assert_eq!(memory.get(1, 0), swapped);
    assert_eq!(
        diffs,
        [Diff {
            page: Page(1),
            word: 0,
            old: 0,
            new: swapped
        }]
    );
}

#[test]
fn entry_made_read_only_while_it_is_preset_does_not_become_dirty() {
    let mut memory = Small::default();
    let mut twins = leaf_table(&mut memory);
    let read_only = maps(7) & !Entry::WRITABLE;
    let mut diffs = Vec::new();
    memory.set(1, 0, maps(7));
    memory.stroke.set(Some((1, 1, 0, read_only)));
    twins.collect(0, &mut memory, &mut diffs);
    assert_eq!(memory.get(1, 0), read_only | Entry::ACCESSED);
}

#[test]
fn bits_are_preset_locally_before_the_entry_is_sent() {
    let mut memory = Small::default();
    let mut twins = leaf_table(&mut memory);
    memory.set(1, 2, maps(7));
    let diffs = collect(&mut twins, &mut memory);
    let marked = maps(7) | Entry::ACCESSED | Entry::DIRTY;
    assert_eq!(memory.get(1, 2), marked);
    assert_eq!(
        diffs,
        [Diff {
            page: Page(1),
            word: 2,
            old: 0,
            new: marked
        }]
    );
    // A guest that clears the bits makes no diff and no clean page.
    memory.set(1, 2, maps(7));
    assert_eq!(collect(&mut twins, &mut memory), []);
    assert_eq!(memory.get(1, 2), marked);
}

#[test]
fn pages_age_where_the_accessed_bit_is_sent() {
    let mut memory = Small::default();
    let mut twins = Twins::<4>::new(4, TOP, Accessed::Sent);
    open(&mut twins, Page(1), Level(1), 1, &mut memory);
    memory.set(1, 2, maps(7));
    let dirty = maps(7) | Entry::DIRTY;
    assert_eq!(
        collect(&mut twins, &mut memory),
        [Diff {
            page: Page(1),
            word: 2,
            old: 0,
            new: dirty
        }]
    );
    memory.set(1, 2, dirty | Entry::ACCESSED);
    let used = Diff {
        page: Page(1),
        word: 2,
        old: dirty,
        new: dirty | Entry::ACCESSED,
    };
    assert_eq!(collect(&mut twins, &mut memory), [used]);
    memory.set(1, 2, dirty);
    assert_eq!(collect(&mut twins, &mut memory).len(), 1, "idle");
}

#[test]
fn local_change_stays_a_diff_after_a_remote_one() {
    let mut memory = Small::default();
    let mut twins = leaf_table(&mut memory);
    memory.set(1, 0, 0x1000);
    twins.apply(
        &Diff {
            page: Page(1),
            word: 1,
            old: 0,
            new: 0x2000,
        },
        &mut memory,
    );
    assert_eq!((memory.get(1, 0), memory.get(1, 1)), (0x1000, 0x2000));
    assert_eq!(
        collect(&mut twins, &mut memory),
        [Diff {
            page: Page(1),
            word: 0,
            old: 0,
            new: 0x1000
        }]
    );
    assert_eq!(twins.merges.conflicts, 0);
    // Both nodes change one word.
    memory.set(1, 3, 0x4000);
    twins.apply(
        &Diff {
            page: Page(1),
            word: 3,
            old: 0,
            new: 0x3000,
        },
        &mut memory,
    );
    assert_eq!((memory.get(1, 3), twins.merges.conflicts), (0x3000, 1));
}

#[test]
fn table_is_detached_with_its_last_link() {
    let mut memory = Small::default();
    memory.set(0, 0, table(1));
    memory.set(0, 1, table(1));
    let mut twins = Twins::<4>::new(4, TOP, Accessed::Preset);
    open(&mut twins, Page(1), Level(3), 2, &mut memory);
    assert_eq!(twins.links(Page(1), Level(3)), 0);
    open(&mut twins, Page(0), TOP, 1, &mut memory);
    assert_eq!(twins.next_detached(), None, "the root was counted when it came");
    memory.set(0, 0, table(2));
    collect(&mut twins, &mut memory);
    assert_eq!(twins.next_detached(), None);
    twins.apply(
        &Diff {
            page: Page(0),
            word: 1,
            old: table(1),
            new: table(2),
        },
        &mut memory,
    );
    assert_eq!(twins.next_detached(), Some((Page(1), 2)));
    assert_eq!(twins.next_detached(), None, "told once");
}

#[test]
fn tree_is_detached_from_its_top_down_at_once() {
    let mut memory = Small::default();
    memory.set(0, 0, table(1));
    memory.set(1, 0, table(2));
    memory.set(2, 0, table(3));
    let mut twins = Twins::<4>::new(4, TOP, Accessed::Preset);
    for (page, level) in [(3, 1), (2, 2), (1, 3), (0, 4)] {
        open(&mut twins, Page(page), Level(level), 1, &mut memory);
    }
    assert_eq!(twins.next_detached(), None);
    memory.set(0, 0, table(2));
    assert_eq!(collect(&mut twins, &mut memory).len(), 1);
    let loose: Vec<u32> = std::iter::from_fn(|| twins.next_detached())
        .map(|(page, _)| page.0)
        .collect();
    assert_eq!(loose, [1, 2, 3]);
}

#[test]
fn page_with_an_impossible_entry_is_detached() {
    let stray = [table(99), table(1) | Entry::LARGE, u64::MAX];
    for entry in stray {
        let mut memory = Small::default();
        let mut twins = Twins::<4>::new(4, TOP, Accessed::Preset);
        open(&mut twins, Page(0), TOP, 1, &mut memory);
        memory.set(0, 0, entry);
        collect(&mut twins, &mut memory);
        assert_eq!(twins.next_detached(), Some((Page(0), 1)), "{entry:#x}");
    }
    // A root that loses an entry is about to leave.
    let mut memory = Small::default();
    memory.set(0, 0, table(1));
    let mut twins = Twins::<4>::new(4, TOP, Accessed::Preset);
    open(&mut twins, Page(0), TOP, 1, &mut memory);
    memory.set(0, 0, 0);
    collect(&mut twins, &mut memory);
    assert_eq!(twins.next_detached(), Some((Page(0), 1)));
}

proptest! {
    /// Two nodes that write different words and exchange diffs at any time end with the same words.
    #[test]
    fn nodes_that_write_different_words_converge(
        writes in prop::collection::vec((0_usize..2, 0_usize..2, 0_u64..5, any::<bool>()), 0..40)
    ) {
        let mut memory = [Small::default(), Small::default()];
        let mut twins = memory.each_mut().map(leaf_table);
        let exchange = |twins: &mut [Twins<4>; 2], memory: &mut [Small; 2]| {
            for from in 0..2 {
                let diffs = collect(&mut twins[from], &mut memory[from]);
                diffs.iter().for_each(|diff| twins[1 - from].apply(diff, &mut memory[1 - from]));
            }
        };
        for (node, word, frame, is_exchanged) in writes {
            memory[node].set(1, node * 2 + word, if frame == 0 { 0 } else { maps(frame) });
            if is_exchanged {
                exchange(&mut twins, &mut memory);
            }
        }
        exchange(&mut twins, &mut memory);
        prop_assert_eq!(memory[0].words.get(), memory[1].words.get());
        prop_assert_eq!(twins[0].merges.conflicts + twins[1].merges.conflicts, 0);
        let mut sides = twins.iter_mut().zip(&mut memory);
        prop_assert!(sides.all(|(twins, memory)| collect(twins, memory).is_empty()));
    }
}
