//! Slots that are pages of images.
//!
//! A page of a guest that a disk has filled from an image needs no place in the paging file: the image has
//! it, and is never written. Such a page of an image is a slot as well, with a number above those of the
//! paging file. Pages that lie side by side in an image have successive numbers, so a read brings neighbours
//! as from the paging file. A slot of an image is never allocated, written or free, and counts no references.

use std::ops::Range;

/// Numbers of the images' slots.
#[derive(Clone, Debug, Default)]
pub struct ImageSlots {
    /// The slots of each image. A number that is no slot lies before each, so that no read crosses over.
    images: Vec<Range<u32>>,
}

impl ImageSlots {
    /// Numbers the pages of images, whose lengths are `pages`, above `file_slots` slots of a paging file. The
    /// end of an image for which no numbers are left has no slots.
    pub fn new(file_slots: u32, pages: impl IntoIterator<Item = u64>) -> Self {
        let mut end = file_slots;
        let images = pages.into_iter().map(|pages| {
            let start = end.saturating_add(1);
            // The greatest number is none: tables of slots keep a number plus one.
            let room = u32::MAX - start;
            end = start + u32::try_from(pages).unwrap_or(u32::MAX).min(room);
            start..end
        });
        Self {
            images: images.collect(),
        }
    }

    /// Returns the slot of a page of an image, if it has one.
    pub fn slot(&self, image: usize, page: u64) -> Option<u32> {
        let slots = self.images.get(image)?;
        let page = u32::try_from(page).ok()?;
        (page < slots.end - slots.start).then(|| slots.start + page)
    }

    /// Returns the image and the page of a slot; none for one of the paging file.
    pub fn place(&self, slot: u32) -> Option<(usize, u64)> {
        let image = self.images.iter().position(|slots| slots.contains(&slot))?;
        Some((image, u64::from(slot - self.images[image].start)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_of_images_lie_above_those_of_the_file_with_a_gap_before_each() {
        let slots = ImageSlots::new(10, [3, 0, 2]);
        let of = |image| (0..4).map(|page| slots.slot(image, page)).collect::<Vec<_>>();
        assert_eq!(of(0), [Some(11), Some(12), Some(13), None]);
        assert_eq!(of(1), [None; 4]);
        assert_eq!(of(2), [Some(16), Some(17), None, None]);
        assert_eq!(of(3), [None; 4], "no such image");
        for slot in [0, 10, 14, 15, 18, u32::MAX] {
            assert_eq!(slots.place(slot), None, "{slot}");
        }
        assert_eq!(slots.place(17), Some((2, 1)));
    }

    #[test]
    fn image_beyond_the_last_number_has_slots_for_its_front_only() {
        let slots = ImageSlots::new(u32::MAX - 4, [1 << 40, 1]);
        assert_eq!(slots.slot(0, 2), Some(u32::MAX - 1));
        assert_eq!((slots.slot(0, 3), slots.slot(1, 0)), (None, None));
        assert_eq!(slots.place(u32::MAX), None);
        assert_eq!(ImageSlots::new(u32::MAX, [1]).slot(0, 0), None);
    }

    proptest! {
        /// Each page of an image that has a slot is the place of that slot, and no two have the same.
        #[test]
        fn slot_and_place_are_inverse(
            file in 0_u32..50,
            pages in prop::collection::vec(0_u64..20, 0..5),
        ) {
            let slots = ImageSlots::new(file, pages.iter().copied());
            let mut seen = std::collections::BTreeSet::new();
            for (image, pages) in pages.iter().enumerate() {
                for page in 0..*pages {
                    let slot = slots.slot(image, page).unwrap();
                    prop_assert!(slot > file && seen.insert(slot));
                    prop_assert_eq!(slots.place(slot), Some((image, page)));
                    prop_assert_eq!(slots.slot(image, page + 1).unwrap_or(slot + 1), slot + 1);
                }
            }
            for slot in (0..file + 150).filter(|slot| !seen.contains(slot)) {
                prop_assert_eq!(slots.place(slot), None);
            }
        }
    }
}
