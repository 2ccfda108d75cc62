//! Maps image pages over guest memory and removes the mappings.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};

use locks::IgnorePoison;
use nix::sys::stat::fstat;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::extents::{ImageId, NOTHING, Run};
use super::fates::Fates;
use super::leases::{self, LEASED_FIRST, Leases};
use super::mapping::{self, Advice};
use super::metrics::{Metrics, add};
use super::pages::{PAGE_BYTES, Pages, RamRegion};
use super::read_parts::ReadPart;
use crate::memory::GuestRam;

/// Size of the host's huge pages, bytes, and their number of pages.
const HUGE_BYTES: u64 = 2 << 20;
const HUGE_PAGES: u64 = HUGE_BYTES / PAGE_BYTES;
/// Greatest number of mappings of one VM by sharing; the kernel's default limit of a process is 65,530.
const RUNS_MAX_DEFAULT: usize = 32 << 10;

/// Record of one VM's mapped pages, and the means to change them.
pub struct Mapper {
    pub(super) parts: Vec<RamRegion>,
    /// Keeps the memory mapped.
    pub(super) memory: GuestRam,
    images: Vec<File>,
    /// This process's page table, if it may be read.
    pub(super) pagemap: Option<File>,
    pub(super) advice: Advice,
    runs_max: usize,
    /// Guest pages in huge pages of the host.
    huge_pages: Mutex<Vec<Range<u64>>>,
    pages: Mutex<Pages>,
    /// Whether the host's leases last long enough.
    leases_usable: bool,
    /// Files of shared folders. Locked after `pages`.
    leases: Mutex<Leases>,
    /// Counters of sharing.
    pub metrics: Metrics,
}

/// Time at which a run is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapTime {
    /// Before the guest starts.
    AtBoot,
    /// During a read, instead of filling the guest's buffer.
    AtRead,
    /// In the background, in place of a copy.
    InBackground,
}

/// Result of an attempt to map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// The pages map the image.
    Yes,
    /// The limit of mappings is reached: the pages are unchanged.
    AtLimit,
}

/// An open file whose pages may be mapped.
pub(super) enum ImageFile<'a> {
    /// A file of a disk, of the kernel or of the initramfs.
    OfDisk(&'a File),
    /// A leased file of a shared folder.
    Leased(Arc<File>),
}

impl Deref for ImageFile<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        match self {
            Self::OfDisk(file) => file,
            Self::Leased(file) => file,
        }
    }
}

impl Mapper {
    /// Creates the mapper of `memory`, over which pages of `images` may be mapped. `advice` is that of the
    /// memory. Returns none for memory whose pages are larger than an image's. Called before the sandbox
    /// closes.
    pub fn new(memory: &GuestRam, images: Vec<File>, advice: Advice) -> Option<Arc<Self>> {
        let mut parts = Vec::new();
        for region in memory.iter() {
            let file = region.file_offset()?;
            // Page g of memory is at offset g of the file.
            if file.start() != region.start_addr().0 || !region.len().is_multiple_of(PAGE_BYTES) {
                return None;
            }
            parts.push(RamRegion {
                host: region.as_ptr() as u64,
                first: region.start_addr().0 / PAGE_BYTES,
                pages: region.len() / PAGE_BYTES,
                file: file.file().as_raw_fd(),
            });
        }
        let end = parts.last().map_or(0, |part| part.range().end);
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count")
            .ok()
            .and_then(|text| text.trim().parse::<usize>().ok());
        Some(Arc::new(Self {
            parts,
            memory: memory.clone(),
            images,
            pagemap: File::open("/proc/self/pagemap").ok(),
            advice,
            runs_max: limit.map_or(RUNS_MAX_DEFAULT, |limit| limit / 2),
            huge_pages: Mutex::default(),
            pages: Mutex::new(Pages {
                fates: Fates::up_to(end),
                ..Pages::default()
            }),
            leases_usable: leases::are_usable(),
            leases: Mutex::default(),
            metrics: Metrics::default(),
        }))
    }

    /// Lets the host's scanner merge equal pages of the memory, which is then in no file. Memory that is
    /// `new`, without content, is made so. Called before anything runs.
    ///
    /// # Errors
    /// Fails if the host's kernel has no scanner.
    pub fn begin_scan(&self, new: bool) -> io::Result<()> {
        let mut pages = self.pages();
        for part in &self.parts {
            if new {
                self.map_zero(&mut pages, part.first, part.pages)?;
            }
            mapping::scan(part.host, part.pages * PAGE_BYTES)?;
        }
        // The memory's file has nothing, and gets nothing: writes stay in private mappings.
        pages.frozen = true;
        Ok(())
    }

    /// Returns the file of an image, or of a shared folder.
    pub(super) fn image(&self, image: ImageId) -> Option<ImageFile<'_>> {
        if image >= LEASED_FIRST {
            return self.leases().file(image).map(ImageFile::Leased);
        }
        self.images.get(usize::from(image)).map(ImageFile::OfDisk)
    }

    /// Takes a leased file of a shared folder, whose sender is not trusted. Returns its number if its pages
    /// will be shared.
    pub(super) fn lend(&self, file: File) -> Option<ImageId> {
        let may_map = self.leases_usable && !self.pages().frozen;
        may_map.then(|| self.leases().add(file)).flatten()
    }

    pub(super) fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().ignore_poison()
    }

    /// Prepares for a read that is about to be copied to these parts, and records the origin of its bytes.
    ///
    /// # Errors
    /// Fails if the host has no memory for it.
    pub(super) fn before_copy(&self, parts: &[ReadPart]) -> io::Result<()> {
        let mut pages = self.pages();
        for part in parts {
            if let ReadPart::Share { page, run, .. } = *part {
                self.make_room(&mut pages, page..page + run.pages)?;
            }
        }
        self.remember(&mut pages, parts);
        Ok(())
    }

    /// Records the origin of the bytes of these parts.
    pub(super) fn remember(&self, pages: &mut Pages, parts: &[ReadPart]) {
        for part in parts {
            if let ReadPart::Share { page, run, .. } = *part {
                pages.remember(page, run);
                add(&self.metrics.remembered, run.pages);
            }
        }
    }

    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().ignore_poison()
    }

    /// Returns the guest page at an address of this process, if it is RAM, and the number of pages of RAM
    /// from there on.
    pub(super) fn page_at(&self, host: u64) -> Option<(u64, u64)> {
        self.parts.iter().find_map(|part| {
            let page = host.checked_sub(part.host)? / PAGE_BYTES;
            (page < part.pages).then(|| (part.first + page, part.pages - page))
        })
    }

    /// Returns the address of a guest page in this process, and its region.
    pub(super) fn host_of(&self, page: u64) -> Option<(u64, &RamRegion)> {
        self.parts.iter().find_map(|part| {
            let index = page.checked_sub(part.first)?;
            (index < part.pages).then(|| (part.host + index * PAGE_BYTES, part))
        })
    }

    /// Returns the address of `pages` guest pages from `page` on in this process.
    pub(super) fn address(&self, page: u64, pages: u64) -> Option<*mut u8> {
        let (host, part) = self.host_of(page)?;
        (page + pages <= part.first + part.pages).then_some(host as *mut u8)
    }

    /// Maps `run` over the guest's pages from `at` on. Their content is lost. During a read the pages are
    /// populated at once, so that the guest's first access does not fault. In the background the memory
    /// file's pages stay until [`Mapper::give_back`], which needs no pause of the VM.
    pub(super) fn map(
        &self,
        pages: &mut Pages,
        at: u64,
        run: Run,
        when: MapTime,
        counter: &AtomicU64,
    ) -> io::Result<Mapped> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
        let (host, part) = self.host_of(at).ok_or_else(wrong)?;
        let image = self.image(run.image).ok_or_else(wrong)?;
        let range = at..at + run.pages;
        if range.end > part.first + part.pages {
            return Err(wrong());
        }
        pages.forget(range.clone());
        // A run that is cut in two costs one more mapping.
        if pages.mapped.len() + 2 > self.runs_max {
            add(&self.metrics.at_limit, run.pages);
            return Ok(Mapped::AtLimit);
        }
        let bytes = run.pages * PAGE_BYTES;
        let offset = libc::off_t::try_from(run.first * PAGE_BYTES).map_err(|_| wrong())?;
        if let Err(error) = mapping::map_private(host, bytes, image.as_raw_fd(), offset, self.advice) {
            if error.raw_os_error() == Some(libc::ENOMEM) {
                add(&self.metrics.at_limit, run.pages);
                return Ok(Mapped::AtLimit);
            }
            return Err(error);
        }
        if when == MapTime::AtRead
            && let Err(error) = mapping::populate(host, bytes)
        {
            // The image can't be read: the pages become plain again, and the read fails.
            if pages.frozen {
                self.map_zero(pages, at, run.pages)?;
            } else {
                self.plain(part, range.clone())?;
                pages.mapped.remove(range);
            }
            return Err(error);
        }
        if when != MapTime::InBackground && !pages.frozen && !pages.mapped.cover(range.clone()) {
            mapping::punch(part.file, &range);
        }
        pages.mapped.insert(at, run);
        add(counter, run.pages);
        Ok(Mapped::Yes)
    }

    /// Records that guest memory from `start` to `end`, in bytes, is in huge pages, which include both ends.
    pub fn mark_huge(&self, start: u64, end: u64) {
        let range = start / HUGE_BYTES * HUGE_PAGES..end.div_ceil(HUGE_BYTES) * HUGE_PAGES;
        self.huge_pages.lock().ignore_poison().push(range);
    }

    /// Returns whether mapping the run would split a huge page.
    pub(super) fn splits(&self, at: u64, run: &Run) -> bool {
        let huge = self.huge_pages.lock().ignore_poison();
        huge.iter()
            .any(|range| at < range.end && range.start < at + run.pages)
    }

    /// Releases the memory file's pages under a mapping of the background to the host, if the mapping still
    /// exists.
    pub(super) fn give_back(&self, pages: &Pages, at: u64, run: Run) {
        if pages.frozen {
            return;
        }
        let mapped = pages.mapped.inside(at..at + run.pages);
        for (at, run) in mapped {
            if let Some((_, part)) = self.host_of(at) {
                mapping::punch(part.file, &(at..at + run.pages));
            }
        }
    }

    /// Records that a file was loaded at `at`. Maps its whole pages over the copy now (`map`), or remembers
    /// them for the background, if file and memory have the same offset in a page. Pages that can't be mapped
    /// remain a copy.
    pub fn loaded(&self, file: &File, at: u64, offset: u64, bytes: u64, map: bool) -> io::Result<()> {
        let Some((page, run)) = self.whole_pages(file, at, offset, bytes) else {
            return Ok(());
        };
        if !map {
            self.pages().remember(page, run);
            return Ok(());
        }
        let counter = &self.metrics.mapped_at_boot;
        match self.map(&mut self.pages(), page, run, MapTime::AtBoot, counter) {
            // The file system can't map files.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            result => result.map(|_| ()),
        }
    }

    /// Records that a file was loaded at `at`, for [`Mapper::page_map`] alone.
    pub fn note_loaded(&self, file: &File, at: u64, offset: u64, bytes: u64) {
        if let Some((page, run)) = self.whole_pages(file, at, offset, bytes) {
            self.pages().loaded.insert(page, run);
        }
    }

    /// Returns the whole pages of guest memory from `at` on that are whole pages of an image, with these.
    fn whole_pages(&self, file: &File, at: u64, offset: u64, bytes: u64) -> Option<(u64, Run)> {
        if at % PAGE_BYTES != offset % PAGE_BYTES {
            return None;
        }
        let start = at.next_multiple_of(PAGE_BYTES);
        let end = at.saturating_add(bytes) / PAGE_BYTES * PAGE_BYTES;
        let image = self.image_of(file).filter(|_| start < end)?;
        let run = Run {
            pages: (end - start) / PAGE_BYTES,
            image,
            first: (offset + (start - at)) / PAGE_BYTES,
        };
        Some((start / PAGE_BYTES, run))
    }

    /// Returns the image that is the same file, however that was opened.
    pub fn image_of(&self, file: impl AsFd) -> Option<ImageId> {
        let same = fstat(file).ok()?;
        let index = self.images.iter().position(|image| {
            fstat(image).is_ok_and(|own| (own.st_dev, own.st_ino) == (same.st_dev, same.st_ino))
        })?;
        ImageId::try_from(index).ok()
    }

    /// Returns the images in the order of their numbers.
    pub fn images(&self) -> &[File] {
        &self.images
    }

    /// Releases the pages of `range`, which lie in one region and which the guest has given up: their content
    /// is arbitrary afterwards. Makes all of them plain memory; mapped ones become zeroes. Returns true if
    /// nothing remains to be done: in frozen memory, later writes are released here.
    pub fn release(&self, range: Range<u64>) -> io::Result<bool> {
        let mut pages = self.pages();
        pages.forget(range.clone());
        pages.loaded.remove(range.clone());
        if pages.frozen {
            let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
            let count = range.end - range.start;
            let host = self.address(range.start, count).ok_or_else(wrong)?;
            let result = mapping::discard_written(host as u64, count * PAGE_BYTES);
            add(&self.metrics.released, count);
            return result.map(|()| true);
        }
        let mapped: Vec<_> = pages.mapped.inside(range).collect();
        for (at, run) in mapped {
            let Some((_, part)) = self.host_of(at) else {
                continue;
            };
            self.plain(part, at..at + run.pages)?;
            pages.mapped.remove(at..at + run.pages);
            add(&self.metrics.released, run.pages);
        }
        Ok(false)
    }

    /// Makes mapped pages plain memory, all at once, before a read overwrites them. Otherwise the kernel
    /// would copy their lost content, at a fault for each page, and the mapping would be trimmed later.
    fn make_room(&self, pages: &mut Pages, range: Range<u64>) -> io::Result<()> {
        if pages.frozen {
            return Ok(());
        }
        let mapped: Vec<_> = pages.mapped.inside(range).collect();
        for (at, run) in mapped {
            let Some((host, part)) = self.host_of(at) else {
                continue;
            };
            self.plain(part, at..at + run.pages)?;
            pages.mapped.remove(at..at + run.pages);
            add(&self.metrics.restored, run.pages);
            mapping::populate_for_writing(host, run.pages * PAGE_BYTES);
        }
        Ok(())
    }

    /// Makes mapped pages plain memory with the same content. The VM is paused.
    pub(super) fn restore(&self, pages: &mut Pages, range: Range<u64>) -> io::Result<()> {
        let (_, part) = self.host_of(range.start).ok_or(io::ErrorKind::InvalidInput)?;
        self.write_out(part.file, &range)?;
        let count = range.end - range.start;
        self.plain(part, range.clone())?;
        pages.mapped.remove(range);
        add(&self.metrics.restored, count);
        Ok(())
    }

    /// Makes mapped pages, whose content the file no longer has, plain memory. The VM is paused.
    pub(super) fn give_up(&self, pages: &mut Pages, range: Range<u64>) -> io::Result<()> {
        let (_, part) = self.host_of(range.start).ok_or(io::ErrorKind::InvalidInput)?;
        self.plain(part, range.clone())?;
        pages.mapped.remove(range);
        Ok(())
    }

    /// Maps zeroes over guest pages, which then have no place in a file.
    pub(super) fn map_zero(&self, pages: &mut Pages, at: u64, count: u64) -> io::Result<()> {
        let host = self.address(at, count).ok_or(io::ErrorKind::InvalidInput)?;
        mapping::map_zero(host as u64, count * PAGE_BYTES, self.advice)?;
        let run = Run {
            pages: count,
            image: NOTHING,
            first: at,
        };
        pages.mapped.insert(at, run);
        Ok(())
    }

    /// Writes guest pages into a file at their own offsets. The VM is paused.
    pub(super) fn write_out(&self, file: RawFd, range: &Range<u64>) -> io::Result<()> {
        let count = range.end - range.start;
        let host = self
            .address(range.start, count)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let offset = (range.start * PAGE_BYTES) as libc::off_t;
        mapping::write_out(host as u64, count * PAGE_BYTES, file, offset)
    }

    /// Maps the memory file again.
    fn plain(&self, part: &RamRegion, range: Range<u64>) -> io::Result<()> {
        let host = part.host + (range.start - part.first) * PAGE_BYTES;
        let bytes = (range.end - range.start) * PAGE_BYTES;
        let offset = (range.start * PAGE_BYTES) as libc::off_t;
        mapping::map_shared(host, bytes, part.file, offset, self.advice)
    }

    /// Returns the parts of a range of guest memory, in bytes and in order, where pages of an image's file
    /// are mapped.
    pub fn of_images(&self, bytes: &Range<u64>) -> Vec<Range<u64>> {
        let pages = self.pages();
        let range = bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES);
        let runs = pages.mapped.inside(range);
        // The other numbers are those of frozen memory, and one number is unused.
        let is_file =
            |image| usize::from(image) < self.images.len() || (LEASED_FIRST..NOTHING).contains(&image);
        runs.filter(|(_, run)| is_file(run.image))
            .map(|(at, run)| at * PAGE_BYTES..(at + run.pages) * PAGE_BYTES)
            .collect()
    }

    /// Returns the number of mappings that sharing has now.
    pub(super) fn mappings(&self) -> usize {
        self.pages().mapped.len()
    }

    /// Returns the greatest number of mappings of sharing.
    pub(super) fn mappings_max(&self) -> usize {
        self.runs_max
    }

    /// Returns the current numbers of runs, for `inspect`.
    pub fn status(&self) -> serde_json::Value {
        let mut status = self.metrics.snapshot();
        let pages = self.pages();
        status["mapped_pages"] = pages.mapped.pages().into();
        status["mappings"] = pages.mapped.len().into();
        status["mappings_max"] = self.runs_max.into();
        status["leased_files"] = self.leases().len().into();
        status["candidates"] = pages.candidates().into();
        status
    }

    #[cfg(test)]
    pub(super) fn limit(&mut self, runs_max: usize) {
        self.runs_max = runs_max;
    }
}
