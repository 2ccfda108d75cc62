//! Paged memory without a guest, for tests.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dsm::PAGE_LEN;
use nix::sys::memfd::MFdFlags;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use super::store::Storage;
use super::*;

pub(crate) const MIB: u64 = 1 << 20;
/// The least limit.
pub(crate) const LIMIT_BYTES: u64 = 16 * MIB;
pub(crate) const LIMIT_PAGES: u32 = (LIMIT_BYTES / PAGE_BYTES) as u32;
/// Time for anything to happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A paging file whose faults a test chooses.
pub(crate) struct FaultyFile {
    file: File,
    faults: Arc<Faults>,
}

#[derive(Default)]
pub(crate) struct Faults {
    pub(crate) read_error: AtomicBool,
    pub(crate) write_error: AtomicBool,
}

impl Storage for FaultyFile {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        match self.faults.read_error.load(Ordering::SeqCst) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            // A short read is no fault.
            false => {
                let most = bytes.len().min(PAGE_LEN + 5);
                FileExt::read_at(&self.file, &mut bytes[..most], offset)
            }
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        match self.faults.write_error.load(Ordering::SeqCst) {
            true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            false => FileExt::write_at(&self.file, &bytes[..bytes.len().min(PAGE_LEN + 5)], offset),
        }
    }
}

pub(crate) struct Rig {
    pub(crate) paging: Arc<Paging>,
    pub(crate) memory: GuestRam,
    /// The memory's own file.
    pub(crate) memfd: File,
    pub(crate) file: File,
    pub(crate) faults: Arc<Faults>,
    pub(crate) end: Arc<EndSignal>,
    pub(crate) quiescer: Arc<Quiescer>,
    /// Starts further threads of the VM.
    pub(crate) threads: Threads,
}

/// Paged memory of `mib` MiB with the least limit, and a paging file of `slots` slots. The first page is
/// written before paging starts, as a kernel's.
pub(crate) fn rig(mib: u64, slots: u32) -> Rig {
    rig_with_disk(mib, slots, 0)
}

/// The same with a paging disk of `disk` pages.
pub(crate) fn rig_with_disk(mib: u64, slots: u32, disk: u32) -> Rig {
    rig_with_images(mib, slots, disk, Vec::new())
}

/// The same with images.
pub(crate) fn rig_with_images(mib: u64, slots: u32, disk: u32, images: Vec<DiskImage>) -> Rig {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let memfd = nix::sys::memfd::memfd_create(c"test", flags).unwrap();
    let memfd = File::from(memfd);
    memfd.set_len(mib * MIB).unwrap();
    let file = FileOffset::new(memfd.try_clone().unwrap(), 0);
    let range = (GuestAddress(0), (mib * MIB) as usize, Some(file));
    let memory: GuestRam = Arc::new(GuestMemoryMmap::from_ranges_with_files([range]).unwrap());
    let (file, faults) = (tempfile::tempfile().unwrap(), Arc::new(Faults::default()));
    let storage = FaultyFile {
        file: file.try_clone().unwrap(),
        faults: faults.clone(),
    };
    let store = PageStore::new(Box::new(storage), "/x/paging".to_owned()).unwrap();
    let store = store.with_images(Images::new(slots, images).unwrap());
    let userfault = Userfault::open(FaultDelivery::Reader, None).unwrap();
    let pages = GuestPages::new(&memory).unwrap();
    let sizes = Sizes {
        slots,
        disk,
        resident_bytes: LIMIT_BYTES,
    };
    let paging = Paging::with(pages, store, sizes, userfault).unwrap();
    memory.write_obj(0x6b65_726e_u64, GuestAddress(8)).unwrap();
    let (threads, end) = (Threads::sealed(), Arc::new(EndSignal::new().unwrap()));
    paging.start(&threads, &end).unwrap();
    let quiescer = threads.quiescer().clone();
    Rig {
        paging,
        memory,
        memfd,
        file,
        faults,
        end,
        quiescer,
        threads,
    }
}

impl Rig {
    /// Writes numbers at both ends of a page.
    pub(crate) fn write(&self, page: u32, value: u64) {
        for at in [0, PAGE_BYTES - 8] {
            let address = GuestAddress(u64::from(page) * PAGE_BYTES + at);
            self.memory.write_obj(value.wrapping_add(at), address).unwrap();
        }
    }

    pub(crate) fn check(&self, page: u32, value: u64) {
        for at in [0, PAGE_BYTES - 8] {
            let address = GuestAddress(u64::from(page) * PAGE_BYTES + at);
            let read: u64 = self.memory.read_obj(address).unwrap();
            assert_eq!(read, value.wrapping_add(at), "page {page}");
        }
    }

    pub(crate) fn first_word(&self, page: u32) -> u64 {
        self.memory
            .read_obj(GuestAddress(u64::from(page) * PAGE_BYTES))
            .unwrap()
    }

    pub(crate) fn number(&self, path: &str) -> u64 {
        self.paging
            .status()
            .pointer(path)
            .and_then(Value::as_u64)
            .unwrap()
    }

    pub(crate) fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < deadline, "{what}: {}", self.paging.status());
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until memory is within the limit.
    pub(crate) fn settle(&self) {
        self.wait("the limit", || {
            let counts = self.paging.state().set.counts();
            counts.in_memory() <= counts.limit && counts.writing == 0
        });
        assert!(self.memfd.metadata().unwrap().blocks() * 512 <= self.number("/limit_bytes"));
    }

    /// Writes to twice as many pages as may be in memory, from page `first` on.
    pub(crate) fn fill_from(&self, first: u32) {
        (first..first + 2 * LIMIT_PAGES).for_each(|page| self.write(page, 1000 + u64::from(page)));
        self.settle();
    }

    /// Does the same from the first page on.
    pub(crate) fn fill(&self) {
        self.fill_from(0);
    }
}
