//! Pages of paged memory that a disk fills from an image.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use diskstore::disk::{DiskRequest, Format, Mode, assemble, open};
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_S_OK, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};

use super::driver::*;
use crate::launch::{Ending, OnFull};
use crate::paging::rig::{LIMIT_PAGES, Rig, rig_with_images};
use crate::paging::{DiskImage, PageOrigins, PagingDiskIo};
use crate::virtio::block::{Block, ReadOrigins};

const PAGE: u64 = 4096;
const SECTORS: u64 = 8;
/// First page beyond those of rings, headers and small data.
const FREE: u32 = 1024;
const IMAGE_PAGES: u32 = 2 * LIMIT_PAGES;
/// Pages that a guest writes besides those of an image.
const OTHER_PAGES: u64 = 64;

/// An image of [`IMAGE_PAGES`] pages, of which each has its number at both ends.
fn image() -> File {
    let file = tempfile::tempfile().unwrap();
    for page in 0..u64::from(IMAGE_PAGES) {
        for at in [0, PAGE - 8] {
            let value = value(page as u32).wrapping_add(at);
            file.write_all_at(&value.to_le_bytes(), page * PAGE + at).unwrap();
        }
    }
    file
}

/// The number of a page of the image.
fn value(page: u32) -> u64 {
    500_000 + u64::from(page)
}

/// Paged memory of 64 MiB, and a disk on an image.
fn driver(image: &File) -> (Rig, Driver) {
    let layers = vec![(image.try_clone().unwrap(), Format::Raw)];
    driver_of(image, layers, true)
}

/// The same with a temporary overlay of the disk.
fn driver_of_overlay(directory: &Path, image: &Path) -> (Rig, Driver) {
    let disk = open(&DiskRequest {
        path: image.to_owned(),
        format: None,
        mode: Mode::Private,
        persistent: false,
        read_only: false,
        overlay_path: None,
        scratch_dir: directory.to_owned(),
        vm_name: "vm".to_owned(),
        below: None,
    })
    .unwrap();
    let layers = disk.layers.into_iter().map(|layer| (layer.file, layer.format));
    driver_of(&File::open(image).unwrap(), layers.collect(), false)
}

fn driver_of(image: &File, layers: Vec<(File, Format)>, read_only: bool) -> (Rig, Driver) {
    let own = DiskImage {
        file: image.try_clone().unwrap(),
        disk: "vda".to_owned(),
    };
    let rig = rig_with_images(64, 24_000, 1024, vec![own]);
    let store = assemble(layers, read_only).unwrap();
    let origins = PageOrigins::new(&rig.paging, &*store).expect("the disk has an image");
    let origins = Some(ReadOrigins::Paged(origins));
    let block = Block::new(&rig.threads, "vda", store, read_only, 1, origins, OnFull::Error).unwrap();
    let mut driver = Driver::of(rig.memory.clone(), block);
    driver.activate(1, 0);
    (rig, driver)
}

impl Driver {
    /// Reads pages of the disk into the guest's pages from `page` on, 32 in one request.
    fn fill(&mut self, at: u32, page: u32, pages: u32) {
        for start in (0..pages).step_by(32) {
            let buffer = writable(u64::from(page + start) * PAGE, 32 * PAGE as u32);
            let sector = u64::from(at + start) * SECTORS;
            assert_eq!(
                self.request(VIRTIO_BLK_T_IN, sector, &[buffer]),
                VIRTIO_BLK_S_OK as u8
            );
        }
    }
}

fn check(rig: &Rig, pages: impl Iterator<Item = u32>) {
    pages.for_each(|page| rig.check(FREE + page, value(page)));
}

#[test]
fn pages_of_an_image_leave_memory_without_a_write_and_come_back_from_the_image() {
    let (rig, mut driver) = driver(&image());
    driver.fill(0, FREE, IMAGE_PAGES);
    rig.settle();
    let outside = |least: u32| {
        let bytes = rig.number("/images/paged_out_bytes");
        assert!(bytes >= u64::from(least) * PAGE, "{}", rig.paging.status());
        assert!(
            rig.number("/written_bytes") <= OTHER_PAGES * PAGE,
            "{}",
            rig.paging.status()
        );
    };
    outside(IMAGE_PAGES - LIMIT_PAGES);
    for _ in 0..2 {
        check(&rig, 0..IMAGE_PAGES);
        rig.settle();
        outside(IMAGE_PAGES - LIMIT_PAGES - 100);
    }
    // KVM reports most faults as those of a write, those of a vCPU that reads too.
    (0..IMAGE_PAGES).for_each(|page| rig.write(FREE + page, value(page)));
    rig.settle();
    outside(IMAGE_PAGES - LIMIT_PAGES - 100);
    assert!(rig.number("/images/left_bytes") >= 3 * u64::from(LIMIT_PAGES) * PAGE);
    let read = rig.number("/images/read_bytes");
    assert!(read >= u64::from(IMAGE_PAGES) * PAGE, "{}", rig.paging.status());
    assert!(
        rig.number("/read_bytes") <= OTHER_PAGES * PAGE,
        "{}",
        rig.paging.status()
    );
    assert!(rig.number("/file/free_bytes") >= rig.number("/file/bytes") - OTHER_PAGES * PAGE);
    // Neighbours come together.
    let reads = rig.number("/faults/with_io");
    assert!(reads * PAGE <= read / 4, "{}", rig.paging.status());
    assert!(rig.end.cause().is_none());
}

/// A guest's read-ahead fills free pages wherever they are.
#[test]
fn each_page_of_a_read_into_scattered_pages_has_its_origin() {
    let (rig, mut driver) = driver(&image());
    let pages = LIMIT_PAGES + 1024;
    let place = |page: u32| 2 * page + page % 2;
    for start in (0..pages).step_by(64) {
        let buffer = |page| writable(u64::from(FREE + place(page)) * PAGE, PAGE as u32);
        let buffers: Vec<_> = (start..start + 64).map(buffer).collect();
        let status = driver.request(VIRTIO_BLK_T_IN, u64::from(start) * SECTORS, &buffers);
        assert_eq!(status, VIRTIO_BLK_S_OK as u8);
    }
    rig.settle();
    let outside = rig.number("/images/paged_out_bytes");
    assert!(outside >= 1024 * PAGE, "{}", rig.paging.status());
    assert!(
        rig.number("/written_bytes") <= OTHER_PAGES * PAGE,
        "{}",
        rig.paging.status()
    );
    (0..pages).for_each(|page| rig.check(FREE + place(page), value(page)));
}

#[test]
fn pages_that_the_guest_changes_are_its_own_and_two_vms_share_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    std::io::copy(&mut image(), &mut File::create(&path).unwrap()).unwrap();
    let vms: Vec<_> = (0..2)
        .map(|_| driver_of_overlay(directory.path(), &path))
        .collect();
    for (number, (rig, mut driver)) in vms.into_iter().enumerate() {
        let number = number as u64;
        driver.fill(0, FREE, IMAGE_PAGES);
        rig.settle();
        // By the first access since the page was paged out, and by a later one.
        let changed = |page: &u32| page.is_multiple_of(16);
        for page in (0..IMAGE_PAGES).filter(changed) {
            if page.is_multiple_of(32) {
                rig.check(FREE + page, value(page));
            }
            rig.write(FREE + page, 7 + number);
        }
        // A page that the disk fills again, from another place, and one that it writes first.
        driver.fill(64, FREE, 32);
        let buffer = readable(u64::from(FREE + 48) * PAGE, PAGE as u32);
        let status = driver.request(VIRTIO_BLK_T_OUT, 96 * SECTORS, &[buffer]);
        assert_eq!(status, VIRTIO_BLK_S_OK as u8);
        driver.fill(96, FREE + 96, 32);
        for _ in 0..2 {
            for page in 0..IMAGE_PAGES {
                let expected = match page {
                    0..32 => value(64 + page),
                    // The overlay has what page 48 had.
                    96 => 7 + number,
                    97..128 => value(page),
                    _ if changed(&page) => 7 + number,
                    _ => value(page),
                };
                rig.check(FREE + page, expected);
            }
            rig.settle();
        }
        let own = u64::from(IMAGE_PAGES / 16) * PAGE;
        let written = rig.number("/written_bytes");
        assert!(
            (own / 2..own + OTHER_PAGES * PAGE).contains(&written),
            "{}",
            rig.paging.status()
        );
        assert!(rig.number("/images/left_bytes") >= 2 * u64::from(LIMIT_PAGES) * PAGE);
        assert!(rig.end.cause().is_none());
    }
}

#[test]
fn page_of_an_image_moves_to_the_paging_disk_and_back_by_reference() {
    let (rig, mut driver) = driver(&image());
    driver.fill(0, FREE, IMAGE_PAGES);
    rig.settle();
    let io = PagingDiskIo::new(&rig.paging).unwrap();
    let block = Block::paging(&rig.threads, "paging", io).unwrap();
    let mut swap = Driver::of(rig.memory.clone(), block);
    drop(driver);
    swap.activate(1, 0);
    let (free, out) = (rig.number("/file/free_bytes"), 100_u32);
    let buffer = |page: u32| (u64::from(page) * PAGE, out * PAGE as u32);
    let (from, bytes) = buffer(FREE);
    let status = swap.request(VIRTIO_BLK_T_OUT, 0, &[readable(from, bytes)]);
    assert_eq!(status, VIRTIO_BLK_S_OK as u8);
    assert_eq!(
        rig.number("/disk/writes/without_io"),
        u64::from(out),
        "{}",
        rig.paging.status()
    );
    assert!(rig.number("/file/free_bytes") >= free - 16 * PAGE);
    (0..out).for_each(|page| rig.write(FREE + page, 9));
    let (into, bytes) = buffer(FREE + IMAGE_PAGES + 100);
    let status = swap.request(VIRTIO_BLK_T_IN, 0, &[writable(into, bytes)]);
    assert_eq!(status, VIRTIO_BLK_S_OK as u8);
    for page in 0..out {
        rig.check(FREE + IMAGE_PAGES + 100 + page, value(page));
        rig.check(FREE + page, 9);
    }
    // A part of a page takes the way through a buffer, from the image.
    let status = swap.request(VIRTIO_BLK_T_IN, 5 * SECTORS, &[writable(DATA, 512)]);
    assert_eq!(status, VIRTIO_BLK_S_OK as u8);
    rig.wait("the number of page 5", || {
        rig.first_word((DATA / PAGE) as u32) == value(5)
    });
}

#[test]
fn image_that_is_cut_off_ends_the_vm_with_disk_and_byte() {
    let image = image();
    let (rig, mut driver) = driver(&image);
    driver.fill(0, FREE, IMAGE_PAGES);
    rig.settle();
    image.set_len(100 * PAGE).unwrap();
    let rig = Arc::new(rig);
    // Pages that are in the image still come back. No thread goes on with another page.
    check(&rig, 0..4);
    let other = rig.clone();
    std::thread::spawn(move || check(&other, 500..520));
    rig.wait("the end", || rig.end.cause().is_some());
    match rig.end.cause() {
        Some(Ending::ShardFailed { detail }) => assert_eq!(
            detail,
            format!(
                "an image of the disk vda cannot be read at byte {}: the file ends there",
                500 * PAGE
            )
        ),
        other => panic!("{other:?}"),
    }
}
