//! Paging of a plain VM's memory: of its pages, a limited number is in the host's memory, the others are in a
//! paging file (Cellular Disco, section 5.3).
//!
//! [`policy::memory::resident_set`] decides, and this module maps, unmaps, reads and writes. The memory's
//! file is mapped once, and the mapping is registered with a userfaultfd for pages that are missing and for
//! pages that are in the file but not mapped (minor faults). So each page that becomes accessible is made so
//! by this module. Accesses by the kernel, for KVM and for devices' system calls, wait in the same way as
//! those of threads.
//!
//! Threads:
//! * [`faults`]: two threads answer faults, and read pages back;
//! * [`writer`]: one thread unmaps pages, writes them out, and removes them from memory.
//!
//! No change is lost between the write of a page and its removal. `docs/design/paging.md` has the argument;
//! its steps are these invariants:
//! 1. The lock of [`State`] is held for each mapping, each unmapping and each removal of a page, and for the
//!    change of the page's state that goes with it. So a page is mapped only while it is
//!    [`PageState::Resident`](policy::memory::resident_set::PageState), and a page that is being written is
//!    not mapped.
//! 2. Nothing accesses a page that is not mapped but the kernel's I/O that pinned it before. After the page
//!    was unmapped, and before its copy is made, the writer finds an instant without such I/O
//!    ([`Quiescer::io_gap`]).
//! 3. A touch of a page that is being written changes its state under the lock. The page is removed under the
//!    same lock, only if its state is unchanged.
//! 4. A thread that holds the lock accesses no guest memory. The threads of this module access none at all:
//!    they use the memory's file. So no thread that answers faults waits for a fault.
//!
//! [`disk`] is a disk of the guest whose pages are slots of the paging file. [`origins`] records which pages
//! other disks have filled from images, so that these leave memory without a write.
//!
//! A page that can't be read back ends the VM ([`Paging::is_whole`]); a page that can't be written stays in
//! memory.

mod cipher;
mod cursor;
mod disk;
mod faults;
mod guest_pages;
mod images;
mod origins;
#[cfg(test)]
pub(crate) mod rig;
mod store;
mod syscalls;
#[cfg(test)]
mod tests;
mod writer;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use dsm::{FaultDelivery, Userfault, UserfaultError};
use locks::IgnorePoison;
use policy::memory::paging_disk::PagingDisk;
use policy::memory::paging_slots::PagingSlots;
use policy::memory::resident_set::{LIMIT_MIN_PAGES, ResidentSet, WRITE_CLUSTER_PAGES};
use serde_json::{Value, json};

use crate::ending::EndSignal;
use crate::launch::Ending;
use crate::memory::GuestRam;
use crate::quiescer::Quiescer;
use crate::sandbox::{ThreadKind, Threads};
use cipher::SealTable;
pub use cursor::{SegmentCursor, SegmentPosition};
use disk::DiskCounters;
pub use disk::PagingDiskIo;
use guest_pages::GuestPages;
pub use images::DiskImage;
use images::Images;
pub use origins::PageOrigins;
use page::PAGE_BYTES;
use store::PageStore;
pub use syscalls::SYSCALLS;

/// Threads that answer faults: while one reads a page, the other answers what needs no I/O.
const FAULT_THREADS: usize = 2;
/// Pages that a release handles under one hold of the lock: 4 MiB.
const RELEASE_PAGES: u32 = 1024;
/// Slots beyond one for each page of memory and of the paging disk. Pages that were touched again hold theirs
/// until their cluster is written or read, and pages of the disk that are written anew hold two.
const SPARE_SLOTS: u32 = 6 * WRITE_CLUSTER_PAGES;

/// Reason why a VM's memory can't be paged.
#[derive(Debug, thiserror::Error)]
pub enum PagingError {
    /// The host gives no userfaultfd.
    #[error("`resident` is not possible here")]
    Userfault(#[from] UserfaultError),
    /// Accesses by the kernel would fail.
    #[error(
        "`resident` is not possible here: KVM can't wait for pages that are paged out, as this host gives \
         userfaultfd to root only; give access to /dev/userfaultfd (Linux 6.1 has it), set sysctl \
         vm.unprivileged_userfaultfd=1, or leave out `resident`"
    )]
    KernelFails,
    /// The VM resumes.
    #[error(
        "a VM that resumes from a frozen one can't have `resident`: its memory is mapped from files; leave \
         `resident` out"
    )]
    Resumed,
    /// The VM spans cells.
    #[error(
        "a VM that spans cells can't have `resident`: each shard would have to page; leave out one of both"
    )]
    Spanning,
    /// The host refused something.
    #[error("the paging file {name} cannot be used")]
    File {
        /// Name of the file.
        name: String,
        /// Error of the host.
        #[source]
        source: io::Error,
    },
    /// The host refused an operation.
    #[error("the VM's memory cannot be paged")]
    Host(#[from] io::Error),
}

/// Open files and settings of paging.
#[derive(Debug)]
pub struct PagingFiles {
    /// The paging file.
    pub file: File,
    /// Its name, for messages.
    pub name: String,
    /// `/dev/userfaultfd`, if the monitor could open it.
    pub userfaultfd: Option<File>,
    /// Greatest number of bytes of the VM in memory.
    pub resident_bytes: u64,
    /// Size of the virtual paging disk, bytes; 0 if the VM has none.
    pub disk_bytes: u64,
}

/// Events since the pager started.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    zero_faults: u64,
    faults_without_io: u64,
    /// First touches of pages that were read ahead.
    faults_ahead: u64,
    faults_with_io: u64,
    read_pages: u64,
    written_pages: u64,
    zero_pages: u64,
    /// Pages that left memory without a write, as their slots have the same content.
    unchanged_pages: u64,
    /// Pages that left memory without a write, as an image has the same content.
    image_pages: u64,
    /// Pages that were read from images.
    image_reads: u64,
    /// Clusters that could not be written, as I/O into guest memory was always in flight.
    deferred: u64,
    /// Clusters that the paging file did not take.
    refused: u64,
    disk: DiskCounters,
}

/// State of the pages, under the lock.
struct State {
    set: ResidentSet,
    slots: PagingSlots,
    /// Number of the write and tag of each slot.
    seals: SealTable,
    /// The virtual paging disk; without pages if the VM has none.
    disk: PagingDisk,
    counters: Counters,
    /// Set while the paging file takes no pages.
    stalled: Option<Stall>,
}

impl State {
    /// Has pages in memory keep no slots from now on, as the paging file has no room. Returns whether slots
    /// were freed by that.
    fn stop_keeping_slots(&mut self) -> bool {
        let freed = self.set.stop_keeping_slots();
        for slot in &freed {
            self.slots.release(*slot);
        }
        !freed.is_empty()
    }
}

/// A refusal of the paging file.
struct Stall {
    reason: String,
    since: Instant,
}

/// Sizes of a VM's paging.
struct Sizes {
    /// Slots of the paging file.
    slots: u32,
    /// Pages of the virtual paging disk.
    disk: u32,
    resident_bytes: u64,
}

/// Paging of one VM's memory.
pub struct Paging {
    state: Mutex<State>,
    /// Work for the writer.
    wanted: Condvar,
    /// Pages have left memory.
    evicted: Condvar,
    userfault: Userfault,
    memory: GuestPages,
    store: PageStore,
    /// Set when the threads start.
    running: OnceLock<Running>,
    failed: OnceLock<String>,
}

/// The running VM as the pager needs it.
struct Running {
    quiescer: Arc<Quiescer>,
    end: Arc<EndSignal>,
}

impl Paging {
    /// Prepares paging. Called before the sandbox closes, and before the memory is used: its pages stay small
    /// from then on. Pages of `images` stand for pages that disks fill from them.
    ///
    /// # Errors
    /// If the host can't page.
    pub fn open(
        memory: &GuestRam,
        files: PagingFiles,
        images: Vec<DiskImage>,
    ) -> Result<Arc<Self>, PagingError> {
        let PagingFiles {
            file,
            name,
            userfaultfd,
            resident_bytes,
            disk_bytes,
        } = files;
        let wrong = |source| PagingError::File {
            name: name.clone(),
            source,
        };
        let pages = GuestPages::new(memory)?;
        let disk = u32::try_from(disk_bytes / PAGE_BYTES).ok();
        let wanted = disk.and_then(|disk| pages.count().checked_add(disk)?.checked_add(SPARE_SLOTS));
        let (Some(disk), Some(wanted)) = (disk, wanted) else {
            return Err(wrong(io::ErrorKind::FileTooLarge.into()));
        };
        let slots = store::capacity(&file, wanted).map_err(wrong)?;
        let store = PageStore::new(Box::new(file), name.clone())?.with_images(Images::new(slots, images)?);
        let device = userfaultfd.as_ref().map(AsFd::as_fd);
        let userfault = Userfault::open(FaultDelivery::Reader, device)?;
        Self::with(
            pages,
            store,
            Sizes {
                slots,
                disk,
                resident_bytes,
            },
            userfault,
        )
    }

    fn with(
        memory: GuestPages,
        store: PageStore,
        sizes: Sizes,
        userfault: Userfault,
    ) -> Result<Arc<Self>, PagingError> {
        if !userfault.kernel_waits {
            return Err(PagingError::KernelFails);
        }
        let mut set = ResidentSet::new(memory.end(), pages_of(sizes.resident_bytes));
        set.set_image_slots(sizes.slots);
        Ok(Arc::new(Self {
            state: Mutex::new(State {
                set,
                slots: PagingSlots::new(sizes.slots).with_images(store.images().slots().clone()),
                seals: SealTable::new(sizes.slots),
                disk: PagingDisk::new(sizes.disk),
                counters: Counters::default(),
                stalled: None,
            }),
            wanted: Condvar::new(),
            evicted: Condvar::new(),
            userfault,
            memory,
            store,
            running: OnceLock::new(),
            failed: OnceLock::new(),
        }))
    }

    /// Starts to page. Pages that the memory has already are the first of the resident set. `end` is
    /// signalled if a page can't be read back.
    ///
    /// # Errors
    /// If the host refuses a thread or the registration of the memory.
    pub fn start(self: &Arc<Self>, threads: &Threads, end: &Arc<EndSignal>) -> Result<(), PagingError> {
        for addresses in self.memory.addresses() {
            self.userfault.register(addresses, true)?;
        }
        // From here on a page that is touched waits for the threads below.
        {
            let mut state = self.state();
            for page in self.memory.present()?.into_iter().flatten() {
                state.set.touch(page);
            }
        }
        let running = Running {
            quiescer: threads.quiescer().clone(),
            end: end.clone(),
        };
        // It is started once.
        let _ = self.running.set(running);
        for number in 0..FAULT_THREADS {
            let paging = self.clone();
            threads.spawn(ThreadKind::Pager, &format!("page-faults-{number}"), move || {
                paging.serve_faults();
            })?;
        }
        let paging = self.clone();
        threads.spawn(ThreadKind::Pager, "page-writer", move || paging.write_pages())?;
        // The userfaultfd stays open until the process ends. If it were closed, a thread that waits for a
        // page which can't be read would go on with a page of zeroes.
        std::mem::forget(self.clone());
        Ok(())
    }

    /// Sets the greatest number of bytes in memory, 16 MiB at least. Pages beyond it leave memory from now
    /// on.
    pub fn set_limit(&self, bytes: u64) {
        let mut state = self.state();
        state.set.set_limit(pages_of(bytes));
        state.stalled = None;
        drop(state);
        self.wanted.notify_one();
    }

    /// Releases pages that the guest does not use, with their slots: the next access finds zeroes.
    ///
    /// # Errors
    /// The host's error; the VM ends then.
    pub fn release(&self, pages: Range<u32>) -> io::Result<()> {
        for start in pages.clone().step_by(RELEASE_PAGES as usize) {
            let part = start..pages.end.min(start + RELEASE_PAGES);
            let mut state = self.state();
            let State { set, slots, .. } = &mut *state;
            for page in part.clone() {
                if let Some(slot) = set.release(page) {
                    slots.release(slot);
                }
            }
            self.remove(part)?;
        }
        Ok(())
    }

    /// Removes pages from memory whose state has changed. The caller holds the lock. If the host refuses, the
    /// guest can access their former content: the VM ends.
    fn remove(&self, pages: Range<u32>) -> io::Result<()> {
        self.memory.punch(pages).inspect_err(|error| {
            self.fail(format!("a page cannot be removed from the VM's memory: {error}"));
        })
    }

    /// Returns whether each page can still be read. Otherwise threads wait for pages forever.
    pub fn is_whole(&self) -> bool {
        self.failed.get().is_none()
    }

    /// Returns the counters, for people and programs.
    pub fn status(&self) -> Value {
        let state = self.state();
        let (counts, ahead) = (state.set.counts(), state.set.ahead());
        let bytes = |pages: u32| u64::from(pages) * PAGE_BYTES;
        let Counters {
            zero_faults,
            faults_without_io,
            faults_ahead,
            faults_with_io,
            read_pages,
            written_pages,
            zero_pages,
            unchanged_pages,
            image_pages,
            image_reads,
            deferred,
            refused,
            disk,
        } = state.counters;
        json!({
            "limit_bytes": bytes(counts.limit),
            "resident_bytes": bytes(counts.resident),
            "second_chance_bytes": bytes(counts.second_chance + counts.writing),
            "read_ahead_bytes": bytes(counts.read_ahead),
            "paged_out_bytes": bytes(counts.paged_out + counts.reading),
            "faults": {
                "zero": zero_faults,
                "without_io": faults_without_io,
                "read_ahead": faults_ahead,
                "with_io": faults_with_io,
            },
            "read_bytes": read_pages * PAGE_BYTES,
            "written_bytes": written_pages * PAGE_BYTES,
            "zero_bytes": zero_pages * PAGE_BYTES,
            "unchanged_bytes": unchanged_pages * PAGE_BYTES,
            "images": {
                "paged_out_bytes": bytes(counts.in_images),
                "left_bytes": image_pages * PAGE_BYTES,
                "read_bytes": image_reads * PAGE_BYTES,
            },
            "read_ahead": {
                "window_pages": ahead.window(),
                "pages": ahead.read_pages(),
                "used_pages": ahead.used_pages(),
                "unused_pages": ahead.unused_pages(),
            },
            "deferred_writes": deferred,
            "refused_writes": refused,
            "stalled": state.stalled.as_ref().map(|stall| &stall.reason),
            "file": {
                "name": self.store.name(),
                "bytes": bytes(state.slots.capacity()),
                "free_bytes": bytes(state.slots.free()),
            },
            "disk": disk.status(&state.disk),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    /// Ends the VM: a page can't be read, or the host refused a step after which a page would be lost.
    fn fail(&self, detail: String) {
        let detail = self.failed.get_or_init(|| detail).clone();
        if let Some(running) = self.running.get() {
            running.end.end(Ending::ShardFailed { detail });
        }
    }
}

/// Returns the number of pages of a limit.
fn pages_of(bytes: u64) -> u32 {
    let pages = u32::try_from(bytes / PAGE_BYTES).unwrap_or(u32::MAX);
    pages.max(LIMIT_MIN_PAGES)
}
