//! Origins of the host's pages of guest memory, for `mem --explain`.
//!
//! The VM runs meanwhile, so a page that changes in this moment may be reported as before or after. Pages of
//! the memory's file are read by `pread`, which allocates no page where the guest gives one back at the same
//! time.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;

use shard_api::page_map::{HostPage, PART_PAGES_MAX, PageMapPart};

use super::extents::{ImageId, NOTHING, Run};
use super::fates::Fate;
use super::mapper::Mapper;
use super::mapping::Advice;
use super::page_cache::read_cached;
use super::pagemap::{self, Entry};
use super::pages::{PAGE_BYTES, Pages};

/// Number of pages whose content is read at once.
const BLOCK_PAGES: u64 = 64;
const ZERO_PAGE: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// The records of some pages.
struct Records {
    mapped: Vec<(u64, Run)>,
    /// Copies that may be unchanged, and whether kernel or initramfs are their origin. Later entries count
    /// more than earlier ones.
    copies: Vec<(u64, Run, bool)>,
    fates: Vec<Option<Fate>>,
    frozen: bool,
}

impl Records {
    fn of(pages: &Pages, range: &Range<u64>) -> Self {
        let loaded = pages
            .loaded
            .inside(range.clone())
            .map(|(at, run)| (at, run, true));
        let copies = [&pages.short, &pages.fresh, &pages.copies, &pages.chosen];
        let read = copies.into_iter().flat_map(|copies| copies.inside(range.clone()));
        // A segment of the kernel is recorded as a copy and as loaded.
        let is_loaded = |at: u64, run: &Run| {
            pages
                .loaded
                .inside(at..at + 1)
                .any(|found| found == (at, run.part(0, 1)))
        };
        let read = read.map(|(at, run)| (at, run, is_loaded(at, &run)));
        Self {
            mapped: pages.mapped.inside(range.clone()).collect(),
            copies: loaded.chain(read).collect(),
            fates: range.clone().map(|page| pages.fates.get(page)).collect(),
            frozen: pages.frozen,
        }
    }
}

/// An origin of a copy: image, page of the image, and whether kernel or initramfs are that image.
type Origin = (ImageId, u64, bool);

impl Mapper {
    /// Returns the origins of the VM's pages from page `from` on, of [`PART_PAGES_MAX`] pages at most.
    ///
    /// # Errors
    /// Fails if this process may not read its own page table or the memory's file.
    pub fn page_map(&self, from: u64) -> io::Result<PageMapPart> {
        let Some(part) = self.parts.iter().find(|part| from < part.range().end) else {
            return Ok(PageMapPart::default());
        };
        let start = from.max(part.first);
        let end = part.range().end.min(start.saturating_add(PART_PAGES_MAX));
        let range = start..end;
        let records = Records::of(&self.pages(), &range);
        let host = part.host + (start - part.first) * PAGE_BYTES;
        let pagemap = self.pagemap.as_ref().ok_or_else(|| {
            io::Error::other("this process may not read its own page table (/proc/self/pagemap)")
        })?;
        let entries: Vec<Entry> = pagemap::read(pagemap, host, end - start)?.collect();
        let mut found = vec![HostPage::Absent; (end - start) as usize];
        if records.frozen {
            for (found, entry) in found.iter_mut().zip(&entries) {
                *found = of_mapping(*entry, HostPage::Frozen);
            }
        } else {
            let region = self.memory_file()?;
            for data in data_ranges(part.file, &range)? {
                self.judge_copies(&records, &range, data, &mut found, |content, first| {
                    region.read_exact_at(content, first * PAGE_BYTES)
                })?;
            }
        }
        for (at, run) in &records.mapped {
            let untouched = match run.image {
                NOTHING => HostPage::Absent,
                image if usize::from(image) < self.images().len() => HostPage::Image,
                _ => HostPage::Frozen,
            };
            for page in *at..at + run.pages {
                let index = (page - start) as usize;
                found[index] = of_mapping(entries[index], untouched);
            }
            if run.image == NOTHING {
                let first = (at - start) as usize;
                for data in written_runs(&found[first..][..run.pages as usize], *at) {
                    self.judge_copies(&records, &range, data, &mut found, |content, first| {
                        self.copy_out(content, first)
                    })?;
                }
            }
        }
        for (page, found) in range.clone().zip(&mut found) {
            if *found == HostPage::Merged && self.advice != Advice::Scan {
                // Nothing merges memory that is not scanned.
                *found = HostPage::Written;
            }
            match found {
                HostPage::Written if self.holds_zeroes(page) => *found = HostPage::Zero,
                // The host has one page of zeroes for all.
                HostPage::Merged if self.holds_zeroes(page) => *found = HostPage::Absent,
                _ => {}
            }
        }
        let mut map = PageMapPart::default();
        for (page, host) in range.zip(found) {
            map.push(page, host);
        }
        let has_more = self.parts.iter().any(|part| end < part.range().end);
        map.next = has_more.then_some(end);
        Ok(map)
    }

    /// Judges the pages of `data`, which only this VM has, by their content, which `read` copies from a page
    /// on. `found` begins at the first page of `range`.
    fn judge_copies(
        &self,
        records: &Records,
        range: &Range<u64>,
        data: Range<u64>,
        found: &mut [HostPage],
        read: impl Fn(&mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut bytes = vec![0; (BLOCK_PAGES * PAGE_BYTES) as usize];
        let mut image_bytes = Vec::new();
        let mut at = data.start;
        while at < data.end {
            let block = at..data.end.min(at + BLOCK_PAGES);
            at = block.end;
            let pages = (block.end - block.start) as usize;
            let content = &mut bytes[..pages * PAGE_BYTES as usize];
            read(content, block.start)?;
            let origins = origins(&records.copies, &block);
            let first = (block.start - range.start) as usize;
            for (index, page) in content.chunks_exact(PAGE_BYTES as usize).enumerate() {
                let equal = origins[index].map(|(image, number, loaded)| {
                    image_bytes.clear();
                    let file = self.image(image);
                    let cached = file.map_or(0, |file| read_cached(&file, number, 1, &mut image_bytes));
                    (loaded, (cached == 1).then(|| image_bytes == page))
                });
                found[first + index] = judge(equal, page == ZERO_PAGE, records.fates[first + index]);
            }
        }
        Ok(())
    }

    /// Copies guest memory from page `first` on. The guest may write meanwhile.
    fn copy_out(&self, content: &mut [u8], first: u64) -> io::Result<()> {
        let pages = content.len() as u64 / PAGE_BYTES;
        let host = self.address(first, pages).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: `pages` pages are mapped at `host`, as many as `content` has, and the two do not
        // overlap. A function of the C library copies them, without a Rust reference to the guest's.
        unsafe {
            libc::memcpy(
                content.as_mut_ptr().cast(),
                host.cast(),
                (pages * PAGE_BYTES) as usize,
            )
        };
        Ok(())
    }

    /// Returns whether a page of a private mapping holds only zeroes. The guest may write meanwhile.
    fn holds_zeroes(&self, page: u64) -> bool {
        let Some(host) = self.address(page, 1) else {
            return false;
        };
        // SAFETY: both are mapped and have a page. The bytes are compared by a function of the C library,
        // without a Rust reference to those of the guest.
        unsafe { libc::memcmp(host.cast(), ZERO_PAGE.as_ptr().cast(), ZERO_PAGE.len()) == 0 }
    }
}

/// Judges a page of a private mapping by its page table entry.
fn of_mapping(entry: Entry, untouched: HostPage) -> HostPage {
    if entry.is_merged() {
        HostPage::Merged
    } else if entry.is_private() {
        HostPage::Written
    } else if entry.is_present() {
        untouched
    } else {
        HostPage::Absent
    }
}

/// Judges a page of the memory's file. `equal` is whether it came from kernel or initramfs, and whether it
/// equals its origin, as far as the page cache has that.
fn judge(equal: Option<(bool, Option<bool>)>, is_zero: bool, fate: Option<Fate>) -> HostPage {
    match (equal, fate) {
        (Some((true, Some(true))), _) => HostPage::Loaded,
        (Some((false, Some(true))), _) => HostPage::Copied,
        _ if is_zero => HostPage::Zero,
        (Some((_, Some(false))), _) | (None, Some(Fate::Overwritten)) => HostPage::Overwritten,
        (Some((_, None)), _) | (None, Some(Fate::Cold)) => HostPage::Cold,
        (None, Some(Fate::Unaligned)) => HostPage::Unaligned,
        (None, None) => HostPage::Unknown,
    }
}

/// Returns the origin of each page of `block`.
fn origins(copies: &[(u64, Run, bool)], block: &Range<u64>) -> Vec<Option<Origin>> {
    let mut origins = vec![None; (block.end - block.start) as usize];
    for (at, run, loaded) in copies {
        for page in block.start.max(*at)..block.end.min(at + run.pages) {
            origins[(page - block.start) as usize] = Some((run.image, run.first + (page - at), *loaded));
        }
    }
    origins
}

/// Returns the runs of written pages in `found`, whose first is the guest's page `first`.
fn written_runs(found: &[HostPage], first: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let written = (first..)
        .zip(found)
        .filter(|(_, host)| **host == HostPage::Written);
    for (page, _) in written {
        match runs.last_mut() {
            Some(last) if last.end == page => last.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}

/// Returns the parts of `range` for which the file has memory, on the swap space too.
fn data_ranges(file: RawFd, range: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut ranges = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let start = match seek(file, at, libc::SEEK_DATA)? {
            Some(start) if start < range.end => start,
            _ => break,
        };
        let end = seek(file, start, libc::SEEK_HOLE)?.map_or(range.end, |end| end.min(range.end));
        ranges.push(start..end);
        at = end;
    }
    Ok(ranges)
}

/// Returns the first page from `page` on that is memory or a hole; none if there is none.
fn seek(file: RawFd, page: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let offset = (page * PAGE_BYTES) as libc::off_t;
    // SAFETY: the call takes no pointers, and no other code uses the file's position.
    match u64::try_from(unsafe { libc::lseek(file, offset, whence) }) {
        Ok(found) => Ok(Some(found / PAGE_BYTES)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_judged_by_its_content_first_and_by_its_record_then() {
        for (equal, is_zero, fate, expected) in [
            (Some((true, Some(true))), true, None, HostPage::Loaded),
            (
                Some((false, Some(true))),
                false,
                Some(Fate::Cold),
                HostPage::Copied,
            ),
            (Some((false, Some(false))), false, None, HostPage::Overwritten),
            (Some((true, Some(false))), true, None, HostPage::Zero),
            (Some((true, None)), false, None, HostPage::Cold),
            (None, true, Some(Fate::Unaligned), HostPage::Zero),
            (None, false, Some(Fate::Overwritten), HostPage::Overwritten),
            (None, false, Some(Fate::Cold), HostPage::Cold),
            (None, false, Some(Fate::Unaligned), HostPage::Unaligned),
            (None, false, None, HostPage::Unknown),
        ] {
            assert_eq!(
                judge(equal, is_zero, fate),
                expected,
                "{equal:?} {is_zero} {fate:?}"
            );
        }
    }
}
