//! Tests of mapping during a read.

use super::*;
use crate::sharing::Run;
use crate::sharing::mapper::{MapTime, Mapped};

#[test]
fn a_read_is_mapped_and_a_write_stays_with_the_writer() {
    let image = image();
    let one = vm_on(image.try_clone().unwrap(), Share::AtRead);
    let other = vm_on(image, Share::AtRead);
    for vm in [&one, &other] {
        vm.read(&[(AT, 16 * PAGE_BYTES)], 8 * PAGE_BYTES);
        assert_eq!(vm.bytes(AT, 16 * PAGE_BYTES), image_bytes()[8 * 4096..24 * 4096]);
        assert_eq!(
            (
                vm.counted("mapped_at_read"),
                vm.counted("mappings"),
                vm.plain_pages()
            ),
            (16, 1, 0)
        );
    }
    one.ram.write_slice(b"mine", GuestAddress(AT + 5000)).unwrap();
    assert_eq!(one.bytes(AT + 5000, 4), b"mine");
    assert_eq!(
        other.bytes(AT, 16 * PAGE_BYTES),
        image_bytes()[8 * 4096..24 * 4096]
    );
    let into = other.segments(&[(AT + (64 << 12), 4096)]);
    other.store.read(&into, 9 * PAGE_BYTES).unwrap();
    assert_eq!(
        other.bytes(AT + (64 << 12), 4096),
        image_bytes()[9 * 4096..10 * 4096],
        "the image changed"
    );
}

#[test]
fn the_same_page_can_be_read_again_and_again() {
    let vm = vm(Share::AtRead);
    for page in [3, 9, 9, 4] {
        vm.read(&[(AT, PAGE_BYTES)], page * PAGE_BYTES);
        assert_eq!(
            vm.bytes(AT, PAGE_BYTES),
            image_bytes()[page as usize * 4096..][..4096]
        );
    }
    // The same block twice, and a buffer that repeats: the last read counts.
    vm.read(
        &[(AT, PAGE_BYTES), (AT + PAGE_BYTES, PAGE_BYTES), (AT, PAGE_BYTES)],
        5 * PAGE_BYTES,
    );
    assert_eq!(vm.bytes(AT, PAGE_BYTES), image_bytes()[7 * 4096..][..4096]);
    assert_eq!(
        vm.bytes(AT + PAGE_BYTES, PAGE_BYTES),
        image_bytes()[6 * 4096..][..4096]
    );
}

#[test]
fn pages_that_the_balloon_takes_are_plain_and_zero() {
    let vm = vm(Share::AtRead);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    vm.mapper.release(FIRST + 2..FIRST + 5).unwrap();
    assert_eq!(vm.bytes(AT + 2 * PAGE_BYTES, 3 * PAGE_BYTES), vec![0; 3 * 4096]);
    assert_eq!(vm.bytes(AT, 2 * PAGE_BYTES), image_bytes()[..2 * 4096]);
    assert_eq!(
        vm.bytes(AT + 5 * PAGE_BYTES, 3 * PAGE_BYTES),
        image_bytes()[5 * 4096..8 * 4096]
    );
    assert_eq!((vm.counted("mapped_pages"), vm.counted("mappings")), (5, 2));
}

#[test]
fn at_the_limit_pages_are_copied_and_counted() {
    let mut vm = vm(Share::AtRead);
    let mapper = Arc::into_inner(std::mem::replace(
        &mut vm.mapper,
        Mapper::new(&vm.ram, Vec::new(), Advice::Ordinary).unwrap(),
    ));
    assert!(mapper.is_none(), "the disk holds the mapper too");
    let mut mapper = Arc::into_inner(std::mem::replace(&mut vm.disk.mapper, vm.mapper.clone())).unwrap();
    mapper.limit(3);
    (vm.mapper, vm.disk.mapper) = {
        let mapper = Arc::new(mapper);
        (mapper.clone(), mapper)
    };
    for page in 0..6 {
        vm.read(&[(AT + page * 2 * PAGE_BYTES, PAGE_BYTES)], page * PAGE_BYTES);
        assert_eq!(
            vm.bytes(AT + page * 2 * PAGE_BYTES, PAGE_BYTES),
            image_bytes()[page as usize * 4096..][..4096]
        );
    }
    assert_eq!((vm.counted("mappings"), vm.counted("at_limit")), (2, 4));
}

#[test]
fn no_page_is_recorded_or_mapped_if_sharing_is_never() {
    let vm = vm(Share::Never);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    assert_eq!((vm.counted("candidates"), vm.counted("mapped_pages")), (0, 0));
}

#[test]
fn a_run_outside_memory_is_refused() {
    let vm = vm(Share::AtRead);
    let run = Run {
        pages: 8,
        image: 0,
        first: 0,
    };
    let last = RAM_BYTES / PAGE_BYTES - 4;
    let counter = &vm.mapper.metrics.mapped_at_read;
    assert!(
        vm.mapper
            .map(&mut vm.mapper.pages(), last, run, MapTime::AtRead, counter)
            .is_err()
    );
    assert_eq!(
        vm.mapper
            .map(&mut vm.mapper.pages(), last - 4, run, MapTime::AtRead, counter)
            .unwrap(),
        Mapped::Yes
    );
}
