//! Tests of memory that the host scans for equal pages, without a scanner that runs.

use shard_api::page_map::HostPage;

use super::page_map::{of, write};
use super::*;

/// Returns whether the kernel offers each mapping of guest memory to its scanner.
fn all_is_scanned(vm: &Vm) -> bool {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = vm.ram.get_host_address(GuestAddress(0)).unwrap() as u64;
    let guest = start..start + RAM_BYTES;
    let mut is_guest = false;
    let mut count = 0;
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if is_guest && !flags.contains(" mg") {
                return false;
            }
        } else if let Some(at) = line
            .split_once('-')
            .and_then(|(at, _)| u64::from_str_radix(at, 16).ok())
        {
            is_guest = guest.contains(&at);
            count += u32::from(is_guest);
        }
    }
    assert!(count > 0, "no mapping of guest memory in {smaps}");
    true
}

#[test]
fn scanned_memory_is_in_no_file_whatever_is_mapped_over_it() {
    let vm = scanned_vm_on(image(), Share::Deferred);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    write(&vm, 20, &[7]);
    assert!(all_is_scanned(&vm));
    vm.background(Share::Deferred, |vm| vm.counted("mapped_later") == 8);
    assert!(vm.bytes(AT, 8 * PAGE_BYTES) == image_bytes()[..8 * 4096]);
    write(&vm, 3, &[99]);
    crate::virtio::balloon::release(&vm.ram, Some(&vm.mapper), AT + 20 * PAGE_BYTES, PAGE_BYTES).unwrap();
    assert_eq!(vm.bytes(AT + 20 * PAGE_BYTES, 1), [0]);
    // Images are mapped for the VM, and their written pages are scanned, too.
    assert!(all_is_scanned(&vm));
    assert_eq!(vm.plain_pages(), 0);
}

#[test]
fn memory_that_was_not_asked_to_be_scanned_is_not() {
    assert!(!all_is_scanned(&vm(Share::Deferred)));
}

#[test]
fn clone_of_scanned_memory_is_scanned_and_has_its_content() {
    let file = image();
    let parent = scanned_vm_on(file.try_clone().unwrap(), Share::AtRead);
    write(&parent, 5, b"of the parent");
    let quiescer = Quiescer::new();
    let frozen = parent.mapper.freeze(&quiescer.pause().unwrap()).unwrap();
    // The memory's file, which is empty, and a layer with the written page.
    assert_eq!((frozen.files.len(), parent.plain_pages()), (2, 0));
    frozen
        .files
        .iter()
        .for_each(|file| super::frozen::seal_in_time(file));
    let clone = super::frozen::thaw(&frozen, &file, Advice::Scan);
    assert!(all_is_scanned(&parent) && all_is_scanned(&clone));
    write(&clone, 6, b"of the clone");
    assert_eq!(clone.bytes(AT + 5 * PAGE_BYTES, 13), b"of the parent");
    assert_eq!(parent.bytes(AT + 6 * PAGE_BYTES, 1), [0]);
}

/// Checks the pages of an origin. Other tests of this process fork, and a child has all pages until it runs
/// its program; a shard has no children.
#[track_caller]
fn expect(vm: &Vm, host: HostPage, expected: &[u64]) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut found = of(vm, host);
    while found != expected && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
        found = of(vm, host);
    }
    assert_eq!(found, expected, "{host:?}");
}

#[test]
fn pages_of_scanned_memory_have_the_origins_of_their_content() {
    let vm = scanned_vm_on(image(), Share::Deferred);
    let content = image_bytes();
    for (page, bytes) in content.chunks(4096).take(2).enumerate() {
        write(&vm, 50 + page as u64, bytes);
    }
    let kernel = vm.mapper.images()[0].try_clone().unwrap();
    vm.mapper
        .note_loaded(&kernel, AT + 50 * PAGE_BYTES, 0, 2 * PAGE_BYTES);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    write(&vm, 3, &[99]);
    write(&vm, 5, &[0; PAGE_BYTES as usize]);
    write(&vm, 40, &[7]);
    // A page that is read only is the host's page of zeroes.
    vm.bytes(AT + 41 * PAGE_BYTES, 1);
    expect(&vm, HostPage::Copied, &[0, 1, 2, 4, 6, 7]);
    expect(&vm, HostPage::Overwritten, &[3]);
    expect(&vm, HostPage::Zero, &[5]);
    expect(&vm, HostPage::Loaded, &[50, 51]);
    expect(&vm, HostPage::Unknown, &[40]);
    for none in [HostPage::Written, HostPage::Merged, HostPage::Image] {
        expect(&vm, none, &[]);
    }
    vm.background(Share::Deferred, |vm| vm.counted("mapped_later") == 6);
    vm.bytes(AT, 8 * PAGE_BYTES);
    expect(&vm, HostPage::Image, &[0, 1, 2, 4, 6, 7]);
    write(&vm, 1, &[99]);
    expect(&vm, HostPage::Written, &[1]);
}
