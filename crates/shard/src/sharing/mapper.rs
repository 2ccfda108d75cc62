//! Lays image pages over guest memory and takes them away again.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::stat::fstat;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::extents::{ImageId, NOTHING, Run};
use super::mapping;
use super::metrics::{Metrics, add};
use super::pages::{PAGE_BYTES, Pages, Part};
use crate::memory::GuestRam;

/// Size of the host's huge pages, and how many pages each is.
const HUGE_BYTES: u64 = 2 << 20;
const HUGE_PAGES: u64 = HUGE_BYTES / PAGE_BYTES;
/// Mappings that one VM may cost by sharing; the kernel's default limit for a process is 65,530.
const RUNS_MAX_DEFAULT: usize = 32 << 10;

/// The map of one VM and the means to change it.
pub struct Mapper {
    pub(super) parts: Vec<Part>,
    /// Keeps the memory mapped.
    pub(super) memory: GuestRam,
    images: Vec<File>,
    /// This process's page table, if it may be read.
    pub(super) pagemap: Option<File>,
    huge: bool,
    runs_max: usize,
    /// Guest pages that were put in huge pages of the host.
    whole: Mutex<Vec<Range<u64>>>,
    pages: Mutex<Pages>,
    /// What was counted.
    pub metrics: Metrics,
}

/// When a run is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Before the guest starts.
    AtBoot,
    /// Instead of filling the guest's buffer.
    AtRead,
    /// In the place of a copy.
    Later,
}

/// What became of an attempt to map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// The pages are the image's.
    Yes,
    /// The limit of mappings is reached: the pages are as they were.
    AtLimit,
}

impl Mapper {
    /// A mapper for `memory`, over which pages of `images` may be laid. `huge` says that the memory asks for
    /// transparent huge pages. `None` for memory whose pages are larger than an image's. Called before the
    /// sandbox closes.
    pub fn new(memory: &GuestRam, images: Vec<File>, huge: bool) -> Option<Arc<Self>> {
        let mut parts = Vec::new();
        for region in memory.iter() {
            let file = region.file_offset()?;
            // DESIGN: page g is at offset g.
            if file.start() != region.start_addr().0 || !region.len().is_multiple_of(PAGE_BYTES) {
                return None;
            }
            parts.push(Part {
                host: region.as_ptr() as u64,
                first: region.start_addr().0 / PAGE_BYTES,
                pages: region.len() / PAGE_BYTES,
                file: file.file().as_raw_fd(),
            });
        }
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count")
            .ok()
            .and_then(|text| text.trim().parse::<usize>().ok());
        Some(Arc::new(Self {
            parts,
            memory: memory.clone(),
            images,
            pagemap: File::open("/proc/self/pagemap").ok(),
            huge,
            runs_max: limit.map_or(RUNS_MAX_DEFAULT, |limit| limit / 2),
            whole: Mutex::default(),
            pages: Mutex::default(),
            metrics: Metrics::default(),
        }))
    }

    /// The image's file.
    pub(super) fn image(&self, image: ImageId) -> Option<&File> {
        self.images.get(usize::from(image))
    }

    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest page at an address of this process, if it is RAM, and how many pages of RAM there are from
    /// it on.
    pub(super) fn page_at(&self, host: u64) -> Option<(u64, u64)> {
        self.parts.iter().find_map(|part| {
            let page = host.checked_sub(part.host)? / PAGE_BYTES;
            (page < part.pages).then(|| (part.first + page, part.pages - page))
        })
    }

    /// The address in this process of a guest page, and the part it is in.
    pub(super) fn host_of(&self, page: u64) -> Option<(u64, &Part)> {
        self.parts.iter().find_map(|part| {
            let index = page.checked_sub(part.first)?;
            (index < part.pages).then(|| (part.host + index * PAGE_BYTES, part))
        })
    }

    /// The address in this process of `pages` guest pages from `page` on.
    pub(super) fn address(&self, page: u64, pages: u64) -> Option<*mut u8> {
        let (host, part) = self.host_of(page)?;
        (page + pages <= part.first + part.pages).then_some(host as *mut u8)
    }

    /// Lays `run` over the guest's pages from `at` on. Their content before is lost. At a read they are
    /// brought in at once, so that the guest need not wait at its first touch; in the background the memory
    /// file's pages stay until [`Mapper::give_back`], which need not hold the VM still.
    pub(super) fn map(
        &self,
        pages: &mut Pages,
        at: u64,
        run: Run,
        when: When,
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
        // Cutting a run in two costs another.
        if pages.mapped.len() + 2 > self.runs_max {
            add(&self.metrics.at_limit, run.pages);
            return Ok(Mapped::AtLimit);
        }
        let bytes = run.pages * PAGE_BYTES;
        let offset = libc::off_t::try_from(run.first * PAGE_BYTES).map_err(|_| wrong())?;
        if let Err(error) = mapping::lay(host, bytes, image.as_raw_fd(), offset) {
            if error.raw_os_error() == Some(libc::ENOMEM) {
                add(&self.metrics.at_limit, run.pages);
                return Ok(Mapped::AtLimit);
            }
            return Err(error);
        }
        if when == When::AtRead
            && let Err(error) = mapping::bring_in(host, bytes)
        {
            // The image can't be read: the pages are plain again, and the read fails.
            if pages.frozen {
                self.nothing(pages, at, run.pages)?;
            } else {
                self.plain(part, range.clone())?;
                pages.mapped.remove(range);
            }
            return Err(error);
        }
        if when != When::Later && !pages.frozen && !pages.mapped.cover(range.clone()) {
            mapping::punch(part.file, &range);
        }
        pages.mapped.insert(at, run);
        add(counter, run.pages);
        Ok(Mapped::Yes)
    }

    /// Guest memory from `start` to `end`, in bytes, is in huge pages, to which both ends belong.
    pub fn keep_whole(&self, start: u64, end: u64) {
        let range = start / HUGE_BYTES * HUGE_PAGES..end.div_ceil(HUGE_BYTES) * HUGE_PAGES;
        self.whole
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(range);
    }

    /// Whether mapping the run would split a huge page.
    pub(super) fn splits(&self, at: u64, run: &Run) -> bool {
        let whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        whole
            .iter()
            .any(|range| at < range.end && range.start < at + run.pages)
    }

    /// Gives the memory file's pages under a mapping made [`When::Later`] back to the host, if it is still
    /// there.
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

    /// A file was loaded at `at`. Lays its whole pages over the copy now (`map`), or remembers them for the
    /// background, where file and memory agree about the place in a page. What can't be mapped stays the copy
    /// it is.
    pub fn loaded(&self, file: &File, at: u64, offset: u64, bytes: u64, map: bool) -> io::Result<()> {
        if at % PAGE_BYTES != offset % PAGE_BYTES {
            return Ok(());
        }
        let start = at.next_multiple_of(PAGE_BYTES);
        let end = at.saturating_add(bytes) / PAGE_BYTES * PAGE_BYTES;
        let Some(image) = self.image_of(file).filter(|_| start < end) else {
            return Ok(());
        };
        let run = Run {
            pages: (end - start) / PAGE_BYTES,
            image,
            first: (offset + (start - at)) / PAGE_BYTES,
        };
        if !map {
            self.pages().remember(start / PAGE_BYTES, run);
            return Ok(());
        }
        let counter = &self.metrics.mapped_at_boot;
        match self.map(&mut self.pages(), start / PAGE_BYTES, run, When::AtBoot, counter) {
            // A file system that can't map files.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            result => result.map(|_| ()),
        }
    }

    /// The image that is this file, whichever way it was opened.
    pub fn image_of(&self, file: impl AsFd) -> Option<ImageId> {
        let same = fstat(file).ok()?;
        let index = self.images.iter().position(|image| {
            fstat(image).is_ok_and(|own| (own.st_dev, own.st_ino) == (same.st_dev, same.st_ino))
        })?;
        ImageId::try_from(index).ok()
    }

    /// The images, in the order of their numbers.
    pub fn images(&self) -> &[File] {
        &self.images
    }

    /// The guest has given the pages of `range`, which lie in one region, up: whatever it finds there later
    /// will do. Makes every one plain memory, mapped ones of zeroes. True when no more is to be done: of
    /// frozen memory, what was written since is given back here.
    pub fn release(&self, range: Range<u64>) -> io::Result<bool> {
        let mut pages = self.pages();
        pages.forget(range.clone());
        if pages.frozen {
            let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
            let count = range.end - range.start;
            let host = self.address(range.start, count).ok_or_else(wrong)?;
            let result = mapping::forget_written(host as u64, count * PAGE_BYTES);
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

    /// A read is about to overwrite guest pages: makes mapped ones among them plain memory first, all at
    /// once. Otherwise the kernel would copy what is about to be lost, at a fault for each, and leave the
    /// mapping to be trimmed later.
    pub(super) fn make_room(&self, pages: &mut Pages, range: Range<u64>) -> io::Result<()> {
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
            mapping::bring_in_to_write(host, run.pages * PAGE_BYTES);
        }
        Ok(())
    }

    /// Makes mapped pages plain memory with the content they have. The VM is held still.
    pub(super) fn restore(&self, pages: &mut Pages, range: Range<u64>) -> io::Result<()> {
        let (_, part) = self.host_of(range.start).ok_or(io::ErrorKind::InvalidInput)?;
        self.write_out(part.file, &range)?;
        let count = range.end - range.start;
        self.plain(part, range.clone())?;
        pages.mapped.remove(range);
        add(&self.metrics.restored, count);
        Ok(())
    }

    /// Lays nothing over guest pages: zeroes, and no place in any file.
    pub(super) fn nothing(&self, pages: &mut Pages, at: u64, count: u64) -> io::Result<()> {
        let host = self.address(at, count).ok_or(io::ErrorKind::InvalidInput)?;
        mapping::lay_nothing(host as u64, count * PAGE_BYTES)?;
        let run = Run {
            pages: count,
            image: NOTHING,
            first: at,
        };
        pages.mapped.insert(at, run);
        Ok(())
    }

    /// Writes guest pages into a file, each at the guest's own offset. The VM is held still.
    pub(super) fn write_out(&self, file: RawFd, range: &Range<u64>) -> io::Result<()> {
        let count = range.end - range.start;
        let host = self
            .address(range.start, count)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let offset = (range.start * PAGE_BYTES) as libc::off_t;
        mapping::write_out(host as u64, count * PAGE_BYTES, file, offset)
    }

    /// Shows the memory file again.
    fn plain(&self, part: &Part, range: Range<u64>) -> io::Result<()> {
        let host = part.host + (range.start - part.first) * PAGE_BYTES;
        let bytes = (range.end - range.start) * PAGE_BYTES;
        let offset = (range.start * PAGE_BYTES) as libc::off_t;
        mapping::show(host, bytes, part.file, offset, self.huge)
    }

    /// The parts of a range of guest memory, in bytes, where pages of an image's file are mapped; in order.
    pub fn of_images(&self, bytes: &Range<u64>) -> Vec<Range<u64>> {
        let pages = self.pages();
        let range = bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES);
        let runs = pages.mapped.inside(range);
        // Numbers from the images' on are frozen memory's, and one is nobody's.
        runs.filter(|(_, run)| usize::from(run.image) < self.images.len())
            .map(|(at, run)| at * PAGE_BYTES..(at + run.pages) * PAGE_BYTES)
            .collect()
    }

    /// Mappings that sharing costs now.
    pub(super) fn mappings(&self) -> usize {
        self.pages().mapped.len()
    }

    /// Mappings that sharing may cost.
    pub(super) fn mappings_max(&self) -> usize {
        self.runs_max
    }

    /// Runs now, for `inspect`.
    pub fn status(&self) -> serde_json::Value {
        let mut status = self.metrics.snapshot();
        let pages = self.pages();
        status["mapped_pages"] = pages.mapped.pages().into();
        status["mappings"] = pages.mapped.len().into();
        status["mappings_max"] = self.runs_max.into();
        status["candidates"] = pages.candidates().into();
        status
    }

    #[cfg(test)]
    pub(super) fn limit(&mut self, runs_max: usize) {
        self.runs_max = runs_max;
    }
}
