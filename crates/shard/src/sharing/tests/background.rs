//! Tests of the background thread's handling of copies.

use super::*;

#[test]
fn copies_become_mappings_unless_they_changed() {
    let vm = vm(Share::Deferred);
    vm.read(&[(AT, 32 * PAGE_BYTES)], 0);
    assert_eq!((vm.counted("candidates"), vm.plain_pages()), (32, 32));
    vm.ram
        .write_slice(&[99], GuestAddress(AT + 7 * PAGE_BYTES + 1))
        .unwrap();
    vm.background(Share::Deferred, |vm| vm.counted("mapped_later") == 31);
    assert_eq!(
        (vm.counted("changed"), vm.counted("mappings"), vm.plain_pages()),
        (1, 2, 1)
    );
    let mut expected = image_bytes()[..32 * 4096].to_vec();
    expected[7 * 4096 + 1] = 99;
    assert_eq!(vm.bytes(AT, 32 * PAGE_BYTES), expected);
}

#[test]
fn chosen_copies_that_are_overwritten_or_released_are_not_replaced() {
    let vm = vm(Share::Deferred);
    vm.read(&[(AT, 32 * PAGE_BYTES)], 0);
    let (mapper, pressure) = (vm.mapper.clone(), vm.disk.pressure.clone());
    let mut background = Background::open(mapper, pressure, vec![Share::Deferred]);
    let quiescer = Quiescer::new();
    background.age();
    assert!(background.step(&quiescer).more);
    assert_eq!((vm.counted("mapped_later"), vm.counted("candidates")), (0, 32));
    // The guest writes one page, reads another again, and releases a third.
    vm.ram
        .write_slice(&[99], GuestAddress(AT + 3 * PAGE_BYTES))
        .unwrap();
    vm.read(&[(AT + 9 * PAGE_BYTES, PAGE_BYTES)], 40 * PAGE_BYTES);
    let given_up = FIRST + 20;
    vm.mapper.release(given_up..given_up + 1).unwrap();
    for _ in 0..9 {
        background.step(&quiescer);
    }
    assert_eq!((vm.counted("mapped_later"), vm.counted("changed")), (29, 1));
    assert_eq!(vm.counted("candidates"), 1, "the page that was read again");
    let mut expected = image_bytes()[..32 * 4096].to_vec();
    expected[3 * 4096] = 99;
    expected.splice(
        9 * 4096..10 * 4096,
        image_bytes()[40 * 4096..41 * 4096].iter().copied(),
    );
    assert_eq!(vm.bytes(AT, 32 * PAGE_BYTES), expected);
}

#[test]
fn a_lone_page_waits_until_memory_is_short() {
    let vm = vm(Share::Adaptive);
    let lone = AT + 64 * PAGE_BYTES;
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    vm.read(&[(lone, PAGE_BYTES)], 0);
    let (mapper, pressure) = (vm.mapper.clone(), vm.disk.pressure.clone());
    assert!(
        !pressure.short(),
        "this test needs a host that is not short of memory"
    );
    let mut background = Background::open(mapper, pressure.clone(), vec![Share::Adaptive]);
    let quiescer = Quiescer::new();
    let mut round = || {
        background.age();
        while background.step(&quiescer).more {}
    };
    round();
    assert_eq!((vm.counted("mapped_later"), vm.counted("candidates")), (8, 1));
    pressure.set_short();
    round();
    assert_eq!((vm.counted("mapped_later"), vm.counted("candidates")), (9, 0));
}

#[test]
fn a_copy_over_mapped_pages_makes_them_plain_at_once() {
    let vm = vm(Share::Deferred);
    vm.read(&[(AT, 32 * PAGE_BYTES)], 0);
    vm.background(Share::Deferred, |vm| {
        vm.counted("mapped_later") == 32 && vm.plain_pages() == 0
    });
    vm.read(&[(AT + 8 * PAGE_BYTES, 8 * PAGE_BYTES)], 32 * PAGE_BYTES);
    assert_eq!((vm.counted("restored"), vm.plain_pages()), (8, 8));
    let image = image_bytes();
    let page = |number: usize| &image[number * 4096..][..4096];
    for number in 0..32_usize {
        let from = if (8..16).contains(&number) {
            number + 24
        } else {
            number
        };
        assert_eq!(
            vm.bytes(AT + number as u64 * PAGE_BYTES, PAGE_BYTES),
            page(from),
            "page {number}"
        );
    }
}

#[test]
fn copies_in_huge_pages_stay_while_memory_is_plenty() {
    let vm = vm(Share::Deferred);
    let elsewhere = AT + (8 << 20);
    vm.mapper.mark_huge(AT, AT + 8 * PAGE_BYTES);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    vm.read(&[(elsewhere, 8 * PAGE_BYTES)], 0);
    assert!(
        !vm.disk.pressure.short(),
        "this test needs a host that is not short of memory"
    );
    vm.background(Share::Deferred, |vm| vm.counted("mapped_later") >= 8);
    let mapped: Vec<_> = vm.mapper.pages().mapped.iter().map(|(at, _)| at).collect();
    assert_eq!(mapped, [elsewhere / PAGE_BYTES]);
}

#[test]
fn written_mappings_become_plain_memory_again() {
    let vm = vm(Share::AtRead);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    for page in 0..8 {
        vm.ram
            .write_slice(&[page], GuestAddress(AT + u64::from(page) * PAGE_BYTES + 9))
            .unwrap();
    }
    let background = Background::open(vm.mapper.clone(), vm.disk.pressure.clone(), Vec::new());
    background.trim(&Quiescer::new()).unwrap();
    assert_eq!(vm.counted("restored"), 8);
    let mut expected = image_bytes()[..8 * 4096].to_vec();
    (0..8).for_each(|page| expected[page * 4096 + 9] = page as u8);
    assert_eq!(vm.bytes(AT, 8 * PAGE_BYTES), expected);
    assert_eq!((vm.counted("mappings"), vm.plain_pages()), (0, 8));
}
