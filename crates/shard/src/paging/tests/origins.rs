//! Origins of pages that reads of a disk have filled.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use diskstore::disk::{Format, Segments, Store, assemble};

use super::super::origins::holds;
use super::super::rig::rig_with_images;
use super::*;

/// Pages of the image.
const IMAGE_PAGES: u64 = 1024;

/// A disk of one file.
fn disk(file: &File, read_only: bool) -> Arc<dyn Store> {
    assemble(vec![(file.try_clone().unwrap(), Format::Raw)], read_only).unwrap()
}

/// Paged memory, an image of its disk, and the disk.
fn rig_of_image() -> (Rig, File, Arc<dyn Store>) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(IMAGE_PAGES * PAGE_BYTES).unwrap();
    let image = DiskImage {
        file: file.try_clone().unwrap(),
        disk: "vda".to_owned(),
    };
    let rig = rig_with_images(64, 20_000, 0, vec![image]);
    let store = disk(&file, true);
    (rig, file, store)
}

/// The memory of these pages, in this order.
fn memory_of(rig: &Rig, runs: impl IntoIterator<Item = Range<u32>>) -> Segments {
    let mut into = Segments::new();
    for pages in runs {
        let at = rig.paging.memory.address(pages.start).unwrap();
        // SAFETY: memory of the rig, which stays mapped until the end of the test. No I/O uses it.
        unsafe { into.push(at as *mut u8, pages.len() * PAGE_LEN) };
    }
    into
}

fn slot_of(rig: &Rig, page: u32) -> Option<u32> {
    rig.paging.state().set.slot(page)
}

/// The slot of a page of the image.
fn of_image(rig: &Rig, page: u32) -> Option<u32> {
    let slot = rig.paging.store.images().slots().slot(0, page.into());
    assert!(slot.is_some(), "page {page} is of no image");
    slot
}

#[test]
fn origin_is_recorded_once_and_only_of_a_read_that_has_filled_its_memory() {
    let (rig, _file, store) = rig_of_image();
    let mut origins = PageOrigins::new(&rig.paging, &*store).unwrap();
    (0..8).for_each(|page| rig.write(page, 1));
    origins.begin(0, &*store, 0, &memory_of(&rig, Some(0..4)));
    origins.begin(1, &*store, 4 * PAGE_BYTES, &memory_of(&rig, Some(4..8)));
    origins.end(0, false);
    origins.end(1, true);
    for page in 0..4 {
        assert_eq!(slot_of(&rig, page), None, "the read of page {page} has failed");
        assert_eq!(slot_of(&rig, 4 + page), of_image(&rig, 4 + page));
    }
    // The token is another request's from now on.
    rig.paging.state().set.release_former(4);
    origins.end(1, true);
    assert_eq!(slot_of(&rig, 4), None);
    origins.begin(0, &*store, 0, &memory_of(&rig, Some(0..4)));
    origins.clear();
    origins.end(0, true);
    assert_eq!(slot_of(&rig, 0), None, "the device was reset");
}

#[test]
fn slots_of_pages_that_a_read_has_filled_anew_are_free() {
    let (rig, _file, store) = rig_of_image();
    let mut origins = PageOrigins::new(&rig.paging, &*store).unwrap();
    rig.fill();
    (0..8).for_each(|page| rig.check(page, 1000 + u64::from(page)));
    rig.settle();
    let free = rig.number("/file/free_bytes");
    assert!((0..8).all(|page| slot_of(&rig, page).is_some()), "they came back");
    origins.begin(0, &*store, 0, &memory_of(&rig, Some(0..8)));
    origins.end(0, true);
    assert_eq!(rig.number("/file/free_bytes"), free + 8 * PAGE_BYTES);
    (0..8).for_each(|page| assert_eq!(slot_of(&rig, page), of_image(&rig, page)));
}

/// The number of a request's parts is the guest's choice.
#[test]
fn request_of_many_parts_has_256_origins() {
    let (rig, _file, store) = rig_of_image();
    let mut origins = PageOrigins::new(&rig.paging, &*store).unwrap();
    (0..600).for_each(|page| rig.write(page, 1));
    let parts = (0..300).map(|part| 2 * part..2 * part + 1);
    origins.begin(0, &*store, 0, &memory_of(&rig, parts));
    origins.end(0, true);
    for part in 0..300 {
        let expected = of_image(&rig, part).filter(|_| part < 256);
        assert_eq!(slot_of(&rig, 2 * part), expected, "part {part}");
    }
}

#[test]
fn each_page_of_a_long_run_has_its_origin() {
    let (rig, _file, store) = rig_of_image();
    let mut origins = PageOrigins::new(&rig.paging, &*store).unwrap();
    (99..702).for_each(|page| rig.write(page, 1));
    origins.begin(0, &*store, 3 * PAGE_BYTES, &memory_of(&rig, Some(100..701)));
    origins.end(0, true);
    for page in 100..701 {
        assert_eq!(slot_of(&rig, page), of_image(&rig, page - 97), "page {page}");
    }
    assert_eq!([99, 701].map(|page| slot_of(&rig, page)), [None; 2]);
    // Faults are answered between two holds of the lock.
    assert_eq!(holds(601).collect::<Vec<_>>(), [0..256, 256..512, 512..601]);
    assert_eq!((holds(256).count(), holds(0).count()), (1, 0));
}

#[test]
fn only_images_without_a_writer_are_origins() {
    let (rig, file, _) = rig_of_image();
    let origins = |store: Arc<dyn Store>| PageOrigins::new(&rig.paging, &*store).is_some();
    assert!(origins(disk(&file, true)));
    assert!(!origins(disk(&file, false)), "the disk writes this file");
    let other = tempfile::tempfile().unwrap();
    other.set_len(PAGE_BYTES).unwrap();
    assert!(!origins(disk(&other, true)), "the pager does not have this file");
}
