//! Tests of writes that find no room on the host, for disks with the policies to fail and to pause.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use diskstore::disk::{Origin, Segments, Store, SyncState};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::driver::*;
use crate::launch::OnFull;
use crate::virtio::VirtioDevice;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
/// A status value that no device writes.
const UNANSWERED: u8 = 0xff;

/// A disk whose writes fail with this error number, unless it is 0.
struct Failing {
    disk: Arc<dyn Store>,
    errno: AtomicI32,
}

impl Failing {
    fn check(&self) -> io::Result<()> {
        match self.errno.load(Ordering::SeqCst) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

impl Store for Failing {
    fn size(&self) -> u64 {
        self.disk.size()
    }
    fn read(&self, into: &Segments, offset: u64) -> io::Result<()> {
        self.disk.read(into, offset)
    }
    fn write(&self, from: &Segments, offset: u64) -> io::Result<()> {
        self.check()?;
        self.disk.write(from, offset)
    }
    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.disk.discard(offset, bytes)
    }
    fn write_zeroes(&self, offset: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        self.check()?;
        self.disk.write_zeroes(offset, bytes, unmap)
    }
    fn write_back(&self) -> io::Result<Option<usize>> {
        self.disk.write_back()
    }
    fn sync_state(&self) -> &SyncState {
        self.disk.sync_state()
    }
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        self.disk.files()
    }
    fn bases(&self) -> Vec<usize> {
        self.disk.bases()
    }
    fn origin(&self, offset: u64, bytes: u64) -> Origin {
        self.disk.origin(offset, bytes)
    }
}

struct Disk {
    driver: Driver,
    store: Arc<Failing>,
    path: std::path::PathBuf,
    _directory: tempfile::TempDir,
}

fn disk(on_full: OnFull, errno: i32, without: u64) -> Disk {
    let directory = tempfile::tempdir().unwrap();
    let path = numbered(directory.path(), 256);
    let store = Arc::new(Failing {
        disk: raw_store(&path, false),
        errno: AtomicI32::new(errno),
    });
    Disk {
        driver: Driver::with(store.clone(), false, 1, without, on_full),
        store,
        path,
        _directory: directory,
    }
}

impl Disk {
    /// Offers request number `index` of `kind`, with separate addresses for its buffers.
    fn offer(&mut self, index: u64, kind: u32, sector: u64) {
        let (header, status, data) = place(index);
        self.driver.header(header, kind, sector);
        self.driver.put(status, &[UNANSWERED]);
        let data = if kind == VIRTIO_BLK_T_IN {
            writable(data, 512)
        } else {
            self.driver.put(data, &[0xa0 + index as u8; 512]);
            readable(data, 512)
        };
        self.driver
            .offer(0, &[readable(header, 16), data, writable(status, 1)]);
        self.driver.notify(0);
    }

    fn status(&self, index: u64) -> u8 {
        self.driver.bytes(place(index).1, 1)[0]
    }

    fn waiting(&self) -> u64 {
        self.driver.block.metrics().snapshot().waiting
    }

    #[track_caller]
    fn until(&self, what: &str, is: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is(self) {
            assert!(start.elapsed() < WAIT_TIMEOUT, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn sector(&self, sector: usize) -> u8 {
        std::fs::read(&self.path).unwrap()[sector * 512]
    }
}

/// Returns the addresses of a request's header, status and data.
fn place(index: u64) -> (u64, u64, u64) {
    (HEADER + index * 16, STATUS + index, DATA + index * 512)
}

#[test]
fn write_without_room_completes_once_there_is_room_and_reads_overtake_it() {
    for (errno, without) in [(libc::ENOSPC, 0), (libc::EDQUOT, NO_FLUSH)] {
        let mut disk = disk(OnFull::Pause, errno, without);
        disk.offer(0, VIRTIO_BLK_T_OUT, 9);
        disk.until("the write waits", |disk| disk.waiting() == 1);
        disk.offer(1, VIRTIO_BLK_T_IN, 9);
        disk.until("the read is answered", |disk| disk.status(1) == OK);
        assert_eq!(disk.driver.bytes(place(1).2, 512), [9; 512]);
        // Longer than several retries.
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!((disk.status(0), disk.waiting()), (UNANSWERED, 1));
        disk.store.errno.store(0, Ordering::SeqCst);
        assert!(disk.driver.wait(0));
        assert_eq!((disk.status(0), disk.waiting()), (OK, 0));
        assert_eq!(disk.sector(9), 0xa0);
        assert_eq!(disk.driver.block.metrics().snapshot().failed, 0);
    }
}

#[test]
fn every_request_of_a_full_queue_may_wait_and_none_is_lost() {
    let mut disk = disk(OnFull::Pause, libc::ENOSPC, 0);
    // As many chains as fit into the table of descriptors.
    let requests = u64::from(QUEUE_SIZE) / 3;
    for index in 0..requests {
        disk.offer(index, VIRTIO_BLK_T_OUT, index);
    }
    disk.until("all wait", |disk| disk.waiting() == requests);
    disk.store.errno.store(0, Ordering::SeqCst);
    assert!(disk.driver.wait(0));
    for index in 0..requests {
        assert_eq!(disk.status(index), OK);
        assert_eq!(disk.sector(index as usize), 0xa0 + index as u8);
    }
    assert_eq!(disk.waiting(), 0);
}

#[test]
fn full_disk_is_an_error_under_that_policy_and_other_errors_always_are() {
    for (on_full, errno) in [
        (OnFull::Error, libc::ENOSPC),
        (OnFull::Error, libc::EDQUOT),
        (OnFull::Pause, libc::EIO),
        // The limit of an overlay.
        (OnFull::Pause, libc::EFBIG),
    ] {
        let mut disk = disk(on_full, errno, 0);
        disk.offer(0, VIRTIO_BLK_T_OUT, 9);
        assert!(disk.driver.wait(0));
        assert_eq!((disk.status(0), disk.waiting()), (IOERR, 0));
        disk.driver.assert_works();
    }
}

#[test]
fn reset_drops_requests_that_wait_for_room() {
    let mut disk = disk(OnFull::Pause, libc::ENOSPC, 0);
    // At addresses other than those of `assert_works`.
    disk.offer(1, VIRTIO_BLK_T_OUT, 9);
    let range = [&30_u64.to_le_bytes()[..], &2_u32.to_le_bytes(), &[0; 4]].concat();
    let (header, status, data) = place(2);
    disk.driver.header(header, VIRTIO_BLK_T_WRITE_ZEROES, 0);
    disk.driver.put(data, &range);
    disk.driver.put(status, &[UNANSWERED]);
    let buffers = [readable(header, 16), readable(data, 16), writable(status, 1)];
    disk.driver.offer(0, &buffers);
    disk.driver.notify(0);
    disk.until("both wait", |disk| disk.waiting() == 2);
    disk.driver.block.reset();
    assert_eq!(disk.waiting(), 0);
    disk.store.errno.store(0, Ordering::SeqCst);
    disk.driver.activate(1, 0);
    disk.driver.assert_works();
    // Longer than the time until the next retry.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((disk.status(1), disk.status(2)), (UNANSWERED, UNANSWERED));
    assert_eq!((disk.sector(9), disk.sector(30)), (9, 30));
}
