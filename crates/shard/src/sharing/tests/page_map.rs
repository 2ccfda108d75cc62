//! Tests of the origins of pages.

use std::collections::BTreeMap;

use shard_api::page_map::{HostPage, PART_PAGES_MAX, PageRun};

use super::*;
use crate::sharing::{Frozen, seal};

/// Returns the origin of each page of memory, by all parts of the map.
fn origins(vm: &Vm) -> BTreeMap<u64, HostPage> {
    let mut origins = BTreeMap::new();
    let mut from = 0;
    loop {
        let part = vm.mapper.page_map(from).unwrap();
        assert!(part.answers(from), "{part:?}");
        for PageRun(start, pages, host) in part.runs {
            for page in start..start + pages {
                assert_eq!(origins.insert(page, host), None, "page {page} twice");
            }
        }
        match part.next {
            Some(next) => from = next,
            None => return origins,
        }
    }
}

/// Returns the pages of this origin, as numbers after [`FIRST`].
pub(super) fn of(vm: &Vm, host: HostPage) -> Vec<u64> {
    let all = origins(vm).into_iter();
    all.filter(|(_, found)| *found == host)
        .map(|(page, _)| page - FIRST)
        .collect()
}

pub(super) fn write(vm: &Vm, page: u64, bytes: &[u8]) {
    vm.ram
        .write_slice(bytes, GuestAddress(AT + page * PAGE_BYTES))
        .unwrap();
}

#[test]
fn map_has_each_page_of_memory_once_and_as_many_as_the_file_has() {
    let vm = vm(Share::Deferred);
    let absent = origins(&vm);
    assert_eq!(absent.len() as u64, RAM_BYTES / PAGE_BYTES);
    const { assert!(RAM_BYTES / PAGE_BYTES > PART_PAGES_MAX, "one part would be all") };
    assert!(absent.values().all(|host| *host == HostPage::Absent));
    assert_eq!(vm.mapper.page_map(u64::MAX).unwrap().runs, []);
    vm.read(&[(AT, 32 * PAGE_BYTES)], 0);
    write(&vm, 100, &[1]);
    write(&vm, RAM_BYTES / PAGE_BYTES - FIRST - 1, &[1]);
    // Looking at holes allocates nothing.
    origins(&vm);
    let present = origins(&vm)
        .values()
        .filter(|host| **host != HostPage::Absent)
        .count();
    assert_eq!((present as u64, vm.plain_pages()), (34, 34));
}

#[test]
fn copies_and_their_remains_have_different_origins() {
    let vm = vm(Share::Deferred);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    write(&vm, 3, &[99]);
    write(&vm, 5, &[0; PAGE_BYTES as usize]);
    // The middle of an image's page, and a page of which only the half is read.
    vm.read(&[(AT + 20 * PAGE_BYTES, 2 * PAGE_BYTES)], 512);
    vm.read(&[(AT + 30 * PAGE_BYTES + 2048, 2048)], 2048);
    write(&vm, 40, &[7]);
    write(&vm, 41, &[7]);
    write(&vm, 41, &[0]);
    vm.mapper.release(FIRST + 7..FIRST + 8).unwrap();
    assert_eq!(of(&vm, HostPage::Copied), [0, 1, 2, 4, 6]);
    assert_eq!(of(&vm, HostPage::Overwritten), [3]);
    assert_eq!(of(&vm, HostPage::Zero), [5, 41]);
    assert_eq!(of(&vm, HostPage::Unaligned), [20, 21, 30]);
    // The origin of a page that was given back is forgotten.
    assert_eq!(of(&vm, HostPage::Unknown), [7, 40]);

    vm.background(Share::Deferred, |vm| vm.counted("mapped_later") == 5);
    assert_eq!(of(&vm, HostPage::Copied), Vec::<u64>::new());
    assert_eq!(
        of(&vm, HostPage::Overwritten),
        [3],
        "the record is gone, its outcome is not"
    );
    vm.bytes(AT, 3 * PAGE_BYTES);
    assert_eq!(of(&vm, HostPage::Image), [0, 1, 2]);
    write(&vm, 1, &[99]);
    write(&vm, 2, &[0; PAGE_BYTES as usize]);
    assert_eq!(of(&vm, HostPage::Image), [0]);
    assert_eq!(of(&vm, HostPage::Written), [1]);
    assert_eq!(of(&vm, HostPage::Zero), [2, 5, 41]);
    // A whole page over the part of one.
    vm.read(&[(AT + 20 * PAGE_BYTES, PAGE_BYTES)], 0);
    assert_eq!(of(&vm, HostPage::Copied), [20]);
    assert_eq!(of(&vm, HostPage::Unaligned), [21, 30]);
}

#[test]
fn loaded_pages_are_those_that_still_equal_their_file() {
    let vm = vm(Share::Deferred);
    let file = image();
    let image = vm.mapper.images()[0].try_clone().unwrap();
    let content = image_bytes();
    for (page, bytes) in content.chunks(4096).take(4).enumerate() {
        write(&vm, page as u64, bytes);
        write(&vm, 10 + page as u64, bytes);
    }
    vm.mapper.note_loaded(&image, AT, 0, 4 * PAGE_BYTES);
    // Another file is no image of the VM.
    vm.mapper
        .note_loaded(&file, AT + 10 * PAGE_BYTES, 0, 4 * PAGE_BYTES);
    // The code is to be shared, the data is not.
    vm.mapper.loaded(&image, AT, 0, 2 * PAGE_BYTES, false).unwrap();
    write(&vm, 1, &[99]);
    write(&vm, 3, &[99]);
    assert_eq!(of(&vm, HostPage::Loaded), [0, 2]);
    assert_eq!(of(&vm, HostPage::Overwritten), [1, 3]);
    assert_eq!(of(&vm, HostPage::Unknown), [10, 11, 12, 13]);
}

#[test]
fn frozen_pages_are_those_that_were_not_written_since() {
    let vm = vm(Share::AtRead);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    write(&vm, 20, &[7]);
    write(&vm, 21, &[7]);
    let quiescer = Quiescer::new();
    let Frozen { files, .. } = vm.mapper.freeze(&quiescer.pause().unwrap()).unwrap();
    files.iter().for_each(|file| seal(file).unwrap());
    write(&vm, 21, &[8]);
    write(&vm, 22, &[9]);
    vm.bytes(AT + 20 * PAGE_BYTES, PAGE_BYTES);
    vm.bytes(AT, 8 * PAGE_BYTES);
    assert_eq!(of(&vm, HostPage::Frozen), [20]);
    assert_eq!(of(&vm, HostPage::Written), [21, 22]);
    assert_eq!(of(&vm, HostPage::Image), (0..8).collect::<Vec<_>>());
}
