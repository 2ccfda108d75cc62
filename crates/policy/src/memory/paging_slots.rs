//! Slots of a paging file: places for one page each.
//!
//! A slot is immutable: it is written once after its allocation, and never again while something refers to
//! it. It counts its references. So a page of a guest, a read in flight and a page of a virtual paging disk
//! (Cellular Disco, section 5.3) can stand for the same bytes. Slots of images ([`super::image_slots`]) have
//! other numbers, exist always, and count nothing.

use std::ops::Range;

use super::image_slots::ImageSlots;
use super::slot_bitmap::SlotBitmap;

/// Greatest number of runs of free slots that an allocation compares. A guest with a paging disk decides
/// which slots are free: however they are spread, an allocation takes a few steps.
const RUNS_COMPARED: u32 = 32;

/// References to a slot that only reads in flight may have. A guest can make as many others as are counted,
/// and its pages must be readable then. Two threads read for 16 faults at a time, and the paging disk's
/// thread reads 8 pages.
const READ_REFERENCES: u16 = 64;
const SHARED_MAX: u16 = u16::MAX - READ_REFERENCES;

/// The slots of a paging file. Takes 2 bytes and 1 bit of memory for each slot.
#[derive(Debug)]
pub struct PagingSlots {
    /// References to each slot.
    counts: Vec<u16>,
    /// Slots with references.
    used: SlotBitmap,
    capacity: u32,
    free: u32,
    images: ImageSlots,
}

impl PagingSlots {
    /// Creates `capacity` free slots. Memory is touched when slots are used.
    pub fn new(capacity: u32) -> Self {
        Self {
            counts: vec![0; capacity as usize],
            used: SlotBitmap::new(capacity),
            capacity,
            free: capacity,
            images: ImageSlots::default(),
        }
    }

    /// Adds the slots of images.
    pub fn with_images(self, images: ImageSlots) -> Self {
        Self { images, ..self }
    }

    /// Returns the slots of images.
    pub fn images(&self) -> &ImageSlots {
        &self.images
    }

    /// Returns the number of slots.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns the number of slots without references.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Returns the number of references to a slot.
    pub fn references(&self, slot: u32) -> u16 {
        self.counts.get(slot as usize).copied().unwrap_or(0)
    }

    /// Allocates successive slots with one reference each: the lowest `wanted` free ones that lie side by
    /// side in one of the lowest 32 runs of free slots, else the longest of these runs. Returns none if no
    /// slot is free, or `wanted` is 0.
    ///
    /// Low slots come first, so that a file grows no longer than its use requires.
    pub fn allocate(&mut self, wanted: u32) -> Option<Range<u32>> {
        let wanted = wanted.min(self.free);
        let mut longest = 0..0;
        let mut at = 0;
        for _ in 0..RUNS_COMPARED {
            if longest.len() == wanted as usize {
                break;
            }
            let Some(start) = self.used.next_free(at) else {
                break;
            };
            let run = start..start + self.used.free_run(start, wanted);
            at = run.end;
            if run.len() > longest.len() {
                longest = run;
            }
        }
        for slot in longest.clone() {
            self.counts[slot as usize] = 1;
            self.used.set(slot);
        }
        self.free -= longest.len() as u32;
        (!longest.is_empty()).then_some(longest)
    }

    /// Adds the reference of a page to a slot. Returns whether the slot has it: one without references, or
    /// with 65,471 of them, gets none.
    pub fn share(&mut self, slot: u32) -> bool {
        self.add(slot, SHARED_MAX)
    }

    /// Adds the reference of a read to a slot. Returns whether the slot has it: one without references, or
    /// with 65,535 of them, gets none.
    pub fn share_for_read(&mut self, slot: u32) -> bool {
        self.add(slot, u16::MAX)
    }

    fn add(&mut self, slot: u32, most: u16) -> bool {
        match self.counts.get_mut(slot as usize) {
            None => self.images.place(slot).is_some(),
            Some(count) if (1..most).contains(count) => {
                *count += 1;
                true
            }
            _ => false,
        }
    }

    /// Drops a reference to a slot. Returns whether the slot is free now.
    ///
    /// # Panics
    /// If the slot has no reference: its page could be overwritten while another page refers to it.
    pub fn release(&mut self, slot: u32) -> bool {
        if slot >= self.capacity && self.images.place(slot).is_some() {
            return false;
        }
        let count = &mut self.counts[slot as usize];
        assert!(*count > 0, "slot {slot} is released once too often");
        *count -= 1;
        if *count > 0 {
            return false;
        }
        self.used.clear(slot);
        self.free += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn allocated_slots_are_the_lowest_run_that_is_long_enough() {
        let mut slots = PagingSlots::new(200);
        assert_eq!(slots.allocate(100), Some(0..100));
        for slot in [3, 10, 11, 12, 70, 71] {
            assert!(slots.release(slot));
        }
        assert_eq!(slots.allocate(2), Some(10..12));
        assert_eq!(slots.allocate(2), Some(70..72));
        assert_eq!(slots.allocate(1), Some(3..4));
        assert_eq!(slots.allocate(64), Some(100..164));
        // Of 12 and 164..200 the longer run serves, though it is too short.
        assert_eq!(slots.allocate(50), Some(164..200));
        assert_eq!(slots.allocate(50), Some(12..13));
    }

    #[test]
    fn allocation_among_many_short_runs_takes_one_of_the_lowest() {
        let mut slots = PagingSlots::new(10_000);
        slots.allocate(10_000);
        for slot in (0..8000).step_by(2) {
            slots.release(slot);
        }
        for slot in 9000..9900 {
            slots.release(slot);
        }
        assert_eq!(
            slots.allocate(64),
            Some(0..1),
            "the run of 900 slots is not searched for"
        );
        assert_eq!(slots.allocate(1), Some(2..3));
        for slot in (65..130).step_by(2) {
            slots.release(slot);
        }
        assert_eq!(slots.allocate(64), Some(64..128), "it is among the lowest 32");
    }

    #[test]
    fn full_file_refuses_and_serves_again_once_a_slot_is_free() {
        let mut slots = PagingSlots::new(65);
        assert_eq!(slots.allocate(u32::MAX), Some(0..65));
        assert_eq!((slots.allocate(1), slots.free()), (None, 0));
        assert!(slots.release(64));
        assert_eq!(slots.allocate(8), Some(64..65));
        assert_eq!(PagingSlots::new(0).allocate(1), None);
        assert_eq!(PagingSlots::new(9).allocate(0), None);
    }

    #[test]
    fn slot_is_free_after_its_last_reference() {
        let mut slots = PagingSlots::new(4);
        assert!(!slots.share(0), "a free slot has nothing to share");
        assert!(!slots.share(4), "no such slot");
        let slot = slots.allocate(1).unwrap().start;
        assert!(slots.share(slot));
        assert!(!slots.release(slot));
        assert_eq!(slots.references(slot), 1);
        assert!(slots.release(slot));
        assert_eq!(slots.free(), 4);
        let slot = slots.allocate(1).unwrap().start;
        let shared = (0..=u16::MAX).filter(|_| slots.share(slot)).count();
        assert_eq!(shared, 65_470, "a read still gets a reference");
        let read = (0..=u16::MAX).filter(|_| slots.share_for_read(slot)).count();
        assert_eq!(
            (read, slots.references(slot)),
            (64, u16::MAX),
            "the count does not wrap"
        );
        assert!(!slots.share_for_read(slot + 1), "a free slot has nothing to read");
    }

    #[test]
    fn slot_of_an_image_has_any_number_of_references_and_is_never_free() {
        let mut slots = PagingSlots::new(4).with_images(ImageSlots::new(4, [2]));
        assert_eq!(slots.allocate(9), Some(0..4), "none of an image");
        for slot in [5, 6] {
            for _ in 0..u32::from(u16::MAX) * 2 {
                assert!(slots.share(slot) && slots.share_for_read(slot));
            }
            assert!(!slots.release(slot));
            assert_eq!((slots.free(), slots.references(slot)), (0, 0));
        }
        for slot in [4, 7] {
            assert!(!slots.share(slot), "no slot");
        }
    }

    #[test]
    #[should_panic(expected = "once too often")]
    fn release_of_a_free_slot_is_a_bug() {
        PagingSlots::new(1).release(0);
    }

    proptest! {
        /// Against a map of counts: no slot is given twice, none is lost, and the free ones are counted.
        #[test]
        fn no_slot_is_allocated_twice_or_lost(
            capacity in 0_u32..300,
            steps in prop::collection::vec((0_u8..4, 0_u32..300), 0..200),
        ) {
            let mut slots = PagingSlots::new(capacity);
            let mut model = BTreeMap::<u32, u16>::new();
            for (kind, number) in steps {
                match kind {
                    0 | 1 => match slots.allocate(number % 20) {
                        Some(run) => {
                            prop_assert!(run.len() <= number as usize % 20 && run.end <= capacity);
                            for slot in run {
                                prop_assert_eq!(model.insert(slot, 1), None);
                            }
                        }
                        None => prop_assert!(number % 20 == 0 || model.len() == capacity as usize),
                    },
                    2 => {
                        let shared = slots.share(number);
                        prop_assert_eq!(shared, model.contains_key(&number));
                        model.entry(number).and_modify(|count| *count += 1);
                    }
                    _ if model.contains_key(&number) => {
                        let count = model[&number] - 1;
                        prop_assert_eq!(slots.release(number), count == 0);
                        if count == 0 {
                            model.remove(&number);
                        } else {
                            model.insert(number, count);
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(slots.free(), capacity - model.len() as u32);
                for slot in 0..capacity {
                    prop_assert_eq!(slots.references(slot), model.get(&slot).copied().unwrap_or(0));
                }
            }
        }
    }
}
