//! Memory of a region: one file, mapped twice.
//!
//! The node's threads use the *view*. A page of it is accessible only as far as the coherence protocol
//! permits; any other access blocks, and a userfaultfd reports it. The *alias* reads and writes contents in
//! place, whatever the view permits. It is locked in memory, as a page that were swapped out would return
//! without a report.
//!
//! A page becomes read-only or unmapped in one step, so there is no moment in which a read-only page is
//! writable. Newer kernels (6.4) map pages of the page cache that way ([`Method::Continue`]: 0.3 us; to unmap
//! one takes 1.1 us). On older kernels the view maps whatever the page cache has, which must be exactly what
//! may be read. Pages are copied in from a second file, the *shadow*, and copied back there and punched out
//! ([`Method::Copy`]: 1.1 us and 2.4 us).

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use coherence::Right;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::PAGE_LEN;
use crate::userfault::{FaultDelivery, Userfault, UserfaultError};

/// Largest number of pages, 32 GiB: a guest's 16 GiB with the holes between them.
pub const PAGES_MAX: u32 = 1 << 23;
/// Largest number of successive pages of one stripe. Each such row needs one mapping of the kernel.
const ROW_PAGES_MAX: u32 = 512;

/// How pages are mapped in the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Method {
    /// The page is written through the alias, and mapped from the page cache.
    Continue,
    /// The kernel copies the page from the shadow into an empty page cache.
    Copy,
}

/// How a region is mapped and served.
#[derive(Clone, Copy, Debug)]
pub struct RegionOptions<'a> {
    /// Receiver of faults.
    pub delivery: FaultDelivery,
    /// `/dev/userfaultfd`, opened by a process that may.
    pub device: Option<BorrowedFd<'a>>,
    /// Name of the files among the process's mappings.
    pub name: &'a CStr,
}

impl Default for RegionOptions<'_> {
    fn default() -> Self {
        Self {
            delivery: FaultDelivery::Reader,
            device: None,
            name: c"dsm",
        }
    }
}

/// Reason why a region can't be made.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The number of pages is out of range.
    #[error("a region has from 1 to {PAGES_MAX} pages, not {0}")]
    Size(u32),
    /// The kernel refused an operation.
    #[error("can't {0} the region's memory: {1}")]
    Refused(&'static str, #[source] io::Error),
    /// The memory can't be locked, and this host swaps.
    #[error(
        "the region's memory can't be locked ({0}) and this host swaps; raise RLIMIT_MEMLOCK or turn swap off"
    )]
    Swap(io::Error),
    /// Faults can't be received.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
}

/// A mapped region. Dropping it unmaps the memory.
#[derive(Debug)]
pub struct Region {
    file: File,
    view: NonNull<u8>,
    alias: NonNull<u8>,
    /// Contents of unmapped pages, with [`Method::Copy`].
    shadow: Option<NonNull<u8>>,
    shadow_file: Option<File>,
    pages: u32,
    stripes: u16,
    /// Successive pages of one stripe.
    row_pages: u32,
    method: Method,
    /// Userfaultfd of each stripe.
    userfaults: Vec<Userfault>,
    /// Right with which each page is mapped in the view. Only the page's server writes it.
    mapped: Vec<AtomicU8>,
}

// SAFETY: the mappings belong to no thread, and their contents are accessed by pointers only, never by
// references.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Creates a region in which every access faults, with a userfaultfd for each of `lanes` stripes.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn with(
        pages: u32,
        lanes: u16,
        method: Option<Method>,
        options: RegionOptions<'_>,
    ) -> Result<Self, RegionError> {
        if pages == 0 || pages > PAGES_MAX {
            return Err(RegionError::Size(pages));
        }
        let lanes = lanes.max(1);
        let row_pages = row_pages(pages, lanes);
        let pages = pages.next_multiple_of(row_pages * u32::from(lanes));
        let refused = |what| move |error: nix::Error| RegionError::Refused(what, error.into());
        let file: File = memfd_create(options.name, MFdFlags::MFD_CLOEXEC)
            .map_err(refused("create"))?
            .into();
        let bytes = pages as usize * PAGE_LEN;
        nix::unistd::ftruncate(&file, bytes as i64).map_err(refused("size"))?;
        let view = map(&file, bytes)?;
        let alias = map(&file, bytes).inspect_err(|_| unmap(view, bytes))?;
        let mut region = Self {
            file,
            view,
            alias,
            shadow: None,
            shadow_file: None,
            pages,
            stripes: lanes,
            row_pages,
            method: Method::Copy,
            userfaults: Vec::new(),
            mapped: (0..pages).map(|_| AtomicU8::new(Right::None as u8)).collect(),
        };
        region.prepare_mappings(bytes)?;
        region.method = match method {
            Some(method) => method,
            None => region.best_method(options.device)?,
        };
        if region.method == Method::Copy {
            let shadow =
                File::from(memfd_create(options.name, MFdFlags::MFD_CLOEXEC).map_err(refused("create"))?);
            nix::unistd::ftruncate(&shadow, bytes as i64).map_err(refused("size"))?;
            region.shadow = Some(map(&shadow, bytes)?);
            region.shadow_file = Some(shadow);
        }
        for _ in 0..region.stripes {
            region
                .userfaults
                .push(Userfault::open(options.delivery, options.device)?);
        }
        for row in (0..pages).step_by(region.row_pages as usize) {
            let end = row + region.row_pages;
            let userfault = &region.userfaults[usize::from(region.stripe_of(row))];
            userfault.register(region.addresses(row..end), region.method == Method::Continue)?;
        }
        Ok(region)
    }

    /// Finds out by a trial whether pages of the page cache can be mapped read-only.
    fn best_method(&self, device: Option<BorrowedFd<'_>>) -> Result<Method, RegionError> {
        let page = map(&self.file, PAGE_LEN)?;
        let tried = (|| {
            let userfault = Userfault::open(FaultDelivery::Reader, device)?;
            let at = page.as_ptr() as usize;
            userfault.register(at..at + PAGE_LEN, true)?;
            // The page must be in the page cache; its contents are zero.
            // SAFETY: the first page of the alias; no other code has the region yet.
            unsafe { self.alias.as_ptr().write_volatile(0) };
            Ok(match userfault.map_cached(at..at + PAGE_LEN, false) {
                Ok(()) => Method::Continue,
                Err(_) => Method::Copy,
            })
        })();
        unmap(page, PAGE_LEN);
        if let Ok(Method::Copy) = tried {
            punch(&self.file, 0..1).map_err(|error| RegionError::Refused("punch a hole into", error))?;
        }
        tried
    }

    /// Disables huge pages, which the first restriction would split, and swapping.
    fn prepare_mappings(&self, bytes: usize) -> Result<(), RegionError> {
        for mapping in [self.view, self.alias] {
            // SAFETY: our own mapping; only the size of its pages changes. Kernels without huge pages refuse,
            // which is as good.
            unsafe { libc::madvise(mapping.as_ptr().cast(), bytes, libc::MADV_NOHUGEPAGE) };
        }
        // SAFETY: our own mapping; pages are locked as they come.
        let locked = unsafe { libc::mlock2(self.alias.as_ptr().cast(), bytes, libc::MLOCK_ONFAULT as _) };
        if locked == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
        if swaps.lines().count() > 1 {
            return Err(RegionError::Swap(error));
        }
        Ok(())
    }

    /// Returns the view, which the node's threads use.
    pub fn view(&self) -> *mut u8 {
        self.view.as_ptr()
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns how pages are mapped in the view.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Returns whether accesses by the kernel (`read(2)` into the region, a virtual machine's) block as those
    /// of threads do.
    pub fn kernel_waits(&self) -> bool {
        self.userfaults.iter().all(|userfault| userfault.kernel_waits)
    }

    /// Returns the aligned block of at most `pages` pages of one stripe that contains the page.
    pub fn block_of(&self, page: u32, pages: u32) -> Range<u32> {
        let pages = pages.min(self.row_pages);
        let row = page / self.row_pages * self.row_pages;
        let start = row + (page - row) / pages * pages;
        start..(start + pages).min(row + self.row_pages)
    }

    /// Returns the stripe of a page. Rows of pages go to the stripes in turn.
    pub fn stripe_of(&self, page: u32) -> u16 {
        ((page / self.row_pages) % u32::from(self.stripes)) as u16
    }

    /// Returns the number of pages after which the stripes repeat.
    pub fn stripe_cycle_pages(&self) -> u32 {
        self.row_pages * u32::from(self.stripes)
    }

    /// Returns the number that the coherence engines use for a page.
    pub fn striped(&self, page: u32) -> u32 {
        let (row, stripes) = (page / self.row_pages, u32::from(self.stripes));
        (row / stripes * self.row_pages + page % self.row_pages) * stripes + row % stripes
    }

    /// Returns the page that has this number in the coherence engines.
    pub fn unstriped(&self, number: u32) -> u32 {
        let (within, stripes) = (number / u32::from(self.stripes), u32::from(self.stripes));
        let row = within / self.row_pages * stripes + number % stripes;
        row * self.row_pages + within % self.row_pages
    }

    /// Returns the page of an address in the view.
    pub fn page_at(&self, address: usize) -> Option<u32> {
        let page = address.checked_sub(self.view.as_ptr() as usize)? / PAGE_LEN;
        u32::try_from(page).ok().filter(|page| *page < self.pages)
    }

    /// Returns the userfaultfd of a stripe.
    pub fn userfault(&self, stripe: u16) -> &Userfault {
        &self.userfaults[usize::from(stripe)]
    }

    /// Returns the right with which a page is mapped in the view.
    pub fn mapped(&self, page: u32) -> Right {
        match self.mapped[page as usize].load(Ordering::Relaxed) {
            0 => Right::None,
            1 => Right::Read,
            _ => Right::Write,
        }
    }

    /// Returns the page's bytes, whatever the view permits. Valid until its right changes from or to none.
    pub fn bytes(&self, page: u32) -> *mut [u8; PAGE_LEN] {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        let base = match self.shadow {
            Some(shadow) if self.mapped(page) == Right::None => shadow,
            _ => self.alias,
        };
        // SAFETY: within the mapping.
        unsafe { base.as_ptr().add(page as usize * PAGE_LEN).cast() }
    }

    /// Zeroes a page that no node has written.
    pub fn clear(&self, page: u32) {
        if self.mapped(page) != Right::None {
            // The page was never written.
            return;
        }
        // SAFETY: the page is not in the view, so no thread reads it; the page server is its only writer.
        unsafe { self.bytes(page).cast::<u8>().write_bytes(0, PAGE_LEN) };
    }

    /// Maps a page in the view with a right, and wakes the threads that wait for it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open(&self, page: u32, right: Right) -> io::Result<()> {
        let userfault = self.userfault(self.stripe_of(page));
        let at = self.view_of(page);
        let writable = right == Right::Write;
        match (self.mapped(page), self.method) {
            (Right::None, Method::Continue) => {
                userfault.map_cached(self.addresses(page..page + 1), writable)?;
            }
            (Right::None, Method::Copy) => {
                // SAFETY: a page of the shadow; the page server is its only writer.
                userfault.map_copy(at, unsafe { &*self.bytes(page) }, writable)?;
            }
            (Right::Read, _) if writable => userfault.set_writable(at, true)?,
            // The reply to the first of several waiting threads was enough.
            _ => userfault.wake(at)?,
        }
        self.note(page, right.max(self.mapped(page)));
        Ok(())
    }

    /// Maps zero pages of one stripe in the view for writing.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn map_zero(&self, pages: Range<u32>) -> io::Result<()> {
        let userfault = self.userfault(self.stripe_of(pages.start));
        match self.method {
            Method::Continue => {
                pages.clone().for_each(|page| self.clear(page));
                userfault.map_cached(self.addresses(pages.clone()), true)?;
            }
            Method::Copy => userfault.map_zeroes(self.addresses(pages.clone()))?,
        }
        pages.for_each(|page| self.note(page, Right::Write));
        Ok(())
    }

    /// Maps a page in the view with its right if it is not, and wakes the threads that wait for it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn retry_fault(&self, page: u32) -> io::Result<()> {
        let (userfault, at) = (self.userfault(self.stripe_of(page)), self.view_of(page));
        let writable = self.mapped(page) == Right::Write;
        if self.mapped(page) != Right::None && self.method == Method::Continue {
            ignore_existing(userfault.map_cached(self.addresses(page..page + 1), writable))?;
        }
        if writable {
            userfault.set_writable(at, true)?;
        }
        userfault.wake(at)
    }

    /// Reduces the right to a page. Once this returns no thread of the node has more than `right`.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn restrict(&self, page: u32, right: Right) -> io::Result<()> {
        match (self.mapped(page), right) {
            (Right::Write, Right::Read) => {
                let userfault = self.userfault(self.stripe_of(page));
                userfault.set_writable(self.view_of(page), false)?;
            }
            (Right::Write | Right::Read, Right::None) => match self.method {
                Method::Continue => {
                    let at = self.view_of(page) as *mut libc::c_void;
                    // SAFETY: our own mapping of a file: the page stays in the page cache, and a thread that
                    // touches it blocks.
                    if unsafe { libc::madvise(at, PAGE_LEN, libc::MADV_DONTNEED) } != 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Method::Copy => self.copy_to_shadow(page)?,
            },
            _ => return Ok(()),
        }
        self.note(page, right);
        Ok(())
    }

    /// Moves a page from the view to the shadow.
    fn copy_to_shadow(&self, page: u32) -> io::Result<()> {
        if self.mapped(page) == Right::Write {
            self.userfault(self.stripe_of(page))
                .set_writable(self.view_of(page), false)?;
        }
        let from = self.bytes(page);
        if let Some(shadow) = self.shadow {
            // SAFETY: both within their mappings, which are different; no thread can write the page any more,
            // and the page server is the shadow's only user.
            unsafe {
                shadow
                    .as_ptr()
                    .add(page as usize * PAGE_LEN)
                    .cast::<[u8; PAGE_LEN]>()
                    .copy_from(from, 1)
            };
        }
        punch(&self.file, page..page + 1)
    }

    /// Returns the memory of pages to the host. On return the view has none of them, and their contents are
    /// gone.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn free(&self, pages: Range<u32>) -> io::Result<()> {
        for file in [Some(&self.file), self.shadow_file.as_ref()]
            .into_iter()
            .flatten()
        {
            punch(file, pages.clone())?;
        }
        pages.for_each(|page| self.note(page, Right::None));
        Ok(())
    }

    /// Returns the memory of the host that the region uses, bytes.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn resident_bytes(&self) -> io::Result<u64> {
        const SECTOR_BYTES: u64 = 512;
        let files = [Some(&self.file), self.shadow_file.as_ref()]
            .into_iter()
            .flatten();
        let sectors: io::Result<u64> = files.map(|file| Ok(file.metadata()?.blocks())).sum();
        Ok(sectors? * SECTOR_BYTES)
    }

    fn note(&self, page: u32, right: Right) {
        self.mapped[page as usize].store(right as u8, Ordering::Relaxed);
    }

    fn view_of(&self, page: u32) -> usize {
        self.view.as_ptr() as usize + page as usize * PAGE_LEN
    }

    fn addresses(&self, pages: Range<u32>) -> Range<usize> {
        self.view_of(pages.start)..self.view_of(pages.end)
    }
}

/// Returns the length of a row: small enough that each stripe has several rows, unless the region is tiny.
fn row_pages(pages: u32, lanes: u16) -> u32 {
    (pages / (u32::from(lanes) * 8)).clamp(1, ROW_PAGES_MAX)
}

impl Drop for Region {
    fn drop(&mut self) {
        let bytes = self.pages as usize * PAGE_LEN;
        unmap(self.view, bytes);
        unmap(self.alias, bytes);
        if let Some(shadow) = self.shadow {
            unmap(shadow, bytes);
        }
    }
}

fn ignore_existing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

fn map(file: &File, bytes: usize) -> Result<NonNull<u8>, RegionError> {
    // SAFETY: a new mapping at a place of the kernel's choice.
    let at = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(RegionError::Refused("map", io::Error::last_os_error()));
    }
    Ok(NonNull::new(at.cast()).expect("mmap gives null only for a fixed address"))
}

/// Removes pages from the page cache, and so from all mappings.
fn punch(file: &File, pages: Range<u32>) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset, bytes) = (i64::from(pages.start), pages.len() as i64);
    let page = PAGE_LEN as i64;
    // SAFETY: a file of our own; the mappings stay.
    if unsafe { libc::fallocate(file.as_raw_fd(), mode, offset * page, bytes * page) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn unmap(at: NonNull<u8>, bytes: usize) {
    // SAFETY: a mapping of the region's own, which is being dropped; its users hold the region.
    unsafe { libc::munmap(at.as_ptr().cast(), bytes) };
}
