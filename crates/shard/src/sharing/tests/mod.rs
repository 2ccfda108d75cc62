//! Tests of the mechanism on real mappings, without KVM: guest memory is this process's, and the test acts as
//! the guest.

mod background;
mod frozen;
mod leased;
mod model;
mod page_map;
mod read;
mod scan;

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use diskstore::disk::{Format, Segments, Store, assemble};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::mapper::Mapper;
use super::pages::PAGE_BYTES;
use super::{Advice, Background, DiskSharing, PressureMonitor};
use crate::arch::x86_64::layout::Layout;
use crate::launch::{MemoryLaunch, Pages, Share};
use crate::memory::{self, GuestRam};
use crate::quiescer::Quiescer;

const RAM_BYTES: u64 = 64 << 20;
/// First guest page that the tests use.
const FIRST: u64 = 1024;
const IMAGE_PAGES: u64 = 64;

/// Returns guest memory in a new file, or in an existing one.
pub(crate) fn ram_of(file: Option<File>) -> GuestRam {
    let layout = Layout::new(RAM_BYTES, &[]).unwrap();
    let launch = MemoryLaunch {
        bytes: RAM_BYTES,
        pages: Pages::Small,
        prefault: false,
        host_nodes: Vec::new(),
        homes: Vec::new(),
        paging: None,
        scan: false,
    };
    memory::create(&layout, &launch, &[], file).unwrap()
}

/// Returns byte `at` of the image.
fn byte(at: u64) -> u8 {
    (at / PAGE_BYTES * 7 + at % 251 + 1) as u8
}

fn image_bytes() -> Vec<u8> {
    (0..IMAGE_PAGES * PAGE_BYTES).map(byte).collect()
}

fn image() -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&image_bytes()).unwrap();
    file
}

struct Vm {
    ram: GuestRam,
    mapper: Arc<Mapper>,
    store: Arc<dyn Store>,
    disk: DiskSharing,
}

fn vm(share: Share) -> Vm {
    vm_on(image(), share)
}

fn vm_on(image: File, share: Share) -> Vm {
    let ram = ram_of(None);
    let mapper = Mapper::new(&ram, vec![image.try_clone().unwrap()], Advice::Ordinary).unwrap();
    with(ram, mapper, image, share)
}

/// Returns a VM whose memory the host scans.
fn scanned_vm_on(image: File, share: Share) -> Vm {
    let ram = ram_of(None);
    let mapper = Mapper::new(&ram, vec![image.try_clone().unwrap()], Advice::Scan).unwrap();
    mapper.begin_scan(true).unwrap();
    with(ram, mapper, image, share)
}

fn with(ram: GuestRam, mapper: Arc<Mapper>, image: File, share: Share) -> Vm {
    let store = assemble(vec![(image, Format::Raw)], true).unwrap();
    let disk = DiskSharing {
        mapper: mapper.clone(),
        pressure: Arc::new(PressureMonitor::open(mapper.images(), &[])),
        share,
        images: vec![Some(0)],
    };
    Vm {
        ram,
        mapper,
        store,
        disk,
    }
}

impl Vm {
    fn segments(&self, pieces: &[(u64, u64)]) -> Segments {
        let mut segments = Segments::new();
        for &(at, bytes) in pieces {
            let host = self.ram.get_host_address(GuestAddress(at)).unwrap();
            // SAFETY: guest memory of this test, which lives until its end.
            unsafe { segments.push(host, bytes as usize) };
        }
        segments
    }

    /// Reads a disk as a queue does.
    fn read(&self, pieces: &[(u64, u64)], offset: u64) {
        let into = self.segments(pieces);
        match self.disk.read(&*self.store, offset, &into) {
            Some(result) => result.unwrap(),
            None => {
                self.disk.before_copy(&*self.store, offset, &into).unwrap();
                self.store.read(&into, offset).unwrap();
            }
        }
    }

    fn bytes(&self, at: u64, bytes: u64) -> Vec<u8> {
        let mut content = vec![0; bytes as usize];
        self.ram.read_slice(&mut content, GuestAddress(at)).unwrap();
        content
    }

    fn counted(&self, name: &str) -> u64 {
        self.mapper.status()[name].as_u64().unwrap()
    }

    /// Returns the number of pages in the memory's file.
    fn plain_pages(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        use vm_memory::GuestMemoryRegion;
        let region = self.ram.iter().next().unwrap();
        region.file_offset().unwrap().file().metadata().unwrap().blocks() * 512 / PAGE_BYTES
    }

    /// Runs the background thread until `done` or a limit.
    fn background(&self, share: Share, done: impl Fn(&Self) -> bool) {
        let background = Background::open(self.mapper.clone(), self.disk.pressure.clone(), vec![share]);
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || background.run(&Quiescer::new(), &stopped));
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done(self) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(stop);
        thread.join().unwrap();
        assert!(done(self), "{}", self.mapper.status());
    }
}

const AT: u64 = FIRST * PAGE_BYTES;
