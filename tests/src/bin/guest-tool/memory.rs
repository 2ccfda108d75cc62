//! Patterns in memory: every page gets its own word; the pages around the hole below 4 GiB are filled whole.
//!
//! A page's place in guest-physical memory comes from `/proc/self/pagemap`, the hole from `/proc/iomem`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use guest_tests::pattern::mix;

use crate::Fault;

const PAGE_BYTES: usize = 4096;
const FOUR_GIB: u64 = 4 << 30;
/// Pages closer to the hole than this are filled whole.
const WINDOW_BYTES: u64 = 32 << 20;

/// Anonymous memory of the process.
struct Region {
    start: *mut u64,
    bytes: usize,
}

impl Region {
    fn new(bytes: usize) -> Result<Self, Fault> {
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

    fn pages(&self) -> usize {
        self.bytes / PAGE_BYTES
    }

    fn page(&mut self, number: usize) -> &mut [u64] {
        assert!(number < self.pages());
        let words = PAGE_BYTES / 8;
        // SAFETY: inside the mapping, by the assertion, and borrowed mutably with it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(number * words), words) }
    }
}

fn word(page: usize, index: usize) -> u64 {
    mix(((page as u64) << 9) | index as u64)
}

/// End of the RAM that ends closest below 4 GiB.
fn hole_start() -> Result<u64, Fault> {
    let map = fs::read_to_string("/proc/iomem")?;
    let ends = map
        .lines()
        .filter(|line| line.contains("System RAM"))
        .filter_map(|line| {
            let (_, end) = line.split(" : ").next()?.trim().split_once('-')?;
            u64::from_str_radix(end, 16).ok().map(|last| last + 1)
        });
    ends.filter(|end| *end <= FOUR_GIB)
        .max()
        .ok_or_else(|| format!("no RAM in /proc/iomem:\n{map}").into())
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

/// Takes all memory but `spare_mib`, writes, reads back. Says how many MiB lay below the hole, above 4 GiB, and in
/// the two windows at its borders.
pub fn check_all(spare_mib: u64) -> Result<String, Fault> {
    let bytes = available_bytes()?
        .checked_sub(spare_mib << 20)
        .ok_or("less memory than the spare")?;
    let bytes = (bytes >> 21 << 21) as usize;
    let mut region = Region::new(bytes)?;
    for page in 0..region.pages() {
        region.page(page)[0] = word(page, 0);
    }
    let places = places(&region)?;
    let hole = hole_start()?;
    let window = |place: u64| {
        place + WINDOW_BYTES >= hole && place < hole || (FOUR_GIB..FOUR_GIB + WINDOW_BYTES).contains(&place)
    };
    for (page, _) in places.iter().enumerate().filter(|(_, place)| window(**place)) {
        for (index, value) in region.page(page).iter_mut().enumerate() {
            *value = word(page, index);
        }
    }
    let (mut below, mut above, mut under_hole, mut over_hole) = (0u64, 0u64, 0u64, 0u64);
    for (page, place) in places.iter().enumerate() {
        let whole = window(*place);
        let words = if whole { PAGE_BYTES / 8 } else { 1 };
        for index in 0..words {
            let (found, wanted) = (region.page(page)[index], word(page, index));
            if found != wanted {
                return Err(format!(
                    "guest-physical {:#x}: wrote {wanted:#x}, read {found:#x}",
                    place + index as u64 * 8
                )
                .into());
            }
        }
        if *place < FOUR_GIB {
            below += 1;
            under_hole += u64::from(whole);
        } else {
            above += 1;
            over_hole += u64::from(whole);
        }
    }
    let mib = |pages: u64| pages >> 8;
    Ok(format!(
        "below={} above={} under_hole={} over_hole={}",
        mib(below),
        mib(above),
        mib(under_hole),
        mib(over_hole)
    ))
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
