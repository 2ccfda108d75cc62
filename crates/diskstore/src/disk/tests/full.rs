//! A full disk is an I/O error of the disk that needs space, and leaves a reserve to the others.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::statfs::fstatfs;

use super::super::{IoQueue, Layer, Operation, Store, Submission, allocate_whole, assemble_within};
use super::*;

const MIB: u64 = 1 << 20;
/// Size of the disks: more than the file system has, and more than a page of the overlay's bitmap covers.
const SIZE: u64 = 1 << 30;

/// Runs `test` with a directory on a file system of 1 MiB, which only its thread sees.
fn on_small_file_system(test: impl FnOnce(&Path) + Send) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    std::thread::scope(|scope| {
        let alone = scope.spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS)
                .expect("this test needs root (CAP_SYS_ADMIN) to make a mount namespace");
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            mount(
                Some("none"),
                path,
                Some("tmpfs"),
                MsFlags::empty(),
                Some("size=1m"),
            )
            .unwrap();
            test(path);
        });
        alone.join().unwrap();
    });
}

fn opened(directory: &Path) -> Vec<Layer> {
    let path = directory.join("disk");
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    super::super::open(&request(&path, "a")).unwrap().layers
}

fn assembled(layers: &[Layer], limit: Option<u64>) -> Arc<dyn Store> {
    let files = layers
        .iter()
        .map(|layer| (layer.file.try_clone().unwrap(), layer.format));
    assemble_within(files.collect(), false, limit).unwrap()
}

fn try_write(store: &dyn Store, offset: u64, bytes: usize) -> io::Result<()> {
    store.write(&segments(&mut vec![0x5a; bytes], 4096), offset)
}

fn is_full(result: io::Result<()>) -> bool {
    result.is_err_and(|error| error.raw_os_error() == Some(libc::ENOSPC))
}

/// Whether an overlay has reached its own limit.
fn is_too_large(result: io::Result<()>) -> bool {
    result.is_err_and(|error| error.raw_os_error() == Some(libc::EFBIG))
}

fn available(directory: &Path) -> u64 {
    let host = fstatfs(File::open(directory).unwrap()).unwrap();
    host.blocks_available() * 4096
}

/// Takes all free space of the file system.
fn fill(directory: &Path) {
    let mut neighbour = File::create(directory.join("neighbour")).unwrap();
    while io::Write::write_all(&mut neighbour, &[1; 4096]).is_ok() {}
    assert_eq!(available(directory), 0);
}

/// Frees the space that [`fill`] took. A process that another test starts has the file open until it executes
/// its program, which keeps the blocks of a removed file.
fn empty(directory: &Path) {
    std::fs::remove_file(directory.join("neighbour")).unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    while available(directory) < MIB / 2 {
        assert!(Instant::now() < end, "a removed file keeps its blocks");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_full_file_system_is_an_error_of_the_write_and_not_the_end_of_the_process() {
    on_small_file_system(|directory| {
        let layers = opened(directory);
        let store = assembled(&layers, None);
        write(&*store, 4096, &[3; 4096]);
        fill(directory);
        // Zeroes take no data space. In blocks that were never written, marking them present does.
        assert!(is_full(store.write_zeroes(SIZE / 2, MIB, true)));
        assert!(is_full(try_write(&*store, SIZE / 4, 100)));
        assert_eq!(read(&*store, SIZE / 2, 4096), [0; 4096]);
        // Present blocks can be written again.
        write(&*store, 4096, &[4; 4096]);
        assert_eq!(read(&*store, 4096, 4096), [4; 4096]);
        empty(directory);
        store.write_zeroes(SIZE / 2, MIB, true).unwrap();
        write(&*store, SIZE / 4, &[5; 100]);
        // The next shard of the VM sees the same.
        let store = assembled(&layers, None);
        assert_eq!(read(&*store, SIZE / 4, 100), [5; 100]);
        assert_eq!(read(&*store, 4096, 4096), [4; 4096]);
    });
}

#[test]
fn overlays_leave_a_reserve_of_their_file_system() {
    on_small_file_system(|directory| {
        let store = assembled(&opened(directory), None);
        // Zeroes take no space, and writes over them do.
        store.write_zeroes(0, 400 * 4096, true).unwrap();
        for first in [0, 400] {
            let written = (first..).find(|block| is_full(try_write(&*store, block * 4096, 4096)));
            let left = available(directory);
            assert!(left >= MIB / 20 - 3 * 4096, "{left} bytes are left");
            assert!(left < MIB / 10, "{left} bytes are left");
            assert!(first > 0 || (200..300).contains(&written.unwrap()));
        }
        // Blocks that have space already can be written again.
        for block in 0..200 {
            write(&*store, block * 4096, &[6; 4096]);
        }
    });
}

#[test]
fn overlay_stays_within_its_limit_through_every_reboot() {
    let directory = tempfile::tempdir().unwrap();
    let layers = opened(directory.path());
    let store = assembled(&layers, Some(MIB));
    for block in 0..128 {
        write(&*store, block * 16 * 4096, &[1; 4096]);
    }
    // A sector that spans two blocks takes both.
    write(&*store, SIZE / 2 - 100, &[2; 200]);
    store.write_zeroes(SIZE / 2 + MIB, 126 * 4096, true).unwrap();
    for store in [store, assembled(&layers, Some(MIB))] {
        assert!(is_too_large(try_write(&*store, SIZE - 4096, 512)));
        assert!(is_too_large(store.write_zeroes(SIZE - 8192, 4096, false)));
        // A range that is partially present is written completely or not at all.
        assert!(is_too_large(try_write(&*store, 127 * 16 * 4096, 2 * 4096)));
        write(&*store, 127 * 16 * 4096, &[3; 4096]);
        assert_eq!(read(&*store, SIZE / 2 - 100, 200), [2; 200]);
    }
    write(&*assembled(&layers, Some(MIB + 4096)), SIZE - 4096, &[4; 512]);
}

#[test]
fn file_to_be_mapped_gets_all_its_space_or_is_refused() {
    on_small_file_system(|directory| {
        let file = File::create(directory.join("pmem")).unwrap();
        file.set_len(2 * MIB).unwrap();
        assert!(is_full(allocate_whole(&file)));
        file.set_len(MIB / 2).unwrap();
        allocate_whole(&file).unwrap();
        assert_eq!(available(directory), MIB / 2);
        assert_eq!(
            std::fs::read(directory.join("pmem")).unwrap(),
            [0; MIB as usize / 2]
        );
    });
}

/// Result of a submission that was done synchronously.
fn submitted(queue: &mut IoQueue, operation: Operation) -> Result<io::Result<()>, Operation> {
    match queue.submit(operation, 1) {
        Submission::Done(result) => Ok(result),
        Submission::NoRoom(operation, _) => Err(operation),
        Submission::Pending => panic!("it was not done at once"),
    }
}

#[test]
fn operation_without_space_is_returned_and_succeeds_when_resubmitted() {
    on_small_file_system(|directory| {
        let layers = opened(directory);
        let raw = File::create_new(directory.join("raw")).unwrap();
        raw.set_len(SIZE).unwrap();
        let raw = Layer {
            file: raw,
            format: Format::Raw,
        };
        // An overlay, which keeps a reserve, and a file written in place, which may take all space.
        for layers in [&layers[..], &[raw]] {
            let store = assembled(layers, None);
            let mut queue = IoQueue::blocking(store.clone());
            fill(directory);
            let mut bytes = vec![0x77; 4096];
            let operation = Operation::Write {
                offset: SIZE / 2,
                from: segments(&mut bytes, 4096),
            };
            let again = submitted(&mut queue, operation).expect_err("no room");
            let again = submitted(&mut queue, again).expect_err("still no room");
            empty(directory);
            submitted(&mut queue, again).unwrap().unwrap();
            assert_eq!(read(&*store, SIZE / 2, 4096), [0x77; 4096]);
        }
        // Its own limit is not a lack of space, because waiting would never end.
        let limited = assembled(&layers, Some(MIB));
        write(&*limited, 0, &[1; 4096]);
        let tight = assembled(&layers, Some(4096));
        let mut bytes = vec![0x77; 4096];
        let operation = Operation::Write {
            offset: SIZE / 4,
            from: segments(&mut bytes, 4096),
        };
        assert!(is_too_large(
            submitted(&mut IoQueue::blocking(tight), operation).expect("an error")
        ));
    });
}
