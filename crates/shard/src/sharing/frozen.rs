//! Freezing guest memory: its contents become files that any number of VMs map privately.
//!
//! The first freeze turns the memory's own file into the frozen one: from then on the VM maps it privately,
//! as every clone does. Later writes of the VM are in no file. The next freeze copies them into another file
//! (a *layer*), which is mapped over the first. So a clone of a clone shares with all its ancestors, and
//! frozen pages are never copied again. The kernel itself refuses changes of a frozen file (a seal).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;

use shard_api::saved::{FrozenMap, ImageName};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::extents::{ImageId, NOTHING, Run};
use super::mapper::Mapper;
use super::mapping::map_private;
use super::pagemap;
use super::pages::{PAGE_BYTES, Pages};
use crate::quiescer::Pause;

/// Number of pages whose page table entries are read at once.
const PAGEMAP_READ_PAGES: u64 = 32 << 10;
/// Written pages up to this far apart are put into a layer as one mapping, with the pages between them.
const JOIN_PAGES: u64 = 4;
/// Touched pages up to this far apart are reported as one run: reading the pages between costs less than
/// another request.
const TOUCHED_JOIN_PAGES: u64 = 16;

/// Files of a VM's frozen memory, which no process writes any more.
pub struct Frozen {
    /// The memory's file, then the layers.
    pub files: Vec<Arc<File>>,
    /// Place of each page.
    pub map: FrozenMap,
}

impl Mapper {
    /// Freezes the memory as it is now. The VM continues with private mappings.
    ///
    /// # Errors
    /// Fails if the host refuses a mapping or has no memory. The VM is unchanged and may continue.
    pub fn freeze(&self, _still: &Pause<'_>) -> io::Result<Frozen> {
        let mut pages = self.pages();
        let written = self.written(&pages)?;
        if pages.frozen {
            self.add_layer(&mut pages, written)?;
        } else {
            for range in written {
                self.restore(&mut pages, range)?;
            }
            self.map_file_privately(&pages)?;
            // Copies in the frozen file cost nothing beyond the file.
            pages.forget(0..u64::MAX);
            pages.frozen = true;
        }
        let mut files = vec![Arc::new(self.memory_file()?)];
        files.extend(pages.layers.iter().cloned());
        Ok(Frozen {
            files,
            map: FrozenMap {
                images: self
                    .images()
                    .iter()
                    .map(ImageName::of)
                    .collect::<io::Result<_>>()?,
                runs: pages.mapped.iter().collect(),
            },
        })
    }

    /// Adopts frozen memory whose first file is mapped privately already, and maps the rest over it. Called
    /// before anything runs.
    ///
    /// # Errors
    /// Fails if this VM does not have an image, or the image has changed.
    pub fn adopt(&self, layers: Vec<File>, map: &FrozenMap) -> io::Result<()> {
        let mut pages = self.pages();
        let own: Vec<_> = self
            .images()
            .iter()
            .map(ImageName::of)
            .collect::<io::Result<_>>()?;
        let known: Vec<_> = map
            .images
            .iter()
            .map(|name| own.iter().position(|own| own == name))
            .collect();
        pages.layers = layers.into_iter().map(Arc::new).collect();
        pages.frozen = true;
        for &(at, run) in &map.runs {
            let range = at..at.checked_add(run.pages).ok_or(io::ErrorKind::InvalidInput)?;
            if run.image == NOTHING {
                self.map_zero(&mut pages, at, run.pages)?;
                continue;
            }
            let number = usize::from(run.image);
            let (image, file) = match known.get(number) {
                Some(place) => {
                    let place = place.ok_or_else(|| {
                        io::Error::other("an image that its memory stands for was changed or replaced since")
                    })?;
                    (place, self.images()[place].as_raw_fd())
                }
                None => {
                    let layer = number - map.images.len();
                    let file = pages.layers.get(layer).ok_or(io::ErrorKind::InvalidInput)?;
                    (own.len() + layer, file.as_raw_fd())
                }
            };
            self.map_run(&range, run.first, file)?;
            let image = ImageId::try_from(image).map_err(|_| io::ErrorKind::InvalidInput)?;
            pages.mapped.insert(at, Run { image, ..run });
        }
        Ok(())
    }

    /// Returns the pages in this process's page table, which are those that the VM has touched, in runs with
    /// small gaps included.
    pub fn touched(&self) -> io::Result<Vec<(u64, u64)>> {
        let ranges = self.parts.iter().map(|part| part.range()).collect();
        let touched = self.find(ranges, pagemap::Entry::is_present)?;
        let runs = self.joined(touched, TOUCHED_JOIN_PAGES);
        Ok(runs
            .into_iter()
            .map(|run| (run.start, run.end - run.start))
            .collect())
    }

    /// Returns the memory's own file.
    pub(super) fn memory_file(&self) -> io::Result<File> {
        let region = self.memory.iter().next();
        let file = region
            .and_then(|region| region.file_offset())
            .map(|offset| offset.file());
        file.ok_or(io::ErrorKind::InvalidInput)?.try_clone()
    }

    /// Returns the pages that are in no file: written pages of private mappings.
    fn written(&self, pages: &Pages) -> io::Result<Vec<Range<u64>>> {
        let ranges: Vec<Range<u64>> = if pages.frozen {
            self.parts.iter().map(|part| part.range()).collect()
        } else {
            pages.mapped.iter().map(|(at, run)| at..at + run.pages).collect()
        };
        self.find(ranges, pagemap::Entry::is_private)
    }

    /// Returns the pages of `ranges` whose page table entries are `wanted`, in runs that do not cross from
    /// one range into another.
    fn find(
        &self,
        ranges: Vec<Range<u64>>,
        wanted: fn(pagemap::Entry) -> bool,
    ) -> io::Result<Vec<Range<u64>>> {
        let pagemap = self.pagemap.as_ref().ok_or_else(|| {
            io::Error::other("this process may not read its own page table (/proc/self/pagemap)")
        })?;
        let mut found: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let count = (range.end - at).min(PAGEMAP_READ_PAGES);
                let host = self.address(at, count).ok_or(io::ErrorKind::InvalidInput)?;
                for (page, entry) in (at..).zip(pagemap::read(pagemap, host as u64, count)?) {
                    if !wanted(entry) {
                        continue;
                    }
                    match found.last_mut() {
                        Some(last) if last.end == page && page != range.start => last.end += 1,
                        _ => found.push(page..page + 1),
                    }
                }
                at += count;
            }
        }
        Ok(found)
    }

    /// Writes the changed pages into a new layer.
    fn add_layer(&self, pages: &mut Pages, written: Vec<Range<u64>>) -> io::Result<()> {
        if written.is_empty() {
            return Ok(());
        }
        let number = self.images().len() + pages.layers.len();
        let image = ImageId::try_from(number)
            .ok()
            .filter(|image| *image != NOTHING)
            .ok_or_else(|| io::Error::other("the VM was cloned too often; start a new one"))?;
        let layer = sealable_file(c"guest-memory-layer")?;
        layer.set_len(self.parts.last().map_or(0, |part| part.range().end) * PAGE_BYTES)?;
        let joined = self.joined(written, JOIN_PAGES);
        for range in &joined {
            self.write_out(layer.as_raw_fd(), range)?;
        }
        for range in joined {
            self.map_run(&range, range.start, layer.as_raw_fd())?;
            let run = Run {
                pages: range.end - range.start,
                image,
                first: range.start,
            };
            pages.mapped.insert(range.start, run);
        }
        pages.layers.push(Arc::new(layer));
        Ok(())
    }

    /// Joins ranges that are at most `gap` pages apart, but never across two regions.
    fn joined(&self, ranges: Vec<Range<u64>>, gap: u64) -> Vec<Range<u64>> {
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            let starts_region = self.parts.iter().any(|part| part.first == range.start);
            match joined.last_mut() {
                Some(last) if range.start <= last.end + gap && !starts_region => last.end = range.end,
                _ => joined.push(range),
            }
        }
        joined
    }

    /// Maps the remaining pages privately, so that no write of the VM reaches the memory's file.
    fn map_file_privately(&self, pages: &Pages) -> io::Result<()> {
        for part in &self.parts {
            for gap in pages.mapped.gaps(part.range()) {
                self.map_run(&gap, gap.start, part.file)?;
            }
        }
        Ok(())
    }

    fn map_run(&self, range: &Range<u64>, first: u64, file: i32) -> io::Result<()> {
        let count = range.end - range.start;
        let wrong = io::ErrorKind::InvalidInput;
        let host = self.address(range.start, count).ok_or(wrong)?;
        let offset = first
            .checked_mul(PAGE_BYTES)
            .and_then(|offset| libc::off_t::try_from(offset).ok());
        let offset = offset.ok_or(wrong)?;
        map_private(host as u64, count * PAGE_BYTES, file, offset, self.advice)
    }
}

/// Creates a file in memory that [`seal`] can seal.
pub fn sealable_file(name: &std::ffi::CStr) -> io::Result<File> {
    // SAFETY: the name is a valid C string; the call touches no other memory.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: memfd_create has just given us this descriptor.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Forbids every holder of a frozen file to change it. The VM may run: the call may wait for the kernel to
/// release pages.
pub fn seal(file: &File) -> io::Result<()> {
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    // SAFETY: takes no pointers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
