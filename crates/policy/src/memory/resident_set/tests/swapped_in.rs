//! Pages that a request to the paging disk has moved to memory.

use super::*;

/// The pages that are read before the guest touches them, of those that one request has moved.
fn moved(set: &mut ResidentSet, pages: &[u32]) -> Vec<u32> {
    let mut pages = pages.to_vec();
    set.read_moved(&mut pages);
    pages
}

#[test]
fn page_that_the_guest_swaps_in_alone_is_read_at_once_and_mapped() {
    let mut set = ResidentSet::new(2 * LIMIT, LIMIT);
    set.replace(7, 5);
    assert_eq!(moved(&mut set, &[7]), [7]);
    assert_eq!(set.touch(7), Touch::Wait);
    assert_eq!(set.read_done(7, 5), ReadDone::Map);
    assert_eq!(moved(&mut set, &[7]), [], "it is in memory");
    assert_eq!(moved(&mut set, &[]), []);
    assert_eq!(set.ahead().read_pages(), 0, "it is no page of a read-ahead");
}

#[test]
fn pages_that_one_request_moves_are_read_at_once_as_the_window_says() {
    let mut set = ResidentSet::new(2 * LIMIT, LIMIT);
    for page in 0..LIMIT {
        set.replace(page, page);
    }
    let done = |set: &mut ResidentSet, pages: &[u32]| -> Vec<ReadDone> {
        pages.iter().map(|page| set.read_done(*page, *page)).collect()
    };
    // The first window has a page beside the first one.
    let pages = moved(&mut set, &[3, 4, 5, 6]);
    assert_eq!(pages, [3, 4]);
    assert_eq!(done(&mut set, &pages), [ReadDone::Map, ReadDone::Keep]);
    open_window(&mut set);
    let request: Vec<u32> = (10..42).collect();
    let pages = moved(&mut set, &request);
    assert_eq!(pages, request[..8]);
    assert_eq!(done(&mut set, &pages)[1..], [ReadDone::Keep; 7]);
    // A trusted window leaves the last page unmapped.
    (0..4).for_each(|_| set.ahead.used());
    for page in &pages {
        set.touch(*page);
    }
    set.touch(4);
    let pages = moved(&mut set, &[50, 51, 50, 51, 52]);
    assert_eq!(pages, [50, 51, 52], "each page once");
    assert_eq!(
        done(&mut set, &pages),
        [ReadDone::Map, ReadDone::Map, ReadDone::Keep]
    );
    // A closed window has them wait for a touch.
    (0..100).for_each(|_| set.ahead.unused());
    assert_eq!(moved(&mut set, &[60, 61]), []);
    assert_eq!(set.state(60), PageState::PagedOut);
    assert_eq!(moved(&mut set, &[60]), [60]);
}
