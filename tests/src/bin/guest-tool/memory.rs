//! Patterns in memory: every page gets its own word; the pages around the hole below 4 GiB are filled
//! completely.
//!
//! A page's place in guest-physical memory comes from `/proc/self/pagemap`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use guest_tests::pattern::mix;

use crate::Fault;

pub const PAGE_BYTES: usize = 4096;
const FOUR_GIB: u64 = 4 << 30;
/// Number of pages on each side of the hole that are filled completely.
const WHOLE_PAGES: usize = 2048;
/// Memory left to the guest's kernel and agent.
const SPARE_BYTES: u64 = 8 << 20;

/// Anonymous memory of the process.
pub struct Region {
    start: *mut u64,
    bytes: usize,
}

impl Region {
    /// A new region of `bytes`, a whole number of pages, without written pages.
    pub fn new(bytes: usize) -> Result<Self, Fault> {
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        // Fewer faults, each slow in a lab. SAFETY: advice on our own mapping; without it all works the same.
        unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
        Ok(Self {
            start: start.cast(),
            bytes,
        })
    }

    /// Address of the mapping's first byte.
    pub fn address(&self) -> usize {
        self.start as usize
    }

    /// Number of its pages.
    pub fn pages(&self) -> usize {
        self.bytes / PAGE_BYTES
    }

    /// The words of a page.
    pub fn page(&mut self, number: usize) -> &mut [u64] {
        assert!(number < self.pages());
        let words = PAGE_BYTES / 8;
        // SAFETY: inside the mapping, by the assertion, and borrowed mutably with it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(number * words), words) }
    }
}

fn word(page: usize, index: usize) -> u64 {
    mix(((page as u64) << 9) | index as u64)
}

fn available_bytes() -> Result<u64, Fault> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: u64 = line
        .ok_or("no MemAvailable")?
        .trim()
        .trim_end_matches(" kB")
        .parse()?;
    Ok(kib << 10)
}

/// Takes `mib` MiB, or all but 8 MiB of the free memory when that is less; writes, reads back. Returns how
/// many MiB lay below the hole and above 4 GiB, and how many pages at its borders were filled completely.
pub fn check(mib: u64) -> Result<String, Fault> {
    let bytes = (mib << 20).min(available_bytes()?.saturating_sub(SPARE_BYTES));
    let mut region = Region::new((bytes >> 21 << 21) as usize)?;
    for page in 0..region.pages() {
        region.page(page)[0] = word(page, 0);
    }
    let places = places(&region)?;
    let whole = nearest_to_hole(&places);
    for page in whole.iter().copied() {
        for (index, value) in region.page(page).iter_mut().enumerate() {
            *value = word(page, index);
        }
    }
    for (page, place) in places.iter().enumerate() {
        let words = if whole.contains(&page) { PAGE_BYTES / 8 } else { 1 };
        for index in 0..words {
            let (found, wanted) = (region.page(page)[index], word(page, index));
            if found != wanted {
                let place = place + index as u64 * 8;
                return Err(format!("guest-physical {place:#x}: wrote {wanted:#x}, read {found:#x}").into());
            }
        }
    }
    let below = places.iter().filter(|place| **place < FOUR_GIB).count();
    let above = places.len() - below;
    Ok(format!(
        "below={} above={} whole={}",
        below >> 8,
        above >> 8,
        whole.len()
    ))
}

/// The pages closest to the hole on each side.
fn nearest_to_hole(places: &[u64]) -> BTreeSet<usize> {
    let mut pages: Vec<usize> = (0..places.len()).collect();
    pages.sort_unstable_by_key(|page| places[*page]);
    let border = pages.partition_point(|page| places[*page] < FOUR_GIB);
    let from = border.saturating_sub(WHOLE_PAGES);
    let to = (border + WHOLE_PAGES).min(pages.len());
    pages[from..to].iter().copied().collect()
}

/// Guest-physical address of each page.
fn places(region: &Region) -> Result<Vec<u64>, Fault> {
    let map = File::open("/proc/self/pagemap")?;
    let mut bytes = vec![0; region.pages() * 8];
    map.read_exact_at(&mut bytes, region.start as u64 / PAGE_BYTES as u64 * 8)?;
    bytes
        .chunks_exact(8)
        .map(|entry| {
            let entry = u64::from_le_bytes(entry.try_into()?);
            let frame = entry & ((1 << 55) - 1);
            if entry >> 63 == 0 || frame == 0 {
                return Err("a page is not there, or /proc/self/pagemap hides its place".into());
            }
            Ok(frame * PAGE_BYTES as u64)
        })
        .collect()
}

/// Takes `mib` MiB, keeps them for `seconds`, checks them, gives them back.
pub fn hold(mib: usize, seconds: u64) -> Result<String, Fault> {
    let mut region = Region::new(mib << 20)?;
    for page in 0..region.pages() {
        region.page(page)[0] = word(page, 0);
    }
    println!("held");
    std::thread::sleep(std::time::Duration::from_secs(seconds));
    for page in 0..region.pages() {
        if region.page(page)[0] != word(page, 0) {
            return Err(format!("page {page} changed").into());
        }
    }
    Ok("unchanged".into())
}
