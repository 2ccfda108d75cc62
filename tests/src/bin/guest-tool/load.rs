//! A random load on a disk that checks every byte it reads.
//!
//! It makes the accesses that could confuse a monitor which shares pages: buffers that start in the middle of
//! a page, several pieces in one request, the same piece twice, the same block into different pages and
//! different blocks into the same page, pages that were just read written to another place, another thread
//! that writes into the buffer of a read.

use std::fs::{File, OpenOptions};
use std::io::{Error, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use guest_tests::pattern::{Numbers, SECTOR_BYTES, Sectors};

use crate::Fault;

/// Longest request.
const RUN_SECTORS: u64 = 128;
/// Size of the memory in which buffers lie, at multiples of a sector.
const POOL_BYTES: usize = 8 << 20;

/// Counts of the load.
#[derive(Default)]
struct Done {
    requests: u64,
    checked: u64,
}

/// Loads `device`, whose sectors are as [`Sectors::base`] makes them, for `seconds`, and then reads all of
/// it.
pub fn load(device: &str, seed: u64, seconds: u64) -> Result<String, Fault> {
    let mut open = OpenOptions::new();
    let mut cached = open.read(true).write(true).open(device)?;
    let direct = open.custom_flags(libc::O_DIRECT).open(device)?;
    let sectors = cached.seek(SeekFrom::End(0))? / SECTOR_BYTES as u64;
    let mut load = Load {
        direct,
        cached,
        disk: Sectors::base(sectors),
        numbers: Numbers::new(seed),
        seed,
        pool: Pool::new()?,
        done: Done::default(),
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        load.step()?;
    }
    load.verify()?;
    Ok(format!(
        "{} requests, {} sectors checked",
        load.done.requests, load.done.checked
    ))
}

struct Load {
    direct: File,
    cached: File,
    disk: Sectors,
    numbers: Numbers,
    seed: u64,
    pool: Pool,
    done: Done,
}

impl Load {
    fn step(&mut self) -> Result<(), Fault> {
        self.done.requests += 1;
        match self.numbers.below(16) {
            0..=4 => self.read(true),
            5..=7 => self.read(false),
            8..=9 => self.write(true),
            10 => self.write(false),
            11 => self.copy(),
            12 => self.pieces(),
            13 => self.race(),
            14 => self.zero(),
            _ => self.forget(),
        }
    }

    /// A random range: the first sector, and the number of sectors.
    fn run(&mut self) -> (u64, u64) {
        let count = 1 + self.numbers.below(RUN_SECTORS);
        (self.numbers.below(self.disk.len() - count + 1), count)
    }

    fn file(&self, direct: bool) -> &File {
        if direct { &self.direct } else { &self.cached }
    }

    fn read(&mut self, direct: bool) -> Result<(), Fault> {
        let (first, count) = self.run();
        let place = self.pool.place(&mut self.numbers, count);
        let file = if direct { &self.direct } else { &self.cached };
        file.read_exact_at(self.pool.at(place, count), first * SECTOR_BYTES as u64)?;
        self.check(place, first, count)
    }

    fn check(&mut self, place: usize, first: u64, count: u64) -> Result<(), Fault> {
        self.disk.check(first, self.pool.at(place, count))?;
        self.done.checked += count;
        Ok(())
    }

    fn write(&mut self, direct: bool) -> Result<(), Fault> {
        let (first, count) = self.run();
        let place = self.pool.place(&mut self.numbers, count);
        self.disk.renew(first, count, self.seed);
        self.disk.fill(first, self.pool.at(place, count));
        let bytes = self.pool.at(place, count).as_ptr();
        // SAFETY: the pool's pages stay mapped as long as `self`, and no thread writes them during the call.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, count as usize * SECTOR_BYTES) };
        Ok(self
            .file(direct)
            .write_all_at(bytes, first * SECTOR_BYTES as u64)?)
    }

    /// Copies from one place of the disk to another, through pages without another user.
    fn copy(&mut self) -> Result<(), Fault> {
        let (from, count) = self.run();
        let to = self.numbers.below(self.disk.len() - count + 1);
        let place = self.pool.place(&mut self.numbers, count);
        self.direct
            .read_exact_at(self.pool.at(place, count), from * SECTOR_BYTES as u64)?;
        self.direct
            .write_all_at(self.pool.at(place, count), to * SECTOR_BYTES as u64)?;
        self.check(place, from, count)?;
        self.disk.copy(from, to, count);
        Ok(())
    }

    /// Reads one request with four pieces, the last of which is the first's memory again.
    fn pieces(&mut self) -> Result<(), Fault> {
        const EACH: u64 = 9;
        let first = self.numbers.below(self.disk.len() - 4 * EACH + 1);
        // Apart, so that only the first and the last overlap.
        let places: Vec<usize> = (0..3)
            .map(|third| self.pool.third(third, &mut self.numbers))
            .collect();
        let each_bytes = EACH as usize * SECTOR_BYTES;
        let pieces: Vec<libc::iovec> = [places[0], places[1], places[2], places[0]]
            .map(|place| libc::iovec {
                iov_base: self.pool.at(place, EACH).as_mut_ptr().cast(),
                iov_len: each_bytes,
            })
            .to_vec();
        let offset = libc::off_t::try_from(first * SECTOR_BYTES as u64)?;
        // SAFETY: all four pieces are inside the pool, which lives on.
        let count = unsafe { libc::preadv(self.direct.as_raw_fd(), pieces.as_ptr(), 4, offset) };
        if count != 4 * each_bytes as isize {
            return Err(format!("read {count} bytes in four pieces: {}", Error::last_os_error()).into());
        }
        self.check(places[1], first + EACH, EACH)?;
        self.check(places[2], first + 2 * EACH, EACH)?;
        // The device may write either one last, sector by sector.
        for sector in 0..EACH {
            let place = places[0] + sector as usize * SECTOR_BYTES;
            let earlier = self.check(place, first + sector, 1);
            let later = self.check(place, first + 3 * EACH + sector, 1);
            earlier.or(later)?;
        }
        Ok(())
    }

    /// Reads while another thread writes into the read's buffer: the buffer's contents are undefined then,
    /// but the disk and all other memory are as before.
    fn race(&mut self) -> Result<(), Fault> {
        let (first, count) = self.run();
        let place = self.pool.place(&mut self.numbers, count);
        let words = self.pool.words(place, count);
        let over = AtomicBool::new(false);
        let offset = first * SECTOR_BYTES as u64;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = 0;
                while !over.load(Ordering::Relaxed) {
                    value += 1;
                    for word in words.iter().step_by(61) {
                        word.store(value, Ordering::Relaxed);
                    }
                }
            });
            let bytes = count as usize * SECTOR_BYTES;
            let target = words.as_ptr().cast_mut().cast();
            let whole = (0..4).all(|_| {
                // SAFETY: the words are inside the pool; as atomics, others may change them.
                let got =
                    unsafe { libc::pread(self.direct.as_raw_fd(), target, bytes, offset as libc::off_t) };
                got == bytes as isize
            });
            let error = Error::last_os_error();
            over.store(true, Ordering::Relaxed);
            if whole { Ok(()) } else { Err(error) }
        })?;
        self.direct.read_exact_at(self.pool.at(place, count), offset)?;
        self.check(place, first, count)
    }

    fn zero(&mut self) -> Result<(), Fault> {
        let (first, count) = self.run();
        let flags = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        let offset = libc::off_t::try_from(first * SECTOR_BYTES as u64)?;
        let bytes = libc::off_t::try_from(count * SECTOR_BYTES as u64)?;
        // SAFETY: a call with numbers only.
        if unsafe { libc::fallocate(self.cached.as_raw_fd(), flags, offset, bytes) } != 0 {
            return Err(format!("zeroing {count} sectors from {first}: {}", Error::last_os_error()).into());
        }
        self.disk.zero(first, count);
        Ok(())
    }

    /// Gives a part of the buffers, or of the page cache, back to the kernel.
    fn forget(&mut self) -> Result<(), Fault> {
        if self.numbers.below(8) == 0 {
            self.cached.sync_all()?;
            std::fs::write("/proc/sys/vm/drop_caches", "1")?;
        } else {
            self.pool.forget(&mut self.numbers);
        }
        Ok(())
    }

    /// Reads the whole disk, past the page cache and through it.
    fn verify(&mut self) -> Result<(), Fault> {
        for direct in [true, false] {
            let mut first = 0;
            while first < self.disk.len() {
                let count = RUN_SECTORS.min(self.disk.len() - first);
                let place = self.pool.place(&mut self.numbers, count);
                let file = if direct { &self.direct } else { &self.cached };
                file.read_exact_at(self.pool.at(place, count), first * SECTOR_BYTES as u64)?;
                self.check(place, first, count)?;
                first += count;
            }
        }
        Ok(())
    }
}

/// The buffers' memory.
struct Pool {
    memory: *mut u8,
}

impl Pool {
    fn new() -> Result<Self, Error> {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), POOL_BYTES, protection, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        Ok(Self {
            memory: memory.cast(),
        })
    }

    /// A random place for `sectors`.
    fn place(&self, numbers: &mut Numbers, sectors: u64) -> usize {
        let places = (POOL_BYTES / SECTOR_BYTES) as u64 - sectors + 1;
        numbers.below(places) as usize * SECTOR_BYTES
    }

    /// A random place in one third of the pool, for up to [`RUN_SECTORS`].
    fn third(&self, third: usize, numbers: &mut Numbers) -> usize {
        let sectors = (POOL_BYTES / SECTOR_BYTES / 3) as u64;
        let start = third * sectors as usize * SECTOR_BYTES;
        start + numbers.below(sectors - RUN_SECTORS) as usize * SECTOR_BYTES
    }

    fn at(&mut self, place: usize, sectors: u64) -> &mut [u8] {
        let bytes = sectors as usize * SECTOR_BYTES;
        assert!(place + bytes <= POOL_BYTES);
        // SAFETY: inside the mapping, by the line above; borrowed for as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(place), bytes) }
    }

    fn words<'a>(&self, place: usize, sectors: u64) -> &'a [AtomicU64] {
        let bytes = sectors as usize * SECTOR_BYTES;
        assert!(place + bytes <= POOL_BYTES && place.is_multiple_of(8));
        // SAFETY: inside the mapping and aligned, by the line above; the pool is never unmapped.
        unsafe { std::slice::from_raw_parts(self.memory.add(place).cast(), bytes / 8) }
    }

    /// Gives 64 KiB of pages back to the kernel.
    fn forget(&self, numbers: &mut Numbers) {
        const BYTES: usize = 64 << 10;
        let place = numbers.below((POOL_BYTES / BYTES) as u64) as usize * BYTES;
        // SAFETY: whole pages inside the mapping, which read as zeroes from now on.
        unsafe { libc::madvise(self.memory.add(place).cast(), BYTES, libc::MADV_DONTNEED) };
    }
}
