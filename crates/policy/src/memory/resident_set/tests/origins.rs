//! Pages that a disk has filled from an image.

use super::*;

#[test]
fn page_of_an_image_leaves_without_a_slot_and_keeps_its_origin_when_the_file_is_full() {
    let mut set = touched(LIMIT + 1);
    set.set_image_slots(1000);
    for page in 0..4 {
        assert_eq!(set.set_origin(page, 1001 + page), None);
    }
    assert_eq!(set.set_origin(3, 1009), Some(1004), "it was filled again");
    assert_eq!(set.mapped(0), None);
    assert_eq!(set.release_former(3), Some(1009));
    set.set_origin(3, 7);
    assert_eq!(set.stop_keeping_slots(), [7], "an image's slots take no room");
    assert_eq!((set.mapped(0), set.slot(0)), (None, Some(1001)));
    trimmed(&mut set);
    assert_eq!(taken(&mut set, 4), [0, 1, 2, 3]);
    assert_eq!(set.set_origin(3, 1005), None);
    assert_eq!(set.slot(3), None, "its copy may be compared already");
    for page in 0..3 {
        assert!(set.written(page, Content::Unchanged(1001 + page)));
    }
    assert!(set.written(3, Content::Slot(5)));
    assert_eq!((set.counts().paged_out, set.counts().in_images), (4, 3));
    assert_eq!(set.set_origin(3, 1005), None);
    assert_eq!(set.slot(3), Some(5), "its slot is its only place");
    assert_eq!(set.touch(1), Touch::Read { slot: 1002 });
    assert_eq!(ahead(&mut set, 1, 1002), [2], "neighbours come from images too");
    assert_eq!(set.counts().in_images, 1);
    assert_eq!(set.read_done(1, 1002), ReadDone::Map);
    assert_eq!(set.release(0), Some(1001));
    assert_eq!(set.counts().in_images, 0);
}

#[test]
fn origin_is_recorded_for_pages_whose_content_is_in_memory_alone() {
    let mut set = touched(FIFO + 1);
    set.set_image_slots(1000);
    assert_eq!(trimmed(&mut set), [0]);
    set.set_origin(0, 1001);
    assert_eq!((set.state(0), set.slot(0)), (PageState::SecondChance, Some(1001)));
    // The content of the others is that of their slots, or none.
    set.replace(1, 5);
    set.replace(2, 6);
    assert_eq!(set.touch(1), Touch::Read { slot: 5 });
    assert_eq!(ahead(&mut set, 1, 5), [2]);
    assert_eq!((set.set_origin(1, 1002), set.set_origin(2, 1003)), (None, None));
    assert_eq!(set.read_done(2, 6), ReadDone::Keep);
    assert_eq!(
        (set.set_origin(2, 1003), set.set_origin(FIFO + 1, 1004)),
        (None, None)
    );
    assert_eq!(
        [1, 2, FIFO + 1].map(|page| set.slot(page)),
        [Some(5), Some(6), None]
    );
}
