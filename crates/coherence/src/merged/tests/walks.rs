//! Walks over the memory of guests that mean well and of others.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::Page;
use crate::merged::{Entry, Level, Tables, Unclear, Words};

const RAM: u32 = 32;

/// Few entries, each a place of a table with 512.
#[derive(Clone, Debug, Default)]
struct Sparse {
    words: BTreeMap<(u32, usize), u64>,
    elsewhere: BTreeSet<u32>,
}

impl Words for Sparse {
    fn is_ram(&self, page: Page) -> bool {
        page.0 < RAM
    }
    fn is_here(&self, page: Page) -> bool {
        self.is_ram(page) && !self.elsewhere.contains(&page.0)
    }
    fn load(&self, page: Page, word: usize) -> u64 {
        self.words.get(&(page.0, word)).copied().unwrap_or(0)
    }
    fn compare_exchange(&mut self, _: Page, _: usize, _: u64, _: u64) -> Result<(), u64> {
        unreachable!("walks write nothing")
    }
}

/// The definition: each way down from each CR3, level by level. Tables with their levels, and who leads to them.
fn naive(memory: &Sparse, cr3s: &[u64], top: u8) -> BTreeMap<u32, (u8, BTreeSet<u32>)> {
    let mut found: BTreeMap<u32, (u8, BTreeSet<u32>)> = BTreeMap::new();
    let mut tables: BTreeSet<u32> = BTreeSet::new();
    for cr3 in cr3s {
        let root = (cr3 & 0x000f_ffff_ffff_f000) >> 12;
        if root < u64::from(RAM) {
            tables.insert(u32::try_from(root).unwrap());
        }
    }
    for table in &tables {
        found.entry(*table).or_default().0 |= 1 << top;
    }
    for level in (2..=top).rev() {
        let mut next = BTreeSet::new();
        for ((page, _), word) in &memory.words {
            let is_large = word & 0x80 != 0;
            let frame = (word & 0x000f_ffff_ffff_f000) >> 12;
            // A large page on levels 2 and 3, a reserved bit above.
            if tables.contains(page) && word & 1 != 0 && !is_large && frame < u64::from(RAM) {
                let frame = u32::try_from(frame).unwrap();
                next.insert(frame);
                let one = found.entry(frame).or_default();
                one.0 |= 1 << (level - 1);
                one.1.insert(*page);
            }
        }
        tables = next;
    }
    found
}

fn memory() -> impl Strategy<Value = Sparse> {
    // Mostly entries that lead to RAM; some large, absent, out of RAM or plain rubbish.
    let entry = prop_oneof![
        6 => (0..RAM + 4).prop_map(|page| u64::from(page) << 12 | 0x63 | 1 << 63),
        1 => (0..RAM).prop_map(|page| u64::from(page) << 12 | 0xe3),
        1 => (0..RAM).prop_map(|page| u64::from(page) << 12 | 0x62),
        1 => any::<u64>(),
    ];
    prop::collection::btree_map((0..RAM, 0_usize..512), entry, 0..60).prop_map(|words| Sparse {
        words,
        elsewhere: BTreeSet::new(),
    })
}

proptest! {
    #[test]
    fn a_walk_finds_the_tables_of_any_memory(
        memory in memory(),
        cr3s in prop::collection::vec((0..RAM + 2, 0_u64..4096, any::<bool>()), 0..4),
        five in any::<bool>(),
    ) {
        let cr3s: Vec<u64> = cr3s
            .iter()
            .map(|(page, low, flush)| u64::from(*page) << 12 | low | u64::from(*flush) << 63)
            .collect();
        let expected = naive(&memory, &cr3s, if five { 5 } else { 4 });
        let mut tables = Tables::new(RAM as usize, five);
        prop_assert_eq!(tables.walk(&cr3s, &memory), Ok(()));
        let pages: BTreeSet<u32> = tables.pages().iter().map(|page| page.0).collect();
        prop_assert_eq!(pages, expected.keys().copied().collect::<BTreeSet<u32>>());
        for page in 0..RAM {
            let (levels, parents) = expected.get(&page).cloned().unwrap_or_default();
            prop_assert_eq!(tables.levels(Page(page)), levels);
            let found = tables.suspect(Page(page), &cr3s, &memory).unwrap();
            prop_assert_eq!(found.is_some(), levels != 0);
            if let Some(found) = found {
                prop_assert_eq!(found.levels, levels);
                let named: BTreeSet<u32> = found.parents.iter().flatten().map(|page| page.0).collect();
                prop_assert!(named.is_subset(&parents));
                prop_assert_eq!(named.len(), parents.len().min(4));
            }
        }
    }

    #[test]
    fn a_walk_without_room_says_so_and_the_next_is_right(memory in memory(), room in 1_usize..4) {
        let expected = naive(&memory, &[0], 4);
        let mut tables = Tables::new(room, false);
        let result = tables.walk(&[0], &memory);
        prop_assert_eq!(result.is_err(), expected.len() > room);
        prop_assert!(tables.pages().len() <= room);
        // What the last walk left is no matter.
        prop_assert_eq!(tables.walk(&[], &memory), Ok(()));
        prop_assert!((0..RAM).all(|page| tables.levels(Page(page)) == 0));
    }
}

#[test]
fn a_table_that_maps_itself_has_several_levels_and_ends_the_walk() {
    let mut memory = Sparse::default();
    memory.words.insert((1, 0x1ed), 1 << 12 | 0x63);
    let mut tables = Tables::new(8, false);
    let found = tables.suspect(Page(1), &[0x1000], &memory).unwrap().unwrap();
    assert_eq!(found.levels, 0b11110);
    assert_eq!(found.level(), None);
    memory.words.insert((1, 0), 2 << 12 | 0x63);
    let found = tables.suspect(Page(3), &[0x1000], &memory).unwrap();
    assert_eq!(found, None);
}

#[test]
fn a_level_that_is_the_only_one_is_told() {
    let mut memory = Sparse::default();
    memory.words.insert((1, 3), 2 << 12 | Entry::PRESENT);
    let mut tables = Tables::new(8, false);
    let found = tables.suspect(Page(2), &[0x1000], &memory).unwrap().unwrap();
    assert_eq!((found.level(), found.parents[0]), (Some(Level(3)), Some(Page(1))));
}

#[test]
fn a_table_on_another_node_leaves_the_walk_unclear() {
    let mut memory = Sparse::default();
    memory.words.insert((1, 0), 2 << 12 | Entry::PRESENT);
    memory.words.insert((1, 1), 3 << 12 | Entry::PRESENT);
    memory.elsewhere.insert(2);
    let mut tables = Tables::new(8, false);
    assert_eq!(tables.walk(&[0x1000], &memory), Err(Unclear::Elsewhere(Page(2))));
    assert_eq!(tables.levels(Page(3)), 1 << 3, "what could be seen");
}
