//! Processes, threads and mappings come and go on every CPU.
//!
//! All threads of a process use its mappings: when one changes, its thread has to interrupt the CPUs of the
//! others before it goes on. Each thread maps one page after another, each with a larger number in it, at one
//! address, and publishes the number that is there now; no thread may see an earlier one after that.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::pattern::mix;

use crate::Fault;
use crate::memory::{PAGE_BYTES, Region};
use crate::pinned::{alarm_after, pin};

/// Pages in turn: a page that is seen too late has not been written anew yet.
const PAGES: u64 = 64;
const SPARE_S: u64 = 60;

/// A page that one thread changes.
struct Page {
    file: File,
    address: usize,
    /// The lowest number that the page may have now.
    number: AtomicU64,
}

/// Counts of one thread, or of all.
#[derive(Default)]
struct Done {
    processes: u64,
    threads: u64,
    mappings: u64,
    reads: u64,
}

/// Runs for `seconds` on CPUs 0 to `cpus` - 1.
pub fn churn(cpus: usize, seconds: u64) -> Result<String, Fault> {
    alarm_after(seconds + SPARE_S);
    let place = Region::new(cpus * PAGE_BYTES)?;
    let pages = (0..cpus).map(|cpu| Page::new(place.address() + cpu * PAGE_BYTES));
    let pages = pages.collect::<Result<Vec<_>, _>>()?;
    let until = Instant::now() + Duration::from_secs(seconds);
    let parts = thread::scope(|scope| {
        let pages = &pages;
        let threads: Vec<_> = (0..cpus)
            .map(|cpu| scope.spawn(move || work(pages, cpu, until)))
            .collect();
        let ends = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?);
        ends.collect::<Result<Vec<Done>, String>>()
    })?;
    let sum = |of: fn(&Done) -> u64| parts.iter().map(of).sum::<u64>();
    Ok(format!(
        "processes={} threads={} mappings={} reads={}",
        sum(|done| done.processes),
        sum(|done| done.threads),
        sum(|done| done.mappings),
        sum(|done| done.reads)
    ))
}

fn work(pages: &[Page], me: usize, until: Instant) -> Result<Done, String> {
    pin(me)?;
    let mut done = Done::default();
    while Instant::now() < until {
        let status = (done.processes % 200) as i32 + 1;
        let child = Command::new("/proc/self/exe")
            .args(["quit", &status.to_string()])
            .status();
        let child = child.map_err(|error| format!("a process on CPU {me}: {error}"))?;
        if child.code() != Some(status) {
            return Err(format!(
                "a process on CPU {me} ended with {child} instead of {status}"
            ));
        }
        done.processes += 1;
        for _ in 0..4 {
            let number = done.threads;
            let answer = thread::spawn(move || mix(number)).join();
            if answer.ok() != Some(mix(number)) {
                return Err(format!("a thread on CPU {me} gave something else"));
            }
            done.threads += 1;
        }
        for _ in 0..50 {
            pages[me]
                .change()
                .map_err(|error| format!("a mapping on CPU {me}: {error}"))?;
            done.mappings += 1;
            for (cpu, page) in pages.iter().enumerate() {
                let least = page.number.load(Ordering::Acquire);
                let found = page.read();
                if found < least {
                    return Err(format!(
                        "CPU {me} saw {found} in the page of CPU {cpu} after {least}"
                    ));
                }
                done.reads += 1;
            }
        }
    }
    Ok(done)
}

impl Page {
    fn new(address: usize) -> Result<Self, Fault> {
        // SAFETY: the name is a string with a zero byte; the descriptor is new and has no other owner.
        let file = unsafe {
            let descriptor = libc::memfd_create(c"churn".as_ptr(), libc::MFD_CLOEXEC);
            if descriptor < 0 {
                return Err(std::io::Error::last_os_error().into());
            }
            File::from_raw_fd(descriptor)
        };
        file.set_len(PAGES * PAGE_BYTES as u64)?;
        let page = Self {
            file,
            address,
            number: AtomicU64::new(0),
        };
        page.change()?;
        Ok(page)
    }

    /// Maps the page's next number. Only this page's own thread calls it.
    fn change(&self) -> std::io::Result<()> {
        let next = self.number.load(Ordering::Relaxed) + 1;
        let offset = next % PAGES * PAGE_BYTES as u64;
        self.file.write_all_at(&next.to_le_bytes(), offset)?;
        // SAFETY: replaces the mapping that this function, or the region, made there; readers find one or the
        // other.
        let mapped = unsafe {
            libc::mmap(
                self.address as *mut libc::c_void,
                PAGE_BYTES,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.file.as_raw_fd(),
                offset as i64,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        self.number.store(next, Ordering::Release);
        Ok(())
    }

    fn read(&self) -> u64 {
        // SAFETY: a page is mapped there from the start to the end of the process; an aligned word of it is
        // read whole.
        unsafe { (self.address as *const u64).read_volatile() }
    }
}
