//! Presetting and merging of entries.

use proptest::prelude::*;

use crate::Page;
use crate::merged::entry::root;
use crate::merged::{Entry, Level};

const PRESENT: u64 = Entry::PRESENT;
const WRITABLE: u64 = Entry::WRITABLE;
const ACCESSED: u64 = Entry::ACCESSED;
const DIRTY: u64 = Entry::DIRTY;

#[test]
fn only_the_frame_bits_of_a_cr3_name_the_root() {
    assert_eq!(root(0x8000_0000_1234_5abc), Some(Page(0x12345)));
    assert_eq!(root(0x6000_0000_0000_0fff), Some(Page(0)));
    assert_eq!(
        root(0x0010_0000_0000_0000 - 1),
        None,
        "more than a guest can have"
    );
}

#[test]
fn only_writable_leaf_entries_are_preset_dirty() {
    let preset = |entry, level| Entry(entry).preset(Level(level)).0;
    assert_eq!(
        preset(PRESENT | WRITABLE, 1),
        PRESENT | WRITABLE | ACCESSED | DIRTY
    );
    assert_eq!(
        preset(PRESENT, 1),
        PRESENT | ACCESSED,
        "read-only and dirty is a shadow stack"
    );
    assert_eq!(
        preset(PRESENT | WRITABLE, 2),
        PRESENT | WRITABLE | ACCESSED,
        "a table"
    );
    let large = PRESENT | WRITABLE | Entry::LARGE;
    assert_eq!(preset(large, 3), large | ACCESSED | DIRTY);
    assert_eq!(
        preset(WRITABLE | 0xabc000, 1),
        WRITABLE | 0xabc000,
        "not present: the guest's own"
    );
}

#[test]
fn large_page_bit_has_its_own_meaning_on_each_level() {
    let entry = Entry(PRESENT | Entry::LARGE | 0x5000);
    assert!(entry.is_leaf(Level(1)) && entry.is_leaf(Level(2)) && entry.is_leaf(Level(3)));
    assert!(!entry.is_leaf(Level(4)) && entry.is_misplaced(Level(4)) && entry.is_misplaced(Level(5)));
    assert_eq!(entry.table(Level(4)), None);
    assert_eq!(Entry(PRESENT | 0x5000).table(Level(4)), Some(crate::Page(5)));
    assert_eq!(
        Entry(PRESENT | 0xf_ffff_ffff_f000).table(Level(4)),
        None,
        "no page has that number"
    );
}

/// Few values, so that all relations between three of them occur.
fn entry() -> impl Strategy<Value = Entry> {
    (0_u64..3, any::<bool>(), 0_u64..4).prop_map(|(frame, is_present, marks)| {
        let marks = [0, ACCESSED, DIRTY, ACCESSED | DIRTY][usize::try_from(marks).unwrap()];
        Entry(frame << 12 | u64::from(is_present) | if is_present { marks } else { 0 })
    })
}

proptest! {
    #[test]
    fn change_of_one_node_reaches_the_other(old in entry(), new in entry()) {
        prop_assert_eq!(Entry::merge(old, new, old), (new, false));
    }

    #[test]
    fn conflicting_changes_converge_on_both_nodes(old in entry(), one in entry(), two in entry()) {
        let (here, is_counted) = Entry::merge(old, two, one);
        let (there, is_counted_there) = Entry::merge(old, one, two);
        // The hardware's marks may be cleared on one side and set on the other: each keeps its own.
        let marks = Entry::ACCESSED | Entry::DIRTY;
        prop_assert_eq!(here.0 & !marks, there.0 & !marks);
        prop_assert_eq!(is_counted, is_counted_there);
    }

    #[test]
    fn of_three_changes_the_same_wins_in_every_order(a in 1_u64..9, b in 1_u64..9, c in 1_u64..9) {
        let [a, b, c] = [a, b, c].map(|frame| Entry(frame << 12 | frame & 1));
        let old = Entry(0);
        let after = |first, second, third| {
            let (two, _) = Entry::merge(old, second, first);
            Entry::merge(old, third, two).0
        };
        prop_assert_eq!(after(a, b, c), after(c, b, a));
        prop_assert_eq!(after(a, b, c), after(b, c, a));
    }

    #[test]
    fn accessed_and_dirty_bits_never_conflict(old in entry(), new in entry()) {
        prop_assume!(old.is_present());
        let (result, is_counted) = Entry::merge(old, new, Entry(old.0 | DIRTY | ACCESSED));
        prop_assert!(!is_counted);
        prop_assert_eq!(result.0 & !(DIRTY | ACCESSED), new.0 & !(DIRTY | ACCESSED));
    }
}
